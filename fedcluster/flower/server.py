"""The server of a federation: the simulator's training loop, with devices elsewhere for an executor.

    gather the devices -> roster -> clusters -> schedule -> training.train -> record

`serve` starts Flower's SuperLink and the gate around it; `server_app` does the same inside a SuperLink that others run.
"""

import time
from contextlib import closing
from pathlib import Path

import httpx
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcluster.errors import BadExperiment, BadRun, LostServer
from fedcluster.experiment import Experiment, load
from fedcluster.flower.certificates import check_server, public_keys
from fedcluster.flower.executor import Presence
from fedcluster.flower.listener import raise_descriptor_limit
from fedcluster.flower.proxy import Gate
from fedcluster.flower.registry import LiveSchedule, Roster
from fedcluster.flower.retry import Patience
from fedcluster.flower.setup import Terms, check_updates, connected, prepare
from fedcluster.flower.transport import Bell
from fedcluster.runs.directory import Folder, fresh
from fedcluster.runs.ledger import size
from fedcluster.runs.progress import Display, suited
from fedcluster.training.loop import Result, banner, begin, finish, finished, keep_budget, repeatable, train
from fedcluster.training.setup import unequal_clusters

ENVELOPE = 2**16  # bytes of a reply besides its tensors
GATHER = 0.5  # seconds between two looks for devices

Keys = dict[bytes, str] | None


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
    raise_descriptor_limit()
    keys: Keys = None
    if certificates is not None:
        keys = public_keys(certificates)
        check_server(certificates)
    display = display or suited()
    with closing(Folder(out, experiment, resume)) as folder, display:
        if folder.finished:
            return over(experiment, folder, display)
        superlink = SuperLink(certificates, keys, folder.path / "superlink.log")
        with (
            superlink.running(),
            Gate(listen, (superlink.host, superlink.port), certificates, keys, display.say) as gate,
        ):
            display.announce(f"open to devices at {listen[0]}:{gate.port}")
            try:
                with superlink.run() as grid:
                    return deploy(experiment, grid, folder, keys, terms, display, gate)
            except (httpx.HTTPError, ConnectionError) as error:
                gone = "is gone" if superlink.gone else f"does not answer ({error})"
                raise LostServer(
                    f"Flower's SuperLink {gone}; see {superlink.log}, and go on with --resume --out {out}"
                ) from None


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
    roster = Roster(experiment, registry(folder))
    presence = Presence(grid, roster, keys, display.say, gate or Bell())
    with repeatable():
        gather(presence, terms, display)
        patience = Patience(presence, terms.wait, f"--resume --out {folder.path}")
        schedule = LiveSchedule(roster, presence.look, display.say, patience)
        check_updates(schedule, terms)
        setup = prepare(schedule, display.say)
        most = max(size(exchange.form(setup.start)) for exchange in setup.algorithm.exchanges) + ENVELOPE
        if gate is not None:
            gate.allowance = most
        setup = connected(setup, presence, most, terms)
        keep_budget(setup, False, display)
        display.announce(banner(setup))
        if inequality := unequal_clusters(setup):
            display.say(inequality)
        display.announce("\n".join([plan_of(roster), *roster.claims()]))
        if not folder.begun:
            roster.save()
        recorder, state = begin(setup, folder, display)
        if state.cycle:
            schedule.begun = state.round
        with closing(recorder):
            state = train(setup, recorder, state)
            recorder.save(state, now=True)
        finish(folder, setup, state, recorder.history)
        setup.learner.load(state.model)
        return Result(recorder.history, setup.learner.module, folder.path)


def registry(folder: Folder) -> Path:
    """Where the roster of the folder's run is. One without a run is of a server that was stopped before it began."""
    path = folder.path / "devices.json"
    if not folder.begun:
        path.unlink(missing_ok=True)
    elif not path.exists():
        raise BadRun(f"{path} is missing, which says who is in which cluster: put it back, or choose another --out")
    return path


def over(experiment: Experiment, folder: Folder, display: Display) -> Result:
    """The result of a run that ended earlier: no device is needed for it."""
    with repeatable():
        roster = Roster(experiment, registry(folder))
        setup = prepare(LiveSchedule(roster, nobody_comes, display.say), display.say)
        display.say(f"{folder.path} is finished: nothing to do")
        return finished(folder, setup, display)


def nobody_comes() -> None:
    """The look of a schedule that is not followed any more."""


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
    if not roster.entries:
        roster.admit(0, display.say)


def plan_of(roster: Roster) -> str:
    """Who takes turns with whom, in a line a cluster."""
    groups = roster.clusters()
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
    terms = Terms(int(config["nodes"]), float(config["wait"]), float(config["deadline"]), int(config["min-updates"]))
    out = Path(str(config["out"])) if config["out"] else fresh(path.stem)
    keys = public_keys(Path(str(config["certificates"]))) if config["certificates"] else None
    display = suited()
    with closing(Folder(out, experiment, bool(config["resume"]))) as folder, display:
        if folder.finished:
            over(experiment, folder, display)
            return
        deploy(experiment, grid, folder, keys, terms, display)
