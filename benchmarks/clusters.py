"""How long balanced and similar clusters take to find, from label counts.

make bench-clusters
"""

import time
from pathlib import Path

import numpy as np

from fedcluster.analysis.heterogeneity import split
from fedcluster.data.dataset import Dataset
from fedcluster.experiment import Clusters, Fleet
from fedcluster.fleet import fleet
from fedcluster.fleet.clustering import anticlustering, clusters

HERE = Path(__file__).parent


def main() -> None:
    y = np.arange(1000) % 10
    data = Dataset(np.zeros((1000, 2), np.float32), y, np.zeros((10, 2), np.float32), np.arange(10))
    lines = ["| fleet | devices | M | clusters | seconds | CPU seconds | H_cluster / H_device, of label shares |"]
    lines.append("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for partition in ("major_class", "dirichlet"):
        for devices, count in ((1000, 10), (1000, 100), (100_000, 10), (100_000, 1000)):
            options = Fleet(devices=devices, samples=50, partition=partition, rho_device=0.9)
            everyone, _ = fleet.build(options, data, 0)
            shares = anticlustering.label_shares(everyone)
            for method in ("random", "balanced", "similar"):
                began, worked = time.perf_counter(), time.process_time()
                found = clusters.build(Clusters(method=method, count=count), everyone, 0)
                spent = f"{time.perf_counter() - began:.2f} | {time.process_time() - worked:.2f}"
                cut = split(shares, everyone.weights, found)
                ratio = cut.cluster / cut.device
                lines.append(f"| {partition} | {devices:,} | {count:,} | {method} | {spent} | {ratio:.1e} |")
                print(lines[-1], flush=True)
    (HERE / "results" / "clusters.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
