"""Every page in a real browser: no error, no request that leaves the machine, no overflow.

Debian's Chromium is driven. GIGPO_SCREENSHOTS names a directory in which the pictures are kept.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from _pytest.mark import ParameterSet

from analysis import write_report_file
from analysis.view.connections import make_server
from analysis.view.page import Page
from analysis.view.pages import PAGES
from analysis.view.server import make_app
from store import RunLayout
from tests.analysis.view.conftest import TOKEN, example_addresses
from tests.support.sizes import IN_FULL

CHROMIUM = Path("/usr/bin/chromium")
WIDTHS = (1280, 400)
START_S = 30.0

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install chromium"
)


@pytest.fixture(scope="module")
def address(layout: RunLayout) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = make_server(make_app([layout.root], token=TOKEN))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=START_S)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driven:
        browser = driven.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pictures() -> Path | None:
    """Return the directory for the pictures; None if nobody asked for them."""
    if not (kept := os.environ.get("GIGPO_SCREENSHOTS")):
        return None
    Path(kept).mkdir(parents=True, exist_ok=True)
    return Path(kept)


def watch(tab: Any) -> list[str]:
    """Return a list that fills with what goes wrong in a tab."""
    wrong: list[str] = []

    def look_at(request: Any) -> None:
        if urlsplit(request.url).hostname not in ("127.0.0.1", None):
            wrong.append(f"asked {request.url[:200]}")

    tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("dialog", lambda dialog: wrong.append("a text of the run was executed"))
    tab.on("request", look_at)
    return wrong


def pages_and_widths() -> list[ParameterSet]:
    """Return each page with every width; shortened, with the wide and the narrow one by turns."""
    widths = [WIDTHS if IN_FULL else (width,) for width in (*WIDTHS,) * len(PAGES)]
    return [
        pytest.param(page, width, id=f"{page.title}-{width}")
        for page, some in zip(PAGES, widths, strict=False)
        for width in some
    ]


@pytest.mark.shortened
@pytest.mark.parametrize(("page", "width"), pages_and_widths())
def test_a_page_opens_without_errors(
    page: Page, width: int, layout: RunLayout, address: str, browser: Any, pictures: Path | None
) -> None:
    for number, path in enumerate(example_addresses(page, layout.root)):
        scheme = "light" if width == max(WIDTHS) else "dark"
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        wrong = watch(tab)
        tab.goto(address + path)
        # not by functions in text: the page's policy refuses them
        tab.wait_for_selector("[data-later]", state="detached")
        tab.wait_for_selector(".chart:not(:has(> :nth-child(2)))", state="detached")
        if pictures is not None:
            name = f"{page.path.strip('/')}-{number}-{width}.png"
            tab.screenshot(path=pictures / name, full_page=True)
        overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, f"{path} is {overflow} px too wide"
        assert wrong == []
        tab.close()


def test_a_query_is_shown_and_copied(address: str, browser: Any) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(f"{address}/run")
    panel = tab.locator("section.panel").first
    assert not panel.locator(".sql").is_visible()
    panel.locator(".sql-button").click()
    assert panel.locator(".sql").is_visible()
    panel.get_by_text("Copy query").click()
    panel.get_by_text("Copied").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == panel.locator("pre.query").inner_text()
    context.close()


def test_pointing_at_a_step_shows_it_and_marks_the_same_state(
    address: str, browser: Any, layout: RunLayout
) -> None:
    (page,) = [page for page in PAGES if page.path == "/group"]
    tab = browser.new_page()
    tab.goto(address + example_addresses(page, layout.root)[-1])
    cell = tab.locator(".lanes .lane .cell").first
    cell.hover()
    assert tab.locator("[data-field=action]").inner_text() == "go north"
    assert tab.locator(".cell.same").count() >= 1
    assert "/trajectory?traj=" in tab.locator("a[data-link=trajectory]").get_attribute("href")
    tab.close()


def test_a_report_opens_from_a_file_and_asks_nothing(
    layout: RunLayout, browser: Any, pictures: Path | None, tmp_path: Path
) -> None:
    report = write_report_file(layout.root, output=tmp_path / "report.html")
    for width in WIDTHS:
        tab = browser.new_page(viewport={"width": width, "height": 900})
        wrong = watch(tab)
        asked: list[str] = []
        tab.on("request", lambda request, asked=asked: asked.append(request.url))
        tab.goto(report.as_uri())
        tab.locator(".chart .bk-Figure").first.wait_for()
        n_charts = tab.locator(".chart").count()
        assert n_charts >= 4 and tab.locator(".chart .bk-Figure").count() == n_charts
        assert asked == [report.as_uri()] and wrong == []
        assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        if pictures is not None:
            tab.screenshot(path=pictures / f"report-{width}.png", full_page=True)
        tab.locator("details.query summary").first.click()
        assert "gigpo sql" in tab.locator("details.query pre").first.inner_text()
        tab.close()


@pytest.mark.parametrize(
    ("path", "leads_to"), [("/staleness", "/group"), ("/timeline", "/lineage")]
)
def test_a_mark_of_a_chart_leads_on(path: str, leads_to: str, address: str, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(address + path)
    tab.wait_for_function("Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")
    # The place of the first linked mark on the screen, from the chart's own scales.
    place = tab.evaluate(
        """() => {
          const root = Object.values(Bokeh.index.roots ?? Bokeh.index)[0];
          const view = root.plot_view ?? root;
          const tap = view.model.toolbar.tools.find((tool) => tool.type === "TapTool");
          const data = tap.renderers[0].data_source.data;
          const middle = (a, b) => (a[0] + b[0]) / 2;
          const x = data.x ? data.x[0] : middle(data.left, data.right);
          const y = data.y ? data.y[0] : middle(data.bottom, data.top);
          const frame = view.el.getBoundingClientRect();
          const area = (view.frame_view ?? view.frame);
          return [frame.x + area.x_scale.compute(x), frame.y + area.y_scale.compute(y)];
        }"""
    )
    tab.mouse.click(*place)
    tab.wait_for_url(f"**{leads_to}?*")
    tab.close()
