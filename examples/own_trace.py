"""A trace format of one's own: a function that yields (device, start, end), in seconds from midnight UTC.

The file charging.txt has lines such as `phone-07 22:15-06:40`, the hours at which a phone charges every night. From the
command line: fleet.availability = "charging.txt" and fleet.trace_format = "own_trace:charging".
"""

from pathlib import Path

import fedcluster


def charging(path):  # type: ignore[no-untyped-def]
    for line in path.read_text().splitlines():
        device, hours = line.split()
        start, end = (60 * (60 * int(text[:2]) + int(text[3:])) for text in hours.split("-"))
        yield device, start, end if end > start else end + 86400


experiment = fedcluster.Experiment(
    rounds=5,
    fleet={"availability": str(Path(__file__).with_name("charging.txt")), "trace_format": charging, "samples": 100},
    clusters={"method": "availability", "count": 4, "participation": 0.5},
    model={"name": "logistic"},
    local={"lr": 0.5},
    clock={},
)

if __name__ == "__main__":
    result = fedcluster.run(experiment)
    last = result.history[-1]
    print(f"test accuracy {last['test_accuracy']:.1%} after {last['simulated_seconds'] / 3600:.0f} hours")
