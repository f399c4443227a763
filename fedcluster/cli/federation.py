"""The commands of a federation: the server's, the devices', and the one that makes their keys."""

from pathlib import Path
from typing import Annotated

import typer

from fedcluster.cli.common import ExperimentFile, Out, Overrides, Resume, exit_on_error


def serve(
    experiment: ExperimentFile,
    listen: Annotated[str, typer.Option(metavar="ADDRESS[:PORT]", help="Where devices reach us.")] = "127.0.0.1:9092",
    nodes: Annotated[int, typer.Option(min=1, help="Devices to wait for before the first round.")] = 1,
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What fedcluster certificates made.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys, on a loopback address.")] = False,
    o: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for devices, also when all are lost.")] = 600.0,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that a cohort has for its turn.")] = 600.0,
    min_updates: Annotated[int, typer.Option(min=1, help="Updates that a cohort's turn needs.")] = 1,
) -> None:
    """Train one experiment on devices elsewhere, which join."""
    with exit_on_error("--resume"):
        need_flower()
        from fedcluster.experiment import load

        described = load(experiment, o)
        from fedcluster.cli.tables import test_scores
        from fedcluster.flower import server
        from fedcluster.flower.setup import ServeOptions
        from fedcluster.runs.directory import fresh

        if out is None and resume:
            raise typer.BadParameter("--resume needs --out, the folder to go on in")
        check_security(certificates, insecure)
        serve_options = ServeOptions(nodes, wait, deadline, min_updates)
        result = server.serve(
            described, address(listen), certificates, out or fresh(experiment.stem), resume, serve_options
        )
        last = result.history[-1]
        typer.echo(
            f"{test_scores(last)}{last['round']} rounds, {last['device_updates']:,} device updates, "
            f"{last['refused']:,} refused, {last['elapsed']:.0f} s"
        )
        typer.echo(f"written: {result.out}")


def join(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="This device's own data, as for data.name.")],
    device: Annotated[str, typer.Option(metavar="ID", help="This device's id.")],
    certificates: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With ca.crt and devices/ID.key.", show_default=False)
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys, on a loopback address.")] = False,
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="Such as Europe/Berlin; the server is told.")] = "",
    slots: Annotated[str, typer.Option(metavar="HOURS", help="When on line every day, such as 22-6.")] = "",
    tell_labels: Annotated[bool, typer.Option("--tell-labels", help="Tell the server how many of each class.")] = False,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="package.module:name that the server may ask for.")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A copy of the experiment's model.init, for frozen weights."),
    ] = None,
) -> None:
    """Take part in a federation with this machine's data, until interrupted."""
    with exit_on_error():
        need_flower()
        from fedcluster.flower import node
        from fedcluster.flower.device import Identity

        check_security(certificates, insecure)
        check_zone(timezone)
        check_hours(slots)
        identity = Identity.of(
            {
                "device": device,
                "data": data,
                "timezone": timezone,
                "slots": slots,
                "tell-labels": tell_labels,
                "allow": ",".join(allow or []),
                "init": str(init or ""),
            }
        )
        key = certificates / "devices" / f"{device}.key" if certificates else None
        try:
            node.join(address(server), identity, certificates, key, lambda text: typer.echo(text, err=True))
        except KeyboardInterrupt:
            typer.echo(f"device {device} has left", err=True)


def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Devices, which are named 0, 1, 2, ...")] = 8,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Names and addresses by which devices reach the server.")
    ] = None,
) -> None:
    """Make a development authority, a server certificate and a key for every device."""
    with exit_on_error():
        need_flower()
        from fedcluster.flower import certificates as maker

        maker.make(folder, nodes, ["localhost", "127.0.0.1", "::1", *(host or [])])
        typer.echo(f"written: {folder}/ca.crt, server.crt, server.key, and devices/0 to {nodes - 1}, valid for a year")


def need_flower() -> None:
    from importlib.util import find_spec

    from fedcluster.errors import BadExperiment

    if find_spec("flwr") is None:
        raise BadExperiment("a federation needs Flower: pip install 'fedcluster[flower]'")


def address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPv6]:PORT; 9092 where none is given, 0 for any that is free."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, "9092"
    if not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
        raise typer.BadParameter(f"{text}: write it as HOST:PORT, for example 192.0.2.7:9092")
    return host.strip("[]"), int(port)


def check_security(certificates: Path | None, insecure: bool) -> None:
    if insecure == (certificates is not None):
        raise typer.BadParameter("give --certificates DIR, or --insecure for a test on loopback")


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
