"""The commands of a federation: serve, join, certificates."""

from pathlib import Path
from typing import Annotated

import typer

from fedcluster.cli.common import ExperimentFile, Out, Overrides, Resume, echo, exit_on_error, load, need_out
from fedcluster.cli.report import LivePort, ShowLive, shown_live


def serve(
    experiment: ExperimentFile,
    listen: Annotated[str, typer.Option(metavar="ADDRESS[:PORT]", help="Address to listen on.")] = "127.0.0.1:9092",
    nodes: Annotated[int, typer.Option(min=1, help="Devices to wait for before the first round.")] = 1,
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder made by fedcluster certificates.", show_default=False)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys; on a loopback address only.")
    ] = False,
    o: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for devices, and after failed rounds.")] = 600.0,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds for each cohort.")] = 600.0,
    min_updates: Annotated[int, typer.Option(min=1, help="Updates that a cycle needs.")] = 1,
    live: ShowLive = False,
    live_port: LivePort = 0,
) -> None:
    """Train an experiment on devices that join over the network."""
    with exit_on_error("--resume"):
        need_out(out, resume)
        check_security(certificates, insecure)
        where = address(listen)
        need_flower()
        described = load(experiment, o)
        from fedcluster.cli.tables import test_scores
        from fedcluster.flower import server
        from fedcluster.flower.setup import ServeOptions
        from fedcluster.runs.directory import fresh

        serve_options = ServeOptions(nodes, wait, deadline, min_updates)
        out = out or fresh(experiment.stem)
        with shown_live(live, live_port, out) as callbacks:
            result = server.serve(described, where, certificates, out, resume, serve_options, callbacks=callbacks)
        last = result.history[-1]
        echo(
            f"{test_scores(last)}{last['round']} rounds, {last['device_updates']:,} device updates, "
            f"{last['refused']:,} refused, {last['elapsed']:.0f} s"
        )
        echo(f"Written: {result.out}")


def join(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the server.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="This device's data: anything that data.name may be.")],
    device: Annotated[str, typer.Option(metavar="ID", help="This device's id.")],
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with ca.crt and devices/ID.key.", show_default=False)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS and no keys; on a loopback address only.")
    ] = False,
    timezone: Annotated[
        str, typer.Option(metavar="ZONE", help="Time zone such as Europe/Berlin, sent to the server.")
    ] = "",
    slots: Annotated[
        str, typer.Option(metavar="HOURS", help="Daily hours online, such as 22-6, sent to the server.")
    ] = "",
    tell_labels: Annotated[bool, typer.Option("--tell-labels", help="Send the number of samples per class.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="package.module:name that the server may use.")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A copy of the experiment's model.init, for frozen weights."),
    ] = None,
    columns: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An experiment file whose \\[data] and \\[task] name this table's columns."),
    ] = None,
    tell_statistics: Annotated[
        bool, typer.Option("--tell-statistics", help="Send count, mean and squared deviations of numeric columns.")
    ] = False,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Let the server ask for the model's scores on this device's test samples."),
    ] = False,
    limits: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Limits of this device, which the server cannot change (docs/deploy.md)."),
    ] = None,
) -> None:
    """Join a federation with this machine's data, until interrupted."""
    with exit_on_error():
        check_security(certificates, insecure)
        where = address(server)
        check_zone(timezone)
        check_hours(slots)
        need_flower()
        echo(f"device {device} is getting ready", err=True)
        from fedcluster.flower import node
        from fedcluster.flower.device import Identity

        identity = Identity.of(
            {
                "device": device,
                "data": data,
                "timezone": timezone,
                "slots": slots,
                "tell-labels": tell_labels,
                "allow": ",".join(allow or []),
                "init": str(init or ""),
                "columns": str(columns or ""),
                "tell-statistics": tell_statistics,
                "evaluate": evaluate,
                "limits": str(limits or ""),
                "certificates": str(certificates or ""),
            }
        )
        key = certificates / "devices" / f"{device}.key" if certificates else None
        try:
            node.join(where, identity, certificates, key, lambda text: echo(text, err=True))
        except KeyboardInterrupt:
            echo(f"device {device} has left", err=True)


def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Number of devices; their ids are 0, 1, 2, ...")] = 8,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name or address by which devices reach the server. May be repeated."),
    ] = None,
) -> None:
    """Make a development CA, a server certificate and a key for every device."""
    with exit_on_error():
        need_flower()
        from fedcluster.flower import certificates as maker

        maker.make(folder, nodes, ["localhost", "127.0.0.1", "::1", *(host or [])])
        echo(f"Written: {folder}/ca.crt, server.crt, server.key, and devices/0 to {nodes - 1}, valid for a year")


def need_flower() -> None:
    from importlib.util import find_spec

    from fedcluster.errors import BadExperiment

    if find_spec("flwr") is None:
        raise BadExperiment("a federation needs Flower: pip install 'fedcluster[flower]'")


def address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPv6]:PORT. The default port is 9092; 0 takes any free port."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, "9092"
    if not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
        raise typer.BadParameter(f"{text}: write it as HOST:PORT, for example 192.0.2.7:9092")
    return host.strip("[]"), int(port)


def check_security(certificates: Path | None, insecure: bool) -> None:
    if insecure == (certificates is not None):
        raise typer.BadParameter("use --certificates DIR, or --insecure for a test on loopback")


def check_hours(text: str) -> None:
    from fedcluster.errors import BadExperiment
    from fedcluster.fleet.timezones import daily_hours

    try:
        daily_hours(text or "0-24")
    except ValueError as error:
        raise BadExperiment(f"--slots: {error}") from None


def check_zone(name: str) -> None:
    from zoneinfo import available_timezones

    from fedcluster.errors import BadExperiment

    if name and name not in available_timezones():
        raise BadExperiment(f"--timezone {name} is not a time zone: write it as Europe/Berlin, Asia/Tokyo, UTC, ...")
