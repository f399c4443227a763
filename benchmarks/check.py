"""Has the engine become slower? Ours and one rival in turn, and the ratio of their times beside the committed one.

    make bench-check        three minutes; ends with 1 when the ratio has fallen by more than a quarter

Ratios are compared, not seconds: the rival runs on the same machine in the same minutes.
"""

import json
import sys
from statistics import median
from typing import Any

from bench import HERE, SPACE, measure

RIVAL, MODEL, REPEATS, LEAST = "torch", "mlp", 3, 0.75


def ratio(runs: list[dict[str, Any]]) -> float:
    """How many times longer the rival takes."""

    def middle(name: str) -> float:
        mine = [run for run in runs if run["contestant"] == name and run["model"] == MODEL]
        return float(median(second for run in mine for second in run["seconds"]))

    return middle(RIVAL) / middle("fedcluster")


def main() -> None:
    committed = ratio(json.loads((HERE / "results" / "bench.json").read_text())["runs"])
    runs = []
    for _ in range(REPEATS):
        for name in ("fedcluster", RIVAL):
            result = measure(name, MODEL, SPACE / "bench.npz")
            if result is None:
                sys.exit(f"{name} failed")
            runs.append({"contestant": name, **result})
    now = ratio(runs)
    print(f"{RIVAL} takes {now:.2f} times as long as ours; when the results were committed, {committed:.2f} times")
    sys.exit(now < LEAST * committed and "the engine has become slower")


if __name__ == "__main__":
    main()
