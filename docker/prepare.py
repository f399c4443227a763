"""What compose.yaml starts from: certificates, and the digits shared out to devices.

    python prepare.py FOLDER DEVICES HOST

FOLDER/server has what the server needs, FOLDER/device-K what device K needs: its data and its key. HOST is the name by
which devices reach the server. A folder that is prepared already is left as it is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import fedcluster
from fedcluster.data import sources
from fedcluster.fleet import fleet

OWNER = 1000  # the user of the containers


def main(folder: Path, devices: int, host: str) -> None:
    if (folder / "ready").exists():
        return
    made = folder / "certificates"
    shutil.rmtree(made, ignore_errors=True)
    command = [sys.executable, "-m", "fedcluster", "certificates", str(made), "--nodes", str(devices), "--host", host]
    subprocess.run(command, check=True)
    experiment = fedcluster.Experiment(fleet={"devices": devices, "samples": 300, "rho_device": 0.7})
    dataset = sources.open_dataset("digits")
    _, partition = fleet.build(experiment.fleet, dataset, experiment.seed)
    x, y = dataset.x_train.numpy(), dataset.y_train.numpy()
    trusted = folder / "server" / "certificates"
    (trusted / "devices").mkdir(parents=True, exist_ok=True)
    for name in ("ca.crt", "server.crt", "server.key"):
        shutil.copy(made / name, trusted / name)
    for k in range(devices):
        share, rows = folder / f"device-{k}", partition.sample_indices(k)
        (share / "certificates" / "devices").mkdir(parents=True, exist_ok=True)
        np.savez(share / "data.npz", x_train=x[rows], y_train=y[rows], x_test=x[:1], y_test=y[:1])
        shutil.copy(made / "ca.crt", share / "certificates" / "ca.crt")
        shutil.copy(made / "devices" / f"{k}.key", share / "certificates" / "devices" / f"{k}.key")
        shutil.copy(made / "devices" / f"{k}.pub", trusted / "devices" / f"{k}.pub")
    shutil.rmtree(made)
    (folder / "ready").touch()


def give(folder: Path) -> None:
    """Let the containers' user read it, where this runs as root."""
    if os.getuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, OWNER, OWNER)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    give(Path(sys.argv[1]))
    if Path("/results").is_dir():
        give(Path("/results"))
