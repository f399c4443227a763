"""The report while a run trains: what the server answers, and that it neither stops nor changes the run."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedcluster
from fedcluster.errors import BadExperiment
from fedcluster.report.live import Live
from fedcluster.runs.progress import Display
from tests.conftest import Here
from tests.report.folders import data_of_page, write_run
from tests.report.test_collect import KEYS


def get(live: Live, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content


class Events:
    """A connection to /events, as a browser's EventSource has it."""

    def __init__(self, live: Live) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
        self.connection.request("GET", "/events")
        self.answer = self.connection.getresponse()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        name = ""
        for raw in self.answer:
            key, _, value = raw.decode().rstrip("\n").partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield name, json.loads(value)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    with Live(write_run(tmp_path / "run", rounds=3)) as live:
        live.thread.start()
        yield live


def test_the_page_and_nothing_else(served: Live) -> None:
    status, html = get(served)
    assert (status, data_of_page(html)["live"]) == (200, True)
    assert get(served, "/../run.json")[0] == 404
    assert get(served, method="POST")[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", ""])
def test_a_page_of_another_name_is_refused(served: Live, host: str) -> None:
    """A web site whose name points to this machine, as in DNS rebinding."""
    status, content = get(served, Host=host.format(port=served.port))
    assert (status, "run" in content and "rounds" in content) == (403, False)
    assert get(served, "/events", Host=host.format(port=served.port))[0] == 403
    assert get(served, Host=f"localhost:{served.port}")[0] == 200


def test_it_listens_on_loopback_only(served: Live) -> None:
    assert served.http.server_address[0] == "127.0.0.1"
    with pytest.raises(BadExperiment, match=f"--live-port {served.port} cannot be used"):
        Live(served.folder, served.port)


def test_events_follow_the_run_to_its_end(tmp_path: Path) -> None:
    """A browser that goes and comes back misses nothing; the run's bits are those of a run that nobody watched."""
    folder, seen = tmp_path / "run", list[tuple[str, Any]]()
    experiment = fedcluster.Experiment(**KEYS | {"rounds": 6})

    class Wait(fedcluster.Callback):
        """Lets the watcher see the first rounds before the others are trained."""

        def on_round_end(self, line: Any, state: Any) -> None:
            if line["round"] == 2:
                events = Events(live)
                seen.append(next(iter(events)))
                events.connection.close()  # as a browser that is closed
                watcher.start()
            if line["round"] in (2, 4):
                assert noticed[line["round"]].wait(20)

    noticed = {2: threading.Event(), 4: threading.Event()}

    def watch() -> None:
        for name, data in Events(live):
            seen.append((name, data))
            for round in noticed:
                if data["runs"] and data["runs"][0]["rounds"]["round"][-1] >= round:
                    noticed[round].set()

    watcher = threading.Thread(target=watch, daemon=True)
    with Live(folder) as live:
        result = fedcluster.run(experiment, folder, display=Display(), callbacks=[live, Wait()])
    watcher.join(20)
    assert [name for name, _ in seen].count("end") == 1
    assert seen[0][1]["runs"][0]["rounds"]["round"] == [0, 1, 2]
    last = seen[-1][1]["runs"][0]
    assert (seen[-1][0], last["state"], last["rounds"]["round"][-1]) == ("end", "finished", 6)
    alone = fedcluster.run(experiment, display=Display()).history
    assert [line["train_loss"] for line in result.history] == [line["train_loss"] for line in alone]


def test_the_command_says_where_the_page_is(here: Here, tmp_path: Path) -> None:
    experiment = tmp_path / "small.toml"
    experiment.write_text(fedcluster.Experiment(**KEYS).to_toml())
    code, _, err = here("run", experiment, "--out", "out", "--live", "--workers", 1)
    assert code == 0
    assert "Live report: http://127.0.0.1:" in err
