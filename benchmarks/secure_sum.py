"""What secure aggregation costs: bytes and seconds of processor time of a cycle, for cohorts of 10 and 100.

`python benchmarks/secure_sum.py` writes results/secure_sum.md. Keys are those of a federation (P-384). Devices do not
train, and most send the upload of another, which takes the server as long; tests/secure_aggregation checks sums.
Processor time is of one core; devices of a federation work at the same time, each on its own machine.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedcluster.flower.certificates import sign_with, verify_by
from fedcluster.secure_aggregation.device import Participant
from fedcluster.secure_aggregation.messages import Session
from fedcluster.secure_aggregation.server import Sum

MODELS = {"MLP, MNIST": 199_210, "AlexNet, CIFAR-10": 1_387_786}
COHORTS = (10, 100)
MEASURED = 3  # devices whose masks are timed
SESSION = Session(run="benchmark", round=0, cycle=0, phase=0)


class Cycle:
    """A cycle of `count` devices, of which `gone` go away before they upload."""

    def __init__(self, count: int, size: int, gone: int) -> None:
        pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        private = {f"{k:03d}": ec.generate_private_key(ec.SECP384R1()) for k in range(count)}
        self.verify = verify_by({key.public_key().public_bytes(*pem): name for name, key in private.items()})
        self.devices = {name: Participant(name, SESSION, sign_with(key), self.verify) for name, key in private.items()}
        self.size, self.gone = size, sorted(private)[count - gone :]
        self.up, self.down = dict.fromkeys(private, 0), dict.fromkeys(private, 0)
        self.seconds = dict.fromkeys(private, 0.0)

    def ask(self, stage: str, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        for name, content in requests.items():
            began = time.process_time()
            reply = self.devices[name].answer(stage, content)
            self.count(name, content, reply, time.process_time() - began)
            yield name, reply

    def masked(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        upload = b""
        for position, (name, content) in enumerate(requests.items()):
            if name in self.gone:
                continue
            began = time.process_time()
            if position < MEASURED:
                upload = self.devices[name].mask(content, np.zeros(self.size, np.uint64))
            else:
                self.devices[name].mask(content, np.zeros(1, np.uint64))
            self.count(name, content, upload, time.process_time() - began)
            yield name, upload

    def count(self, name: str, content: bytes, reply: bytes, seconds: float) -> None:
        self.down[name] += len(content)
        self.up[name] += len(reply)
        self.seconds[name] += seconds

    def run(self) -> tuple[float, float, float, float]:
        """Seconds of the slowest device and of the server, and bytes up and down of a device that stays."""
        weights = dict.fromkeys(self.devices, 1 / len(self.devices))
        began = time.process_time()
        sum_ = Sum(SESSION, weights, self.size, self.verify, 2 / 3, 3)
        requests = sum_.ask_updates(self.ask("share", sum_.share_keys(self.ask("advertise", sum_.advertise()))))
        for name, content in self.masked(requests):
            sum_.add(name, content)
        sum_.finish(self.ask("unmask", sum_.unmask(self.ask("confirm", sum_.confirm()))))
        total = time.process_time() - began
        return (
            max(self.seconds.values()),
            total - sum(self.seconds.values()),
            max(self.up.values()),
            max(self.down.values()),
        )


def main() -> None:
    lines = [
        "| model | cohort | upload, against a plain one | other downloads | device | server | server, a tenth gone |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, size in MODELS.items():
        for count in COHORTS:
            device, server, up, down = Cycle(count, size, 0).run()
            _, later, _, _ = Cycle(count, size, count // 10).run()
            seconds = f"{device:.2f} s | {server:.2f} s | {later:.2f} s"
            lines.append(f"| {model} | {count} | {up / 4 / size:.2f} times | {down / 1000:.0f} KB | {seconds} |")
            print(lines[-1], flush=True)
    path = Path(__file__).parent / "results" / "secure_sum.md"
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
