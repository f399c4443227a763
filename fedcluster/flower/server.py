"""The server of a federation: the simulator's training loop, with devices elsewhere for an executor.

    gather the devices -> roster -> clusters -> schedule -> training.train -> record

`serve` starts Flower's SuperLink and the gate around it; `server_app` does the same inside a SuperLink that others run.
"""

import json
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedcluster import algorithms, sources
from fedcluster.dataset import Dataset
from fedcluster.display import Display, suited
from fedcluster.errors import BadExperiment, LostServer
from fedcluster.evaluate import Evaluator
from fedcluster.experiment import WITH_DEVICES, Experiment, load
from fedcluster.flower.certificates import public_keys
from fedcluster.flower.cohorts import NEW, Federation, Presence
from fedcluster.flower.device import PLAN
from fedcluster.flower.gate import Gate
from fedcluster.flower.post import Bell
from fedcluster.flower.roster import ROOM, LiveSchedule, Roster
from fedcluster.folder import Folder, fresh
from fedcluster.learner import Learner
from fedcluster.ledger import size
from fedcluster.prepare import Setup, check_output, untried
from fedcluster.training import Result, banner, begin, finish, finished, keep_budget, repeatable, train

ENVELOPE = 2**16  # bytes of a reply besides its tensors
GATHER = 0.5  # seconds between two looks for devices

Keys = dict[bytes, str] | None


@dataclass(frozen=True)
class Terms:
    """How long is waited for whom: `nodes` devices before the first round, `wait` seconds at most, and `deadline`
    seconds for a cohort's turn."""

    nodes: int = 1
    wait: float = 600.0
    deadline: float = 600.0


class HeldOut(Evaluator):
    """The global model on the server's test data; nothing where it has none. Training data are with the devices."""

    def __init__(self, learner: Learner, dataset: Dataset | None) -> None:
        self.learner, self.threads = learner, 1
        if dataset is not None:
            self.dataset = dataset
        self.blind = dataset is None

    def __call__(self, w: Tensor) -> dict[str, float]:
        if self.blind:
            return {}
        loss, accuracy = self.measure(w, self.dataset.x_test, self.dataset.y_test)
        return {"test_loss": loss, "test_accuracy": accuracy}


def serve(
    experiment: Experiment,
    listen: tuple[str, int],
    certificates: Path | None,
    out: Path,
    resume: bool,
    terms: Terms,
    display: Display | None = None,
) -> Result:
    """A federation from its first device to its picture."""
    from fedcluster.flower.node import loopback
    from fedcluster.flower.superlink import SuperLink

    if certificates is None and not loopback(listen[0]):
        raise BadExperiment(
            f"--insecure is for loopback only, and {listen[0]} is not: make certificates, and give them"
        )
    check(experiment)
    keys = None if certificates is None else public_keys(certificates)
    display = display or suited()
    with closing(Folder(out, experiment, resume)) as folder, display:
        superlink = SuperLink(certificates, keys, folder.path / "superlink.log")
        with (
            superlink.running(),
            Gate(listen, (superlink.host, superlink.port), certificates, keys, display.say) as gate,
        ):
            gate.open()
            display.announce(f"open to devices at {listen[0]}:{gate.server_address[1]}")

            try:
                with superlink.run() as grid:
                    return deploy(experiment, grid, folder, keys, terms, display, gate)
            except (httpx.HTTPError, ConnectionError) as error:
                gone = "is gone" if superlink.gone else f"does not answer ({error})"
                raise LostServer(
                    f"Flower's SuperLink {gone}; see {superlink.log}, and go on with --resume --out {out}"
                ) from None
            finally:
                gate.shutdown()


def check(experiment: Experiment) -> None:
    if experiment.method == "centralized":
        raise BadExperiment('method = "centralized" needs all data in one place: use fedcluster run')
    if experiment.clock is not None:
        raise BadExperiment(
            "[clock] simulates time, and a federation takes its own: leave it out, or use fedcluster run"
        )
    if experiment.clusters.features == "gradients" and experiment.clusters.method in ("balanced", "similar"):
        raise BadExperiment(
            'clusters.features = "gradients" needs all data in one place: take "labels", and join with --tell-labels'
        )
    if experiment.clusters.soft:
        raise BadExperiment("clusters.soft: on a federation's roster a device is in one cluster: leave it out")


def deploy(
    experiment: Experiment,
    grid: Grid,
    folder: Folder,
    keys: Keys,
    terms: Terms,
    display: Display,
    gate: Gate | None = None,
) -> Result:
    """Train with whoever comes. The loop, the algorithms, the acceptance and the record are the simulator's."""
    roster = Roster(experiment, folder.path / "devices.json")
    presence = Presence(grid, roster, keys, display.say, gate or Bell())
    with repeatable():
        gather(presence, terms, display)
        setup, most = prepare(experiment, presence, terms)
        if gate is not None:
            gate.allowance = most
        keep_budget(setup, False, display)
        if folder.finished:
            display.say(f"{folder.path} is finished: nothing to do")
            return finished(folder, setup)
        display.announce(banner(setup))
        display.announce(plan_of(roster))
        recorder, state = begin(setup, folder, display)
        with closing(recorder):
            state = train(setup, recorder, state)
            recorder.save(state, now=True)
        finish(folder, setup, state, recorder.history)
        setup.learner.load(state.model)
        return Result(recorder.history, setup.learner.module, folder.path)


