"""Clients without a key, on loopback, that connect, complete the TLS handshake and send nothing."""

import socket
import ssl
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


class Crowd:
    """`size` connections, half from one address and half from many. Those that are closed are opened again, a few at a
    time, until there have been `most` connections. All are closed at the end."""

    def __init__(self, port: int, size: int, most: int) -> None:
        self.port, self.most, self.count = port, most, 0
        self.lines: list[socket.socket | None] = [None] * size
        self.anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.anyone.check_hostname, self.anyone.verify_mode = False, ssl.CERT_NONE
        self.full, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.crowd)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self.thread.join()

    def crowd(self) -> None:
        while not self.over.is_set() and self.count < self.most:
            came = 0
            for k, line in enumerate(self.lines):
                if line is None or gone(line):
                    if line is not None:
                        line.close()
                    self.lines[k] = self.connect("127.0.0.1" if k % 2 else f"127.0.1.{k % 250}")
                    self.count, came = self.count + 1, came + 1
                if self.over.is_set() or (self.full.is_set() and came >= 20):
                    break
            self.full.set()
            self.over.wait(0.5)
        self.over.wait(600)
        for line in self.lines:
            if line is not None:
                line.close()

    def connect(self, source: str) -> socket.socket | None:
        with suppress(OSError):
            plain = socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(source, 0))
            try:
                return self.anyone.wrap_socket(plain)
            except OSError:
                plain.close()
        return None


def gone(line: socket.socket) -> bool:
    line.settimeout(0)
    try:
        return line.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
