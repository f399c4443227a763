"""How long balanced and similar clusters take to find, from label counts.

.venv/bin/python benchmarks/clusters.py        seconds by the clock and of the processor, and what was gained
"""

import time

import numpy as np

from fedcluster import anticluster, clusters, fleet
from fedcluster.dataset import Dataset
from fedcluster.experiment import Clusters, Fleet
from fedcluster.heterogeneity import split


def main() -> None:
    y = np.arange(1000) % 10
    data = Dataset(np.zeros((1000, 2), np.float32), y, np.zeros((10, 2), np.float32), np.arange(10))
    print(f"{'fleet':12} {'devices':>8} {'M':>5} {'clusters':10} {'s':>7} {'cpu s':>7} {'H_cluster / H_device':>21}")
    for partition in ("major_class", "dirichlet"):
        for devices, count in ((1000, 10), (1000, 100), (100_000, 10), (100_000, 1000)):
            options = Fleet(devices=devices, samples=50, partition=partition, rho_device=0.9)
            everyone = fleet.build(options, data, 0)
            shares = anticluster.label_shares(everyone)
            for method in ("random", "balanced", "similar"):
                began, worked = time.perf_counter(), time.process_time()
                found = clusters.build(Clusters(method=method, count=count), everyone, 0)
                spent = f"{time.perf_counter() - began:7.2f} {time.process_time() - worked:7.2f}"
                cut = split(shares, everyone.weights, found)
                ratio = cut.cluster / cut.device
                print(f"{partition:12} {devices:8,} {count:5} {method:10} {spent} {ratio:21.2e}", flush=True)


if __name__ == "__main__":
    main()
