"""The report on a run while it trains, served on this machine's loopback address.

The page receives the run's data as server-sent events, whenever the run has written something. Nothing that a browser
does reaches the run: the server reads the run's folder, answers GET only, and only if the request names this host, so
that no web site can have its own name point here (DNS rebinding).
"""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedcluster.errors import BadExperiment
from fedcluster.report.collect import is_run
from fedcluster.report.page import DIGITS, Content, data_of, encode, render
from fedcluster.runs.metrics import Line
from fedcluster.state import State
from fedcluster.training.callbacks import Callback
from fedcluster.training.setup import Setup

LOOPBACK = "127.0.0.1"
EVERY = 0.5  # seconds between looks at the folder, at least,
SHARE = 20  # and so many times what reading it took, so that the run loses little
BEAT = 10.0  # seconds after which a silent connection is tried
ENDING = 3.0  # seconds for browsers to receive the last state
FILES = (
    "run.json",
    "metrics.jsonl",
    "cycles.jsonl",
    "devices.jsonl",
    "fleet.json",
    "model.safetensors",
    "diverged.txt",
)


class Live(Callback):
    """Serves the report on the run in a folder. Port 0 takes any free port.

    As a callback it begins with the run: worker processes are forked before that, while this process has one thread. It
    ends with its context, after the run has written everything.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder, self.ended, self.clients = folder, threading.Event(), 0
        self.lock = threading.Condition()
        self.seen: tuple[Any, ...] | None = None
        self.text, self.seconds = "", 0.0
        server = self

        class Answers(Handler):
            live = server

        try:
            self.http = ThreadingHTTPServer((LOOPBACK, port), Answers)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadExperiment(
                f"--live-port {port} cannot be used ({reason}): choose another, or leave it out"
            ) from None
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"

    def __enter__(self) -> Self:
        return self

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        self.thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the last state, then stop."""
        self.ended.set()
        if self.thread.is_alive():
            with self.lock:
                self.lock.wait_for(lambda: self.clients == 0, ENDING)
            self.http.shutdown()
        self.http.server_close()

    def data(self) -> str:
        """The page's data as JSON, read again only if the run has written since."""
        with self.lock:
            now = (*signature(self.folder), self.ended.is_set())  # at the end the run lets go of its folder's lock
            if now != self.seen:
                began = time.perf_counter()
                runs = [self.folder] if is_run(self.folder) else []
                self.text = encode(data_of(Content(self.folder.name, runs=runs)) | {"live": True}, DIGITS[0])
                self.seconds, self.seen = time.perf_counter() - began, now
            return self.text

    def hosts(self) -> set[str]:
        """What a browser on this machine calls this server."""
        return {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}


def signature(folder: Path) -> tuple[Any, ...]:
    """What changes whenever a run writes."""
    found: list[tuple[int, int] | None] = []
    for name in FILES:
        try:
            about = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((about.st_size, about.st_mtime_ns))
    return tuple(found)


class Handler(BaseHTTPRequestHandler):
    """Answers / with the page, and /events with the stream of its data."""

    live: Live

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.live.hosts():
            self.send_error(403, "this server answers on its loopback address only")
        elif self.path == "/":
            self.answer("text/html; charset=utf-8", render(self.live.data()).encode())
        elif self.path == "/events":
            self.stream()
        else:
            self.send_error(404)

    def answer(self, kind: str, content: bytes | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        if content is not None:
            self.wfile.write(content)

    def stream(self) -> None:
        """The data now, after every change, and when the run has ended. A browser that has gone ends it."""
        live, sent, beat = self.live, None, time.monotonic()
        with live.lock:
            live.clients += 1
        try:
            self.answer("text/event-stream")
            while True:
                ended = live.ended.is_set()
                now = signature(live.folder)
                if now != sent or ended:
                    self.send("end" if ended else "change", live.data())
                    sent, beat = now, time.monotonic()
                elif time.monotonic() - beat > BEAT:
                    self.wfile.write(b": still here\n\n")
                    beat = time.monotonic()
                if ended:
                    return
                live.ended.wait(max(EVERY, SHARE * live.seconds))
        except OSError:
            pass
        finally:
            with live.lock:
                live.clients -= 1
                live.lock.notify_all()

    def send(self, event: str, data: str) -> None:
        self.wfile.write(f"event: {event}\ndata: {data}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to the run's progress."""
