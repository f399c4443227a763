"""A command of one's own: `fedcluster shares EXPERIMENT.toml` prints how many samples each cluster holds.

It is a function; typer makes options of its parameters. A package declares it in its pyproject.toml:

    [project.entry-points."fedcluster.commands"]
    shares = "own_command:shares"
"""

from pathlib import Path

import fedcluster
from fedcluster.training.setup import prepare


def shares(experiment: Path) -> None:
    """Print how many samples each cluster holds."""
    setup = prepare(fedcluster.load(experiment))
    for number, members in enumerate(setup.clusters.members):
        print(f"cluster {number}: {setup.fleet.sizes[members].sum():,} samples on {len(members):,} devices")
