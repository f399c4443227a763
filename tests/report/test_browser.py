"""The page in a real browser: Chromium, driven by Selenium. Skipped where either is missing."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedcluster.report.live import Live
from fedcluster.report.page import Content, Table, write_page, write_report
from tests.report.folders import cycle_line, write_lines, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="no Selenium: pip install selenium")
By = pytest.importorskip("selenium.webdriver.common.by").By
expected_conditions = pytest.importorskip("selenium.webdriver.support.expected_conditions")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
needs_a_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium-driver")
pytestmark = [needs_a_browser, pytest.mark.xdist_group("browser")]

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked=2"> <!-- \''
Open = Callable[[Path], Any]
SCORED = ("device", "cluster", "samples", "loss")  # columns of devices.jsonl


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1200,900",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    """Opens a page from disk; at the end of the test its console must be empty."""

    def open_page(path: Path) -> Any:
        browser.get(path.resolve().as_uri())
        return browser

    yield open_page
    assert browser.get_log("browser") == []


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on two methods with two seeds each."""
    folder = tmp_path_factory.mktemp("several")
    for method in ("fedavg", "fedcluster"):
        for seed in range(2):
            write_run(folder / f"{method}-seed{seed}", seed=seed, clusters=1 if method == "fedavg" else 4)
    return write_report([folder], folder / "report.html")


def texts(browser: Any, selector: str) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
    )
    return found


def find(browser: Any, selector: str) -> Any:
    """The first element, in the middle of the window: the header covers what is at its top."""
    place = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", place)
    return place


def hover(browser: Any, selector: str) -> None:
    place = find(browser, selector)
    webdriver.ActionChains(browser).move_to_element(place).perform()


def test_sections_charts_and_tables_are_there(several: Path, show: Open) -> None:
    browser = show(several)
    titles = [
        "Curves",
        "Runs",
        "One run",
        "Cycles",
        "Fleet and clusters",
        "Refused, lost, late",
        "Privacy",
        "Experiment",
    ]
    assert texts(browser, "section > h2") == titles
    assert len(browser.find_elements("css selector", "#curves .uplot canvas")) == 2
    assert texts(browser, ".legend button") == ["FedAvg (2 seeds)", "FedCluster (2 seeds)"]
    assert len(texts(browser, "#runs tbody tr")) == 4


def test_hover_shows_the_values_of_the_curves(several: Path, show: Open) -> None:
    browser = show(several)
    hover(browser, "#curves .u-over")
    tip = texts(browser, "#curves .tip")[0]
    assert "learning rounds: 6" in tip
    assert "FedAvg" in tip
    assert "FedCluster" in tip
    assert " to " in tip  # the range over seeds


def test_axis_scale_smoothing_and_toggles_redraw_the_curves(several: Path, show: Open) -> None:
    browser = show(several)
    picture = "return document.querySelector('#curves canvas').toDataURL()"
    drawn = [browser.execute_script(picture)]

    def changed() -> bool:
        drawn.append(browser.execute_script(picture))
        return drawn[-1] not in drawn[:-1]

    find(browser, "#axis option[value='bytes']").click()
    assert changed()
    assert "megabytes" in find(browser, "#curves .area").get_attribute("aria-label")
    for box in browser.find_elements("css selector", "#curves > .controls input[type=checkbox]"):
        box.click()
        assert changed()
    slider = find(browser, "#curves input[type=range]")
    slider.send_keys(webdriver.Keys.END)
    assert changed()
    button = find(browser, ".legend button")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert changed()
    webdriver.ActionChains(browser).double_click(find(browser, ".legend button")).perform()
    pressed = [
        one.get_attribute("aria-pressed") for one in browser.find_elements("css selector", ".legend [aria-pressed]")
    ]
    assert pressed == ["true", "false", "false", "false"]  # seeds are apart now


def test_keys_zoom_and_read_the_curves_aloud(several: Path, show: Open) -> None:
    browser = show(several)
    chart = find(browser, "#curves .area")
    assert chart.get_attribute("role") == "img"
    assert "FedCluster ends at" in chart.get_attribute("aria-label")
    chart.send_keys(webdriver.Keys.ARROW_RIGHT, webdriver.Keys.ARROW_RIGHT)
    assert "learning rounds: 1" in texts(browser, "#curves [aria-live]")[0]
    picture = "return document.querySelector('#curves canvas').toDataURL()"
    before = browser.execute_script(picture)
    chart.send_keys("+")
    assert browser.execute_script(picture) != before
    chart.send_keys("0")


