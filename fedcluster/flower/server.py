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
from fedcluster.flower.executor import NodeDirectory
from fedcluster.flower.listener import raise_descriptor_limit
from fedcluster.flower.proxy import Proxy
from fedcluster.flower.registry import LiveSchedule, Registry
from fedcluster.flower.retry import RetryPolicy
from fedcluster.flower.setup import ServeOptions, check_updates, connected, prepare
from fedcluster.flower.transport import Notifier
from fedcluster.runs.directory import Folder, fresh
from fedcluster.runs.ledger import size
from fedcluster.runs.progress import Display, suited
from fedcluster.training.best_model import keep_best
from fedcluster.training.callbacks import CallbackList, Progress, stop_rule
from fedcluster.training.checkpoints import Checkpoints
from fedcluster.training.description import describe, over_budget
from fedcluster.training.loop import train
from fedcluster.training.output import begin, finish, load_finished
from fedcluster.training.recorder import Recorder
from fedcluster.training.run import Result
from fedcluster.training.setup import unequal_clusters
from fedcluster.training.threads import repeatable

ENVELOPE = 2**16  # bytes of a reply besides its tensors
GATHER = 0.5  # seconds between two looks for devices

Keys = dict[bytes, str] | None


def serve(
    experiment: Experiment,
    listen: tuple[str, int],
    certificates: Path | None,
    out: Path,
    resume: bool,
    serve_options: ServeOptions,
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
            Proxy(listen, (superlink.host, superlink.port), certificates, keys, display.say) as proxy,
        ):
            display.announce(f"open to devices at {listen[0]}:{proxy.port}")
            try:
                with superlink.run() as grid:
                    return deploy(experiment, grid, folder, keys, serve_options, display, proxy)
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
    if experiment.fleet.test_share:
        raise BadExperiment(
            "fleet.test_share holds out samples in a simulation only: leave it out, and keep test data on the devices"
        )
    if experiment.clusters.soft:
        raise BadExperiment("clusters.soft: on a federation's roster a device is in one cluster: leave it out")


def deploy(
    experiment: Experiment,
    grid: Grid,
    folder: Folder,
    keys: Keys,
    serve_options: ServeOptions,
    display: Display,
    proxy: Proxy | None = None,
) -> Result:
    """Train with whoever comes. The loop, the algorithms, the acceptance and the record are the simulator's."""
    registry = Registry(experiment, registry_file(folder))
    directory = NodeDirectory(grid, registry, keys, display.say, proxy or Notifier())
    with repeatable():
        gather(directory, serve_options, display)
        retry = RetryPolicy(directory, serve_options.wait, f"--resume --out {folder.path}")
        schedule = LiveSchedule(registry, directory.look, display.say, retry)
        check_updates(schedule, serve_options)
        setup = prepare(schedule, display.say)
        most = max(size(phase.upload_spec(setup.start)) for phase in setup.algorithm.phases) + ENVELOPE
        if proxy is not None:
            proxy.allowance = most
        setup = connected(setup, directory, most, serve_options)
        if warning := over_budget(setup, strict=False):
            display.say(warning)
        display.announce(describe(setup))
        if inequality := unequal_clusters(setup):
            display.say(inequality)
        display.announce("\n".join([plan_of(registry), *registry.claims()]))
        if not folder.begun:
            registry.save()
        rules, keeping = stop_rule(setup), keep_best(setup, folder, display.say)
        state, record, kept = begin(setup, folder, display)
        recorder = Recorder(folder.path, kept, repeats=True)
        # a device keeps its state from before and after its latest cycle only, so the server must not fall further back
        saving = Checkpoints(recorder, record, folder.run, every_round=bool(setup.initial_device_state))
        if state.cycle:
            schedule.begun = state.round
        with closing(recorder):
            own = [recorder, Progress(display, setup.schedule.name), *keeping, saving]
            watching = CallbackList(own, rules, saved=True)
            state = train(setup, record, state, watching)
        if watching.stopped:
            display.say(f"stopped after round {state.round}: {watching.stopped}")
        finish(folder, setup, state, record.history)
        setup.flat_model.load(state.model)
        return Result(record.history, setup.flat_model.module, folder.path)


def registry_file(folder: Folder) -> Path:
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
        registry = Registry(experiment, registry_file(folder))
        setup = prepare(LiveSchedule(registry, nobody_comes, display.say), display.say)
        history = load_finished(folder, setup, display)
        display.say(f"{folder.path} is finished: nothing to do")
        return Result(history, setup.flat_model.module, folder.path)


def nobody_comes() -> None:
    """The look of a schedule that is not followed any more."""


def gather(directory: NodeDirectory, serve_options: ServeOptions, display: Display) -> None:
    """Wait for the devices, but not for ever."""
    until, shown = time.monotonic() + serve_options.wait, 0
    while len(directory.devices) < serve_options.nodes and time.monotonic() < until:
        directory.look()
        if len(directory.devices) > shown:
            shown = len(directory.devices)
            display.say(f"{shown} of {serve_options.nodes} devices are here")
        if shown < serve_options.nodes:
            time.sleep(GATHER)
    registry = directory.registry
    if not directory.devices or (
        not registry.entries and len(directory.devices) < (registry.experiment.clusters.count or 1)
    ):
        raise LostServer(
            f"after {serve_options.wait:g} s {len(directory.devices)} of {serve_options.nodes} devices are here, "
            "too few to begin with: start them with fedcluster join, or wait longer (--wait)"
        )
    if len(directory.devices) < serve_options.nodes:
        display.say(f"beginning with {len(directory.devices)} of {serve_options.nodes} devices; others may come later")
    if not registry.entries:
        registry.admit(0, display.say)


def plan_of(registry: Registry) -> str:
    """Who takes turns with whom, in a line a cluster."""
    groups = registry.clusters()
    lines = []
    for number, members in enumerate(groups.members):
        entries = [registry.entries[k] for k in members]
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
    serve_options = ServeOptions(
        int(config["nodes"]), float(config["wait"]), float(config["deadline"]), int(config["min-updates"])
    )
    out = Path(str(config["out"])) if config["out"] else fresh(path.stem)
    keys = public_keys(Path(str(config["certificates"]))) if config["certificates"] else None
    display = suited()
    with closing(Folder(out, experiment, bool(config["resume"]))) as folder, display:
        if folder.finished:
            over(experiment, folder, display)
            return
        deploy(experiment, grid, folder, keys, serve_options, display)
