"""Pages say nothing that is not there: links lead to files and headings, paths exist, how-to pages run as they are written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import secateurs
from pages import ROOT, blocks, build, digits_loaders, run_block, trained
from secateurs.config import CRITERIA

USERS = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")]
HOWTO = [*sorted((ROOT / "docs" / "howto").glob("*.md")), ROOT / "docs" / "report.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    wrong = [f"{page.relative_to(ROOT)}: {link} {why}" for page in PAGES for link in links(page) if (why := astray(page, link))]
    assert not wrong, "\n".join(wrong)


def links(page: Path) -> list[str]:
    """The links of a page to files of the repository."""
    return [link for link in LINK.findall(page.read_text()) if "://" not in link and not link.startswith("mailto:")]


def astray(page: Path, link: str) -> str:
    """What is wrong with a link of a page; nothing if it leads to a file, or to a heading that is there."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "leads nowhere"
    if ROOT / "docs" in page.parents and ROOT / "docs" not in target.parents:
        return "leads out of docs/, where Sphinx builds no page: name the path as code"
    return "has no such heading" if anchor and target.suffix == ".md" and anchor not in anchors(target) else ""


def test_the_documentation_is_no_book() -> None:
    """Notebooks stand beside their rows, in the lab; pages of users have the conclusions."""
    assert len(USERS) <= 30
    assert sum(len(page.read_text().split()) for page in USERS) <= 25_000


def test_paths_in_code_are_there() -> None:
    """What pages call `tests/...` or `src/...` exists."""
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        for path in re.findall(r"`((?:src|lab|tests|tools|recipes|examples)/[\w./-]+\.\w+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}"


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    listed = {name for page in docs.rglob("*.md") for name in named_in_toctrees(page)}
    found = {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")}
    assert found - listed == {"index"}


def named_in_toctrees(page: Path) -> set[str]:
    """The pages that the toctrees of a page name, relative to docs/."""
    lines = [line for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S) for line in tree.split()]
    return {(page.parent / line).relative_to(ROOT / "docs").as_posix() for line in lines if not line.startswith(":")}


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function):: (\w+)", page, re.M)
    assert sorted({*listed, "SecateursError"}) == sorted(secateurs.__all__)  # errors are listed by their module


def test_the_page_of_criteria_names_all_that_are_built_in() -> None:
    page = (ROOT / "docs" / "howto" / "criterion.md").read_text()
    listed = re.search(r"^Built in: (.*?)\. What they bring", page, re.M | re.S)
    assert listed is not None
    assert set(re.findall(r"`([\w-]+)`", listed[1])) == set(CRITERIA)


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_commands_in_tables_are_whole(page: str) -> None:
    cut_short = re.findall(r"`[^`\n]*…`", "\n".join(re.findall(r"^\|.*|\(`.*", (ROOT / page).read_text(), re.M)))
    assert cut_short == []


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained(digits_loaders()[0])


@pytest.mark.docs
@pytest.mark.usefixtures("own_criteria")
@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.stem)
def test_how_to_runs(page: Path, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    train, val, test = digits_loaders()
    names: dict[str, Any] = {"model": model, "train": train, "val": val, "test": test, "build": build}
    for block in blocks(page):
        assert block.language == "python", f"line {block.line}: a block of {block.language!r}, which no test runs"
        run_block(block, page, names)
    sys.modules.pop("segmentation_miou", None)
    result = names["result"]
    assert result.search.before > 0.85, "the network to prune is not trained"
    assert result.search.before - result.search.after <= 0.02 + 1e-9
    assert result.macs.removed > 0.1