def test_the_table_sorts_filters_and_chooses_a_run(several: Path, show: Open) -> None:
    browser = show(several)
    names = "#runs tbody th"
    before = texts(browser, names)
    header = find(browser, "#runs thead th button")
    header.click()
    header.click()
    assert texts(browser, names) == before[::-1]
    assert find(browser, "#runs thead th").get_attribute("aria-sort") == "descending"
    find(browser, "#runs input").send_keys("fedcluster")
    assert texts(browser, names) == ["fedcluster-seed1", "fedcluster-seed0"]
    find(browser, "#runs > button").click()  # only these in the curves
    assert [
        one.get_attribute("aria-pressed") for one in browser.find_elements("css selector", ".legend [aria-pressed]")
    ] == ["false", "true"]
    find(browser, "#runs tbody button").click()
    assert browser.find_element("id", "run").get_property("value") == "3"
    assert texts(browser, names) == ["fedcluster-seed1", "fedcluster-seed0"]  # as sorted and filtered before


def test_the_wheel_turns_with_its_slider(several: Path, show: Open) -> None:
    browser = show(several)
    wheel, slider = ".wheel canvas", find(browser, "#cycles input[type=range]")
    assert "Cycle wheel of round 12: 4 clusters" in find(browser, wheel).get_attribute("aria-label")
    slider.send_keys(webdriver.Keys.HOME)
    assert slider.get_attribute("aria-valuetext") == "round 1"
    assert len(texts(browser, "#cycles .turning tbody tr")) == 4


def test_the_wheel_says_who_pulled_back_whom(tmp_path: Path, show: Open) -> None:
    folder = write_run(tmp_path / "run", rounds=1, clusters=3)
    lines = [cycle_line(1, K, moved, cosine, []) for K, moved, cosine in ((0, 0.4, 0.0), (1, 0.9, -0.6), (2, 0.2, 0.3))]
    lines[0]["cosine"] = None
    lines[2] |= {"changed": False, "moved": 0.0, "cosine": None}
    write_lines(folder / "cycles.jsonl", lines)
    browser = show(write_report([folder], tmp_path / "report.html"))
    said = (
        "Cluster 1 moved the model furthest, by 0.9. 1 of 3 turns pulled the model back, most of all cluster 1 after "
    )
    assert texts(browser, "#cycles .said") == [
        f"{said}cluster 0 (cosine −0.60). 1 failed and left the model as it was."
    ]
    assert texts(browser, "#cycles .turning tbody .words") == ["pulled back cluster 0"]


def test_simulated_time_has_a_timetable(tmp_path: Path, show: Open) -> None:
    folder = write_run(tmp_path / "run", rounds=2, clusters=2)
    lines = [cycle_line(j, K, 0.5, 0.1, []) for j in (1, 2) for K in (0, 1)]
    for number, line in enumerate(lines):
        line |= {"opened": 3600.0 * number, "simulated_seconds": 3600.0 * (number + 1)}
    write_lines(folder / "cycles.jsonl", lines)
    browser = show(write_report([folder], tmp_path / "report.html"))
    label = find(browser, "#fleet > div:last-child canvas").get_attribute("aria-label")
    assert label == "When 2 clusters trained in rounds 1 to 2, from 00:00 to 04:00 of simulated time."


def test_a_diverged_run_says_why(tmp_path: Path, show: Open) -> None:
    folder = write_run(tmp_path / "run", rounds=2)
    for name in ("model.safetensors", "metrics.jsonl"):
        (folder / name).unlink()
    (folder / "diverged.txt").write_text("round 1: lower local.lr")
    browser = show(write_report([folder], tmp_path / "report.html"))
    assert texts(browser, "#about span") == ["diverged", "round 1: lower local.lr"]
    assert texts(browser, "#curves p") == ["No round is finished yet."]