def gather(presence: Presence, terms: Terms, display: Display) -> None:
    """Wait for the devices, but not for ever."""
    until, shown = time.monotonic() + terms.wait, 0
    while len(presence.devices) < terms.nodes and time.monotonic() < until:
        presence.look()
        if len(presence.devices) > shown:
            shown = len(presence.devices)
            display.say(f"{shown} of {terms.nodes} devices are here")
        if shown < terms.nodes:
            time.sleep(GATHER)
    roster = presence.roster
    if not presence.devices or (not roster.entries and len(presence.devices) < (roster.experiment.clusters.count or 1)):
        raise LostServer(
            f"after {terms.wait:g} s {len(presence.devices)} of {terms.nodes} devices are here, too few to begin with: "
            "start them with fedcluster join, or wait longer (--wait)"
        )
    if len(presence.devices) < terms.nodes:
        display.say(f"beginning with {len(presence.devices)} of {terms.nodes} devices; others may come later")
    roster.admit(0, display.say)


def prepare(experiment: Experiment, presence: Presence, terms: Terms) -> tuple[Setup, int]:
    """What stands before the first cycle, as in simulation, but for what only devices have; and how many bytes a device
    may have reason to send."""
    roster, seed, local = presence.roster, experiment.seed, experiment.local
    first = roster.entries[0]
    dataset = None if experiment.data.name == WITH_DEVICES else sources.open_dataset(experiment.data.name, presence.say)
    shape, classes = tuple(first.shape), max(entry.classes for entry in roster.entries)
    if dataset is not None:
        if dataset.shape != shape:
            raise BadExperiment(
                f"data.name: {dataset.name} has samples {list(dataset.shape)}, but the devices have {list(shape)}"
            )
        classes = dataset.classes
    algorithm, optimizer = algorithms.build(local, seed), algorithms.optimizer(experiment.server)
    learner = untried(experiment, shape, classes, "cpu", algorithm.objective)
    if dataset is not None:
        check_output(learner, dataset)
    start = algorithms.first_state(algorithm, optimizer, learner.w.clone(), learner.size)
    most = max(size(exchange.form(start)) for exchange in algorithm.exchanges) + ENVELOPE
    keeps = bool(algorithm.device_memory(learner.w, learner.size))
    plan = plan_for(experiment, list(shape), classes, dataset)
    schedule = LiveSchedule(roster, presence.look, presence.say)
    setup = Setup(
        experiment=experiment,
        dataset=dataset,
        fleet=schedule.fleet,
        clusters=schedule.clusters,
        schedule=schedule,
        learner=learner,
        algorithm=algorithm,
        optimizer=optimizer,
        executor=Federation(presence, algorithm, plan, most, keeps, terms.deadline),
        clock=None,
        evaluate=HeldOut(learner, dataset),
        start=start,
        new=NEW if keeps else {},
        devices=ROOM,
    )
    return setup, most


def plan_for(experiment: Experiment, shape: list[int], classes: int, dataset: Dataset | None) -> str:
    """What a device has to know to train as the simulator would."""
    keys = experiment.to_dict()
    scaled = dataset is not None and dataset.scale is not None and dataset.shift is not None
    values = (
        experiment.seed,
        shape,
        classes,
        {"name": keys["model"]["name"]},
        keys["local"],
        dataset.scale.reshape(-1).tolist() if scaled and dataset and dataset.scale is not None else None,
        dataset.shift.reshape(-1).tolist() if scaled and dataset and dataset.shift is not None else None,
    )
    return json.dumps(dict(zip(PLAN, values, strict=True)), sort_keys=True)


def plan_of(roster: Roster) -> str:
    """Who takes turns with whom, in a line a cluster."""
    groups = roster.clusters(len(roster.entries))
    lines = []
    for number, members in enumerate(groups.members):
        entries = [roster.entries[k] for k in members]
        zones = sorted({entry.timezone for entry in entries if entry.timezone})
        names = ", ".join(entry.device for entry in entries[:12]) + ", ..." * (len(entries) > 12)
        where = f" ({', '.join(zones[:4])})" if zones else ""
        lines.append(f"cluster {number}: {sum(e.samples for e in entries):,} samples on devices {names}{where}")
    return "\n".join(lines)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The same under `flwr run`: the SuperLink is others', and so is the decision whom it lets in."""
    config = context.run_config
    path = Path(str(config["experiment"]))
    experiment = load(path)
    check(experiment)
    terms = Terms(int(config["nodes"]), float(config["wait"]), float(config["deadline"]))
    out = Path(str(config["out"])) if config["out"] else fresh(path.stem)
    keys = public_keys(Path(str(config["certificates"]))) if config["certificates"] else None
    display = suited()
    with closing(Folder(out, experiment, bool(config["resume"]))) as folder, display:
        deploy(experiment, grid, folder, keys, terms, display)
