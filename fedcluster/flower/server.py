"""The server of a federation: the simulator's training loop with devices for an executor.

    wait for devices -> registry -> clusters -> schedule -> training.train -> record

`serve` starts Flower's SuperLink and the proxy in front of it; `server_app` runs in a SuperLink that others started.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcluster.errors import BadExperiment, BadRun, LostServer
from fedcluster.experiment import Experiment, load
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.schedule import Sampling
from fedcluster.flower.certificates import check_server, public_keys
from fedcluster.flower.executor import NodeDirectory
from fedcluster.flower.listener import raise_descriptor_limit
from fedcluster.flower.proxy import Proxy
from fedcluster.flower.registry import Registry, RegistrySchedule
from fedcluster.flower.releases import Releases, server_secret
from fedcluster.flower.round_start import RoundStart
from fedcluster.flower.setup import ServeOptions, check_min_updates, largest_reply, prepare, with_executor
from fedcluster.flower.transport import Notifier
from fedcluster.runs.directory import Folder, fresh
from fedcluster.runs.progress import Display, default_display
from fedcluster.runs.result import Result
from fedcluster.secure_aggregation.checks import check_sections, is_secure
from fedcluster.training.best_model import keep_best
from fedcluster.training.callbacks import Callback, CallbackList, Progress, stop_rule
from fedcluster.training.checkpoints import Checkpoints
from fedcluster.training.description import describe, over_budget
from fedcluster.training.loop import train
from fedcluster.training.output import begin, finish, load_finished
from fedcluster.training.recorder import Recorder
from fedcluster.training.setup import unequal_clusters
from fedcluster.training.threads import repeatable
from fedcluster.training.tracking.registry import tracking

POLL_SECONDS = 0.5  # between two looks for devices

Keys = dict[bytes, str] | None


def serve(
    experiment: Experiment,
    listen: tuple[str, int],
    certificates: Path | None,
    out: Path,
    resume: bool,
    serve_options: ServeOptions,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run a federation from its first device to its final model. `callbacks` watch it, as in `fedcluster.run`."""
    from fedcluster.flower.node import is_loopback
    from fedcluster.flower.superlink import SuperLink

    if certificates is None and not is_loopback(listen[0]):
        raise BadExperiment(f"--insecure is for loopback only, and {listen[0]} is not: use --certificates")
    check(experiment, certificates is not None)
    raise_descriptor_limit()
    keys: Keys = None
    if certificates is not None:
        keys = public_keys(certificates)
        check_server(certificates)
    display = display or default_display()
    with closing(Folder(out, experiment, resume)) as folder, display:
        if folder.finished:
            return open_finished(experiment, folder, display)
        superlink = SuperLink(certificates, keys, folder.path / "superlink.log")
        with (
            superlink.running(),
            Proxy(listen, (superlink.host, superlink.port), certificates, keys, display.say) as proxy,
        ):
            display.announce(f"listening for devices on {listen[0]}:{proxy.port}")
            try:
                with superlink.run() as grid:
                    return deploy(experiment, grid, folder, keys, serve_options, display, proxy, callbacks)
            except (httpx.HTTPError, ConnectionError) as error:
                problem = "has ended" if superlink.gone else f"does not answer ({error})"
                raise LostServer(
                    f"Flower's SuperLink {problem}: see {superlink.log}, and continue with --resume --out {out}"
                ) from None


def check(experiment: Experiment, with_keys: bool) -> None:
    """Refuse what a federation cannot do."""
    if is_secure(experiment) and not with_keys:
        raise BadExperiment(
            "privacy.secure_aggregation needs keys by which the devices know each other: use --certificates"
        )
    check_sections(experiment)
    if experiment.method == "centralized":
        raise BadExperiment('method = "centralized" needs all data in one place: use fedcluster run')
    if experiment.clock is not None:
        raise BadExperiment(
            "[clock] simulates time, and a federation runs in real time: remove it, or use fedcluster run"
        )
    if experiment.attack is not None:
        raise BadExperiment("[attack] simulates malicious devices: remove it, or use fedcluster run")
    if clusterings.needs(experiment.clusters) == "gradients":
        raise BadExperiment(
            'clusters.features = "gradients" needs all data in one place: use "labels", and join with --tell-labels'
        )
    if getattr(experiment.clusters.options, "soft", False):
        raise BadExperiment("clusters.soft: in a federation a device is in one cluster: remove it")