def test_hostile_names_are_text(tmp_path: Path, show: Open) -> None:
    folder = write_run(tmp_path / HOSTILE.replace("/", "∕"), clusters=2, data={"name": HOSTILE})
    fleet = json.loads((folder / "fleet.json").read_text())
    fleet |= {"names": [HOSTILE] * 20, "free": [[0.5] * 48] * 2, "free_is": HOSTILE}
    (folder / "fleet.json").write_text(json.dumps(fleet))
    lines = [cycle_line(1, K, 1.0, 0.5, [3]) | {"reasons": [[4, HOSTILE]], "undone": HOSTILE} for K in range(2)]
    write_lines(folder / "cycles.jsonl", lines)
    scores = {"device": [0, 1], "cluster": [0, 1], "samples": [5, 5], "loss": [1.0, 2.0], HOSTILE: [1.0, 2.0]}
    write_lines(folder / "devices.jsonl", [{"round": 1, **scores}])
    content = Content(HOSTILE, [HOSTILE], [Table([HOSTILE, "x"], [[HOSTILE, HOSTILE]], title=HOSTILE)], runs=[folder])
    browser = show(write_page(content, tmp_path / "page.html"))
    assert browser.execute_script("return window.hacked") is None
    assert browser.find_elements("css selector", "img") == []
    assert texts(browser, "h1") == [HOSTILE]
    assert HOSTILE[:100] in texts(browser, "#lost tbody")[-1]
    assert HOSTILE in texts(browser, "#experiment tbody")[0]
    assert HOSTILE in texts(browser, "#devices tbody th")


def test_everything_has_a_name_for_screen_readers(several: Path, show: Open) -> None:
    browser = show(several)
    nameless = browser.execute_script("""
        const text = (node) => node.getAttribute("aria-label") || node.textContent.trim();
        const named = (node) => text(node) || (node.labels && node.labels.length);
        return [...document.querySelectorAll("button, a, select, input, [role=img], [role=region], canvas[role]")]
            .filter((node) => !named(node)).map((node) => node.outerHTML.slice(0, 200))""")
    assert nameless == []
    assert browser.execute_script("return document.documentElement.lang") == "en"
    unlabelled = (
        "section:not([aria-labelledby]), table:not(:has(thead th[scope=col])), canvas:not([role]):not(.uplot *)"
    )
    assert browser.find_elements("css selector", unlabelled) == []


def test_a_phone_scrolls_in_one_direction(several: Path, show: Open) -> None:
    browser = show(several)
    narrow = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        browser.refresh()
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_both_colour_schemes(several: Path, show: Open) -> None:
    browser = show(several)
    background = "return getComputedStyle(document.body).backgroundColor"
    seen = set()
    for _ in range(3):
        browser.find_element("id", "theme").click()
        seen.add(
            (
                browser.execute_script("return document.documentElement.dataset.theme"),
                browser.execute_script(background),
            )
        )
    assert {theme for theme, _ in seen} == {None, "dark", "light"}
    assert len({colour for _, colour in seen}) == 2


def test_a_page_follows_a_run_and_reconnects(tmp_path: Path, browser: Any) -> None:
    """The run writes, the server goes and comes back at its address, the run ends: the open page shows each."""

    def wait_for(text: str) -> None:
        said = (By.ID, "live")
        WebDriverWait(browser, 20).until(expected_conditions.text_to_be_present_in_element(said, text))

    def broken() -> str:
        raise ConnectionError

    folder = tmp_path / "run"
    with Live(folder) as live:
        live.thread.start()
        browser.get(live.address)
        wait_for("waiting for the run")
        write_run(folder, rounds=2)
        wait_for("live, round 2")
        find(browser, "#cycles input[type=range]").send_keys(webdriver.Keys.HOME)
        (folder / "devices.jsonl").write_text(json.dumps({"round": 2} | {key: [0] for key in SCORED}) + "\n")
        made = "return document.getElementById('devices') && document.activeElement.ariaLabel"
        WebDriverWait(browser, 20).until(lambda page: page.execute_script(made) == "Round")
        live.http.shutdown()
        live.seen, live.data = None, broken  # type: ignore[method-assign]
        (folder / "run.json").touch()
        wait_for("reconnecting")
        live.http.server_close()
    with Live(folder, live.port) as live:
        live.thread.start()
        wait_for("live, round 2")
    wait_for("finished")
    assert len(browser.find_elements("css selector", "#curves .uplot")) == 2
    browser.get_log("browser")  # Chromium logs connections that break
