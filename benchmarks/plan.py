"""A million devices: how long it takes to read what is known of them, and to make clusters of it.

make bench-plan
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fedcluster.experiment import Clusters
from fedcluster.fleet import fleet_file, synthetic, traces
from fedcluster.fleet.clustering import clusters
from fedcluster.fleet.fleet import Fleet

HERE = Path(__file__).parent
DEVICES, COUNT, DAY = 1_000_000, 24, "2026-01-01"


def main() -> None:
    results: dict[str, dict[str, float]] = {}

    def timed(name: str, do: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        made = do()
        results[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(name, results[name], file=sys.stderr, flush=True)
        return made

    known = timed("make the diurnal world", lambda: synthetic.diurnal(DEVICES, 0, DAY))
    trace = known.availability
    assert trace is not None
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "fleet": pa.table({"device": np.arange(DEVICES), "utc_offset": known.utc_offset, "up_mbps": known.up_mbps}),
            "trace": pa.table(
                {
                    "device": np.repeat(np.arange(DEVICES), trace.counts),
                    "start": trace.starts / 1000,
                    "end": trace.ends / 1000,
                }
            ),
        }
        names = [str(k) for k in range(DEVICES)]
        for name, table in tables.items():
            parquet, text = Path(folder, f"{name}.parquet"), Path(folder, f"{name}.csv")
            pq.write_table(table, parquet)
            pa_csv.write_csv(table, text)
            for path in (parquet, text):
                read = fleet_file.read if name == "fleet" else lambda path, day: traces.read(path, day).of(names)
                timed(f"read the {name} as {path.suffix[1:]}", lambda path=path, read=read: read(path, DAY))  # type: ignore[misc]
    fleet = Fleet(np.ones(DEVICES, np.int64), known=known)
    for method in ("timezone", "availability"):
        options = Clusters(method=method, count=COUNT)
        timed(f"{COUNT} clusters by {method}", lambda options=options: clusters.build(options, fleet, 0))  # type: ignore[misc]
    everyone = np.arange(DEVICES)
    timed("when is each of them next free", lambda: trace.next_free(everyone, 12 * 3_600_000))
    lines = [f"| {DEVICES:,} devices | seconds | CPU seconds |", "| --- | --- | --- |"]
    lines += [f"| {name} | {took['seconds']:.1f} | {took['cpu_seconds']:.1f} |" for name, took in results.items()]
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "plan.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "results" / "plan.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