def deploy(
    experiment: Experiment,
    grid: Grid,
    folder: Folder,
    keys: Keys,
    serve_options: ServeOptions,
    display: Display,
    proxy: Proxy | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train with the devices that come. Loop, algorithms, acceptance and record are the simulator's."""
    registry = Registry(experiment, registry_file(folder))
    directory = NodeDirectory(grid, registry, keys, display.say, proxy or Notifier())
    with repeatable():
        wait_for_devices(directory, serve_options, display)
        repeats = dict[tuple[int, int], int]()
        schedule = RegistrySchedule(registry, private_sampling(experiment, folder, repeats))
        check_min_updates(schedule, serve_options)
        setup = prepare(schedule, display.say)
        rules, keeping = stop_rule(setup), keep_best(setup, folder, display.say)
        tracked = tracking(experiment, folder, display.say)
        max_bytes = largest_reply(setup)
        if proxy is not None:
            proxy.max_upload = max_bytes
        setup = with_executor(setup, directory, max_bytes, serve_options)
        if warning := over_budget(setup, strict=False):
            display.say(warning)
        display.announce(describe(setup))
        for sentence in setup.privacy.describe(experiment.rounds) if setup.privacy else ():
            display.say(sentence)
        if setup.privacy and registry.scales:
            display.say(
                "privacy: features are standardised by what devices have told (--tell-statistics), which epsilon does "
                "not cover"
            )
        if inequality := unequal_clusters(setup):
            display.say(inequality)
        display.announce("\n".join([describe_clusters(registry), *registry.capped_claims()]))
        if not folder.begun:
            registry.save()
        state, record, previous = begin(setup, folder, display.say)
        display.begin(experiment.rounds, setup.clusters.count, done=state.round)
        recorder = Recorder(folder.path, previous, repeats=True)
        # a device keeps its state from before and after its latest cycle only, so the server must not fall further back
        stateful = bool(setup.initial_device_state)
        saving = Checkpoints(
            recorder,
            record,
            folder.run,
            every_round=stateful,
            every_cycle=setup.privacy is not None or (stateful and experiment.clusters.overlap > 0),
        )
        releases = [Releases(folder.path)] if setup.privacy is not None else []
        for kept in releases:
            repeats |= kept.repeats(state)
        least = serve_options.min_updates if setup.privacy is not None and setup.privacy.central else 0
        round_start = RoundStart(directory, schedule, serve_options.wait, f"--resume --out {folder.path}", least)
        with closing(recorder):
            own = [recorder, Progress(display, schedule.name), *keeping, saving, *releases, round_start, *tracked]
            watching = CallbackList(own, [*rules, *callbacks], saved=True)
            state = train(setup, record, state, watching)
        if watching.stopped:
            display.say(f"stopped after round {state.round}: {watching.stopped}")
        finish(folder, replace(setup, fleet=registry.fleet()), state, record.history)  # with the devices that came late
        for tracker in tracked:
            tracker.finish()
        setup.flat_model.load(state.model)
        return Result(record.history, setup.flat_model.module, folder.path)


def private_sampling(experiment: Experiment, folder: Folder, repeats: Mapping[tuple[int, int], int]) -> Sampling | None:
    """How cohorts are drawn under differential privacy, from the server's secret."""
    section = experiment.differential_privacy
    if section is None:
        return None
    return Sampling(server_secret(folder), section.poisson, repeats)


def registry_file(folder: Folder) -> Path:
    """The registry's file. One without a run is left over from a server that was stopped before the run began."""
    path = folder.path / "devices.json"
    if not folder.begun:
        path.unlink(missing_ok=True)
    elif not path.exists():
        raise BadRun(f"{path} is missing, which has the devices' clusters: restore it, or choose another --out")
    return path


def open_finished(experiment: Experiment, folder: Folder, display: Display) -> Result:
    """The result of a run that has finished before; it needs no devices."""
    with repeatable():
        sampling = private_sampling(experiment, folder, {})
        setup = prepare(RegistrySchedule(Registry(experiment, registry_file(folder)), sampling), display.say)
        history = load_finished(folder, setup, display.say)
        display.say(f"{folder.path} is finished: nothing to do")
        return Result(history, setup.flat_model.module, folder.path)


def wait_for_devices(directory: NodeDirectory, serve_options: ServeOptions, display: Display) -> None:
    """Wait until the devices are online or the time is up, and admit those who are."""
    deadline, shown = time.monotonic() + serve_options.wait, 0
    while len(directory.devices) < serve_options.nodes and time.monotonic() < deadline:
        directory.update()
        if len(directory.devices) > shown:
            shown = len(directory.devices)
            display.say(f"{shown} of {serve_options.nodes} devices are online")
        if shown < serve_options.nodes:
            time.sleep(POLL_SECONDS)
    registry, online = directory.registry, len(directory.devices)
    if not online or (not registry.entries and online < (registry.experiment.clusters.count or 1)):
        raise LostServer(
            f"after {serve_options.wait:g} s only {online} of {serve_options.nodes} devices are online, too few to "
            "start: start more with fedcluster join, or wait longer (--wait)"
        )
    if online < serve_options.nodes:
        display.say(f"starting with {online} of {serve_options.nodes} devices; others may join later")
    if not registry.entries:
        registry.admit(0, display.say)


def describe_clusters(registry: Registry) -> str:
    """The devices of each cluster, one line a cluster."""
    lines = []
    for number, members in enumerate(registry.clusters().members):
        entries = [registry.entries[k] for k in members]
        zones = sorted({entry.timezone for entry in entries if entry.timezone})
        names = ", ".join(entry.device for entry in entries[:12]) + ", ..." * (len(entries) > 12)
        where = f" ({', '.join(zones[:4])})" if zones else ""
        lines.append(f"cluster {number}: {sum(e.samples for e in entries):,} samples on devices {names}{where}")
    return "\n".join(lines)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The same for `flwr run`, in a SuperLink that others started and guard."""
    config = context.run_config
    path = Path(str(config["experiment"]))
    experiment = load(path)
    check(experiment, bool(config["certificates"]))
    serve_options = ServeOptions(
        int(config["nodes"]), float(config["wait"]), float(config["deadline"]), int(config["min-updates"])
    )
    out = Path(str(config["out"])) if config["out"] else fresh(path.stem)
    keys = public_keys(Path(str(config["certificates"]))) if config["certificates"] else None
    display = default_display()
    with closing(Folder(out, experiment, bool(config["resume"]))) as folder, display:
        if folder.finished:
            open_finished(experiment, folder, display)
            return
        deploy(experiment, grid, folder, keys, serve_options, display)
