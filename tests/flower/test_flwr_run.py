"""The package as a normal Flower app, by the commands of docs/deploy.md as they stand there: only host, port, paths and
the number of devices are those of this machine."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import fedcluster
from fedcluster.flower.superlink import APP, QUIET, free_port
from fedcluster.runs.progress import Display
from tests.federation import ROOT, Federation, Process, until

pytestmark = pytest.mark.xdist_group("federation")

SCRIPTS = Path(sys.executable).parent
EXPERIMENT = fedcluster.Experiment(
    rounds=2,
    fleet={"devices": 2, "samples": 40},
    clusters={"count": 1, "participation": 1.0},
    model={"name": "logistic"},
    local={"steps": 5, "batch": 10, "lr": 0.05, "algorithm": "scaffold"},
)


class Documented:
    """The blocks of a section, and a Flower of its own to run them in."""

    def __init__(self, title: str, federation: Federation) -> None:
        page = (ROOT / "docs/deploy.md").read_text()
        section = page.split(f"## {title}\n")[1].split("\n## ")[0]
        (self.config,) = re.findall(r"```toml\n(.*?)```", section, re.S)
        self.commands = re.findall(r"```sh\n(.*?)```", section, re.S)
        self.federation = federation
        home = federation.folder / "flower"
        home.mkdir()
        (home / "config.toml").write_text(self.here(self.config))
        self.environment = QUIET | {"FLWR_HOME": str(home), "PATH": f"{SCRIPTS}:/usr/bin:/bin"}
        self.environment |= {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}

    def here(self, text: str) -> str:
        federation = self.federation
        text = re.sub(r"(fed\.example\.org|127\.0\.0\.1):8000", federation.server, text)
        text = text.replace("--port 8000", f"--port {federation.port}").replace("/path/to", str(federation.folder))
        text = text.replace("0.0.0.0", "127.0.0.1").replace(" fedcluster/flower/app ", f" {APP} ")
        return text.replace("nodes=8", "nodes=2")

    def start(self, name: str, begins: str, device: int = 0, *more: object) -> Process:
        """The command that begins with these words."""
        (command,) = [one for one in self.commands if one.startswith(begins)]
        text = self.here(command.replace("\\\n", " "))
        text = text.replace("devices/0.", f"devices/{device}.").replace("/0.npz", f"/{device}.npz")
        words = shlex.split(text.replace('device="0"', f'device="{device}"'))
        return self.federation.run(name, SCRIPTS / words[0], *words[1:], *more, **self.environment)

    def done(self, name: str, process: Process) -> str:
        assert process.wait(600) == 0, self.federation.log(name)
        said = self.federation.log(name)
        assert f"({self.federation.server})" in said
        assert "Starting local SuperLink" not in said
        return said


def test_flwr_run_equals_the_simulation(tmp_path: Path) -> None:
    """With SCAFFOLD: what a device keeps is in Flower's Context, as every message starts a new process."""
    with Federation(tmp_path, EXPERIMENT) as federation:
        (tmp_path / "experiment.toml").write_text(EXPERIMENT.to_toml())
        documented = Documented("With plain Flower", federation)
        documented.start("superlink", "flower-superlink")
        until(lambda: "Uvicorn running" in federation.log("superlink"))
        for k in range(2):
            documented.done(f"register-{k}", documented.start(f"register-{k}", "flwr supernode register", k))
            documented.start(f"supernode-{k}", "flower-supernode", k, "--port", free_port())
        documented.done("flwr", documented.start("flwr", "flwr run"))
        assert (tmp_path / "out/model.safetensors").exists(), federation.log("flwr")[-3000:]
        fedcluster.run(EXPERIMENT, tmp_path / "run", display=Display())
        assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()


def test_flwr_run_reaches_the_simulation_superlink(tmp_path: Path) -> None:
    """The run itself needs Ray; that it arrives at the SuperLink that was started does not."""
    with Federation(tmp_path, EXPERIMENT) as federation:
        documented = Documented("In Flower's simulation", federation)
        documented.start("superlink", "flower-superlink")
        until(lambda: "Uvicorn running" in federation.log("superlink"))
        documented.commands = [one.replace(" --stream", "") for one in documented.commands]
        assert "Successfully started run" in documented.done("flwr", documented.start("flwr", "flwr run"))
