"""Tables of all rounds in the run's folder, for a spreadsheet or pandas: metrics.csv and metrics.parquet."""

import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import csv, parquet

from fedcluster.files import write_atomically
from fedcluster.training.tracking.registry import TrackedRun

WRITE_EVERY = 2.0  # seconds


class CSV:
    """metrics.csv: a row for every round and a column for every number. It is written every few seconds, and at the
    end."""

    name = "metrics.csv"

    def __init__(self, project: str) -> None:
        self.rows: list[dict[str, float]] = []

    def start(self, run: TrackedRun) -> int:
        self.path, self.written = run.folder / self.name, time.monotonic()
        return 0

    def log(self, round: int, numbers: dict[str, float]) -> None:
        self.rows.append({"round": round, **numbers})
        if time.monotonic() > self.written + WRITE_EVERY:
            self.store()

    def finish(self, files: Sequence[Path]) -> None:
        self.store()

    def abort(self) -> None:
        self.store()

    def store(self) -> None:
        names = dict.fromkeys(name for row in self.rows for name in row)
        table = pa.table({name: [row.get(name) for row in self.rows] for name in names})
        write_atomically(self.path, lambda file: self.write(table, file))
        self.written = time.monotonic()

    def write(self, table: pa.Table, file: object) -> None:
        csv.write_csv(table, file)


class Parquet(CSV):
    """metrics.parquet: the same as a Parquet file."""

    name = "metrics.parquet"

    def write(self, table: pa.Table, file: object) -> None:
        parquet.write_table(table, file)
