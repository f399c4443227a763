"""The whole campaign, before a release: `make torture`, or `python -m torture [--seed N] [--minutes N]`.

Three campaigns share the time: mutated inputs, runs that are killed and damaged, and a federation under attack. Each
runs in a process of its own, prints its counts, and fails the whole if it found a defect. The time is a lower bound: a
campaign finishes the case that it has begun, and a federation is attacked in each way at least once.
"""

import argparse
import subprocess
import sys
import time

CAMPAIGNS = {"inputs": 0.35, "runs": 0.35, "federation": 0.3}  # shares of the time


def main() -> None:
    parser = argparse.ArgumentParser(prog="torture", description="Attack inputs, runs and a federation, and count.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of all cases (default 0).")
    parser.add_argument("--minutes", type=float, default=20.0, help="How long to attack in all (default 20).")
    options = parser.parse_args()
    failed = []
    for name, share in CAMPAIGNS.items():
        seconds = 60 * options.minutes * share
        print(f"torture: {name}, seed {options.seed}, {seconds:.0f} s", flush=True)
        began = time.monotonic()
        words = [sys.executable, "-m", f"torture.{name}", str(options.seed), str(seconds)]
        code = subprocess.run(words, check=False).returncode
        print(f"torture: {name} {'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        failed += [name] * (code != 0)
    sys.exit(f"torture: defects in {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
