"""The report in a real browser: no errors, no requests, figures that answer the pointer, on a phone and on a desk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_report import digits_run, export_fields

from secateurs.report import write_report
from secateurs.report.exports import note_exports

pytestmark = pytest.mark.browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = [(320, 640), (390, 844), (768, 1024), (1280, 800)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed: apt install chromium, or set CHROMIUM to its path")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = digits_run(tmp_path_factory.mktemp("browser") / "run")
    note_exports(folder, [export_fields("onnx", 2.0), export_fields("source", 0.5)])
    return write_report(folder)


@dataclass
class Opened:
    """A page, and all that went wrong or out while it was open."""

    page: Any
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def opened(browser: Any, path: Path, width: int = 1280, height: int = 800, **options: Any) -> Opened:
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    found = Opened(page)
    page.on("console", lambda message: found.troubles.append(message.text))
    page.on("pageerror", lambda error: found.troubles.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(path.as_uri())
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_opens_without_errors_requests_or_sideways_scrolling(
    browser: Any, report: Path, width: int, height: int, scheme: str
) -> None:
    found = opened(browser, report, width, height, color_scheme=scheme)
    assert found.troubles == []
    assert found.requests == [report.as_uri()]
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(","))
    assert (bright > 600) == (scheme == "light")
    found.page.close()


def test_every_figure_is_there_and_not_empty_without_a_script(browser: Any, report: Path) -> None:
    found = opened(browser, report, java_script_enabled=False)
    figures = found.page.locator("svg[role=img]")
    assert figures.count() > 10
    for place in range(figures.count()):
        figure = figures.nth(place)
        box = figure.bounding_box()
        assert box is not None
        assert box["width"] > 100
        assert box["height"] > 60
        assert figure.locator("path, polyline, rect, circle, line").count() > 4
    assert found.page.locator("svg title").count() > 0  # what a browser shows by itself
    found.page.close()


def test_letters_in_figures_are_large_enough_on_a_phone(browser: Any, report: Path) -> None:
    found = opened(browser, report, 390, 844)
    heights = found.page.evaluate(
        "[...document.querySelectorAll('svg[role=img] text')].filter(t => !t.hasAttribute('transform'))"
        ".map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) > 8
    found.page.close()


def test_pointing_at_a_mark_gives_its_numbers(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    page = found.page
    tip = page.locator("#tip")
    assert tip.is_hidden()
    bars = page.locator("#sites rect.columns").first
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    assert box is not None
    tips = bars.get_attribute("data-tips").split("|")
    for place in (0, len(tips) - 1):
        page.mouse.move(box["x"] + box["width"] * (place + 0.5) / len(tips), box["y"] + box["height"] / 2)
        assert tip.inner_text() == tips[place].replace("\N{NO-BREAK SPACE}", " ") or tip.inner_text() == tips[place]
        assert page.locator("line.cursor").count() == 1
    page.locator("#sites .mark").nth(1).hover()
    assert "removed" in tip.inner_text()
    page.mouse.move(2, 2)
    assert tip.is_hidden()
    assert found.troubles == []
    page.close()


def test_touching_a_mark_gives_its_numbers(browser: Any, report: Path) -> None:
    found = opened(browser, report, 390, 844, has_touch=True)
    found.page.locator("#time rect.columns").first.tap()
    assert "%" in found.page.locator("#tip").inner_text()
    found.page.close()


def test_tables_are_copied_as_text(browser: Any, report: Path) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(report.as_uri())
    page.locator("#table .copyable button").last.click()
    page.get_by_text("Copied").wait_for()
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].split("\t")[:3] == ["Layer", "Filters", "Removed"]
    assert lines[-1].startswith("Total\t")
    context.close()


def test_what_is_folded_away_is_printed(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    assert found.page.locator("details:not([open])").count() > 0
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert found.page.locator("details:not([open])").count() == 0
    assert len(found.page.pdf()) > 10_000
    found.page.close()


def test_buttons_cover_no_words_on_a_phone(browser: Any, report: Path) -> None:
    found = opened(browser, report, 390, 844)
    for place in range(found.page.locator(".copyable:has(> pre)").count()):
        box = found.page.locator(".copyable:has(> pre)").nth(place)
        if box.is_visible():
            button, text = box.locator("button").bounding_box(), box.locator("pre").bounding_box()
            padding = float(box.locator("pre").evaluate("e => getComputedStyle(e).paddingTop").removesuffix("px"))
            assert button["y"] + button["height"] <= text["y"] + padding
    found.page.close()


def test_nothing_is_cut_off_on_paper(browser: Any, report: Path) -> None:
    """A4 less its margins is about 690 pixels wide."""
    found = opened(browser, report, 690, 1000)
    found.page.emulate_media(media="print")
    found.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 690
    found.page.close()
