"""Pictures of a report, taken in a real browser: python tools/screenshot.py RUN OUT.png (desktop and phone, light and dark).

OUT.png shows the top of the page on a desk and, beside it, the first site on a phone in dark mode, in few enough colours to
stay below 200 kB. With `--all FOLDER` the whole page goes there at both widths, light and dark, and as PDF: to be looked at.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

DESK, PHONE = (1280, 1160), (390, 1160)  # as tall as each other: they stand side by side
MOST_BYTES = 200_000
GAP, GROUND = 32, "#c9cfca"  # between the two pictures, and around them
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium: the one that CHROMIUM names, or the first that is installed."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        sys.exit("no Chromium is installed: apt install chromium, or set CHROMIUM to its path")
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


def picture(
    running: Any, page: Path, size: tuple[int, int], *, dark: bool = False, whole: bool = False, at: str = ""
) -> Image.Image:
    """The page in a window of that size, scrolled to the part `at`; `whole` takes all that scrolling would show."""
    options = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": "dark" if dark else "light"}
    tab = running.new_page(**options)
    tab.goto(page.as_uri())
    if at and tab.locator(at).count():
        tab.locator(at).first.evaluate("part => scrollTo({top: part.offsetTop - 12, behavior: 'instant'})")
    taken = tab.screenshot(full_page=whole)
    tab.close()
    return Image.open(io.BytesIO(taken)).convert("RGB")


def side_by_side(desk: Image.Image, phone: Image.Image) -> Image.Image:
    """Both on one ground, tops level."""
    height = max(desk.height, phone.height)
    sheet = Image.new("RGB", (desk.width + phone.width + 3 * GAP, height + 2 * GAP), GROUND)
    sheet.paste(desk, (GAP, GAP))
    sheet.paste(phone, (desk.width + 2 * GAP, GAP))
    return sheet


def small_png(image: Image.Image) -> bytes:
    """As PNG with as many colours as fit into `MOST_BYTES`."""
    for colours in (256, 128, 64, 32, 16):
        written = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
        if len(written.getvalue()) < MOST_BYTES:
            return written.getvalue()
    sys.exit(f"the picture does not fit into {MOST_BYTES:,} bytes: take a smaller one")


def whole_pages(running: Any, page: Path, folder: Path) -> None:
    """All of the page at both widths, light and dark, and as it is printed."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, size in (("desk", DESK), ("phone", PHONE)):
        for dark in (False, True):
            picture(running, page, size, dark=dark, whole=True).save(folder / f"{place}-{'dark' if dark else 'light'}.png")
    tab = running.new_page()
    tab.goto(page.as_uri())
    tab.pdf(path=folder / "printed.pdf", format="A4", margin=dict.fromkeys(("top", "right", "bottom", "left"), "14mm"))
    tab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run, or a page")
    parser.add_argument("out", type=Path, nargs="?", help="the picture to write")
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="write the whole page at both widths, light and dark, and PDF"
    )
    chosen = parser.parse_args()
    page = (chosen.run / "report.html" if chosen.run.is_dir() else chosen.run).resolve()
    if not page.is_file():
        sys.exit(f"{page}: there is no such page. Make it: secateurs report {chosen.run}")
    with browser() as running:
        if chosen.out is not None:
            shots = side_by_side(picture(running, page, DESK), picture(running, page, PHONE, dark=True, at="#sites details"))
            chosen.out.write_bytes(small_png(shots))
        if chosen.all is not None:
            whole_pages(running, page, chosen.all)


if __name__ == "__main__":
    main()
