"""A script that trains twice, as a sweep under torchrun does: `... -m tests.rank_twice EXPERIMENT FOLDER`."""

import sys
from pathlib import Path

import fedcluster
from fedcluster.runs.progress import Display

if __name__ == "__main__":
    experiment, folder = fedcluster.load(Path(sys.argv[1])), Path(sys.argv[2])
    for seed in (0, 1):
        fedcluster.run(experiment.override(seed=seed), folder / str(seed), display=Display())
