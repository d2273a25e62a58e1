"""The size of a report, the time to write it, and the time until it is usable in a browser.

usage: python benchmarks/report.py

The page is synthetic, as large as the main table of the paper: 14 methods, 20 clients, 3 seeds. Chromium opens it, and,
as a lower bound, a page with nothing but plotly's script. Times are medians over fresh pages, from the navigation on.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from plotly.offline import get_plotlyjs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedthe import store
from fedthe.report.formats import FORMATS
from fedthe.report.page import write_page
from report_pages import make_page

RESULT = Path(__file__).with_suffix(".json")
OPENINGS = 9
WAIT = """async () => {
  while (!window.Plotly) await new Promise(resolve => setTimeout(resolve, 5));
  const idle = await new Promise(resolve => requestIdleCallback(() => resolve(performance.now())));
  const load = performance.getEntriesByType("navigation")[0].loadEventEnd;
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  return {"first paint": paint ? paint.startTime : null, "page can be used": load, "charts are there": idle};
}"""


def open_page(browser: Browser, path: Path) -> dict[str, float | None]:
    """Milliseconds since the navigation began."""
    found: list[dict[str, Any]] = []
    for _ in range(OPENINGS):
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(path.as_uri())
        found.append(page.evaluate(WAIT))
        page.close()
    known = {name: [each[name] for each in found if each[name] is not None] for name in found[0]}
    return {name: round(statistics.median(values)) if values else None for name, values in known.items()}


def main() -> None:
    page = make_page()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path, bare = Path(folder) / "report.html", Path(folder) / "plotly.html"
        seconds = {}
        began = time.perf_counter()
        write_page(page, path)
        seconds["html"] = time.perf_counter() - began
        for name, write in FORMATS.items():
            began = time.perf_counter()
            write(page)
            seconds[name] = time.perf_counter() - began
        bare.write_text(f"<!doctype html><title>x</title><p>x</p><script>{get_plotlyjs()}</script>", encoding="utf-8")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        opened = {"the report": open_page(browser, path), "plotly alone": open_page(browser, bare)}
        browser.close()
        result = {"megabytes": path.stat().st_size / 1e6, "seconds to write": seconds, "milliseconds to open": opened}
    for name, value in result.items():
        print(f"{name}: {value}")
    store.write_json(RESULT, result)


if __name__ == "__main__":
    main()
