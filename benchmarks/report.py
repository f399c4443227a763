"""How fluid the report is: 200 runs of 500 rounds in Chromium.

    .venv/bin/python benchmarks/report.py

Needs Selenium, chromium and chromedriver. Times of the page are processor time of its thread, the mean of 20, so that
other programs on the machine do not count.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parent.parent))
from fedcluster.report.page import write_report
from tests.report.folders import write_run

RUNS, ROUNDS, SEEDS, TIMES = 200, 500, 5, 20

REDRAW = """
const [change, done] = arguments, curves = Report.curves;
curves.state.bands = change === "bands";
curves.state.x = change === "hours" ? "hours" : "rounds";
curves.draw(false);
requestAnimationFrame(() => requestAnimationFrame(done));
"""
HOVER = """
const [step, done] = arguments, area = document.querySelector("#curves .u-over"), box = area.getBoundingClientRect();
const at = { clientX: box.left + 20 + 15 * step, clientY: box.top + 90, bubbles: true };
area.dispatchEvent(new MouseEvent("mousemove", at));
requestAnimationFrame(() => requestAnimationFrame(done));
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(RUNS):
            method, seed = divmod(number, SEEDS)
            keys = {"local": {"lr": 0.01 * (1 + method), "steps": 5}}
            write_run(folder / f"method{method}-seed{seed}", ROUNDS, 10, seed=number, **keys)
        began = time.process_time()
        page = write_report([folder], folder / "report.html")
        print(f"write the page: {time.process_time() - began:.1f} s of one core, {page.stat().st_size / 1e6:.2f} MB")
        measure(page)


def measure(page: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1200,900"):
        options.add_argument(f"--{word}")
    browser: Any = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(page.resolve().as_uri())
        ready = "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
        print(f"open the page: {browser.execute_script(ready):.0f} ms")
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        for script, argument, words in (
            (REDRAW, "each", f"redraw two charts of {RUNS} curves"),
            (REDRAW, "bands", f"redraw two charts of {RUNS // SEEDS} means and bands"),
            (REDRAW, "hours", f"the same for {RUNS} curves over hours, which are resampled"),
            (HOVER, None, "move the pointer"),
        ):
            browser.execute_async_script(script, argument or 0)
            before = busy(browser)
            for step in range(TIMES):
                browser.execute_async_script(script, argument or step)
            print(f"{words}: {1000 * (busy(browser) - before) / TIMES:.0f} ms")
    finally:
        browser.quit()


def busy(browser: Any) -> float:
    """Seconds of processor time that the page's thread has spent on tasks."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


if __name__ == "__main__":
    main()
