"""The package as a normal Flower app: Flower's own SuperLink and SuperNodes, and `flwr run`."""

import subprocess
import sys
from pathlib import Path

import pytest

import fedcluster
from fedcluster.display import Display
from fedcluster.flower.superlink import APP, QUIET, free_port
from tests.federation import Federation, until

pytestmark = pytest.mark.xdist_group("federation")

EXPERIMENT = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 2, "samples": 40},
    clusters={"count": 2, "participation": 1.0},
    model={"name": "logistic"},
    local={"steps": 5, "batch": 10, "lr": 0.05, "algorithm": "scaffold"},
)


def test_flwr_run_equals_the_simulation(tmp_path: Path) -> None:
    """With SCAFFOLD: what a device keeps is in Flower's Context, as every message starts a new process."""
    scripts, out = Path(sys.executable).parent, tmp_path / "out"
    with Federation(tmp_path, EXPERIMENT) as federation:
        port = federation.port
        quiet = QUIET | {"FLWR_HOME": str(tmp_path), "PATH": f"{scripts}:/usr/bin:/bin"}
        listen = ("--insecure", "--host", "127.0.0.1", "--port", port)
        federation.run("superlink", scripts / "flower-superlink", *listen, **quiet)
        until(lambda: "Uvicorn running" in federation.said("superlink"))
        for k in range(2):
            own = ("--port", free_port(), "--node-config", f'device="{k}" data="{tmp_path / f"{k}.npz"}"')
            node = (scripts / "flower-supernode", "--insecure", "--superlink", federation.server, *own)
            federation.run(f"supernode-{k}", *node, **quiet)
        (tmp_path / "experiment.toml").write_text(EXPERIMENT.to_toml())
        (tmp_path / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        config = f'experiment="{tmp_path / "experiment.toml"}" out="{out}" nodes=2'
        run = federation.run("flwr", scripts / "flwr", "run", APP, "--run-config", config, **quiet)
        try:
            assert run.wait(300) == 0, federation.said("flwr")
            until(lambda: (out / "model.safetensors").exists())
        except (AssertionError, subprocess.TimeoutExpired):
            raise AssertionError(
                federation.said("superlink")[-2000:] + federation.said("supernode-0")[-2000:]
            ) from None
        fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
