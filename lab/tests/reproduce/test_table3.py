"""Table 3: the paper's published figures beside the rows of comparisons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from comparisons import call, made_up_row, places, written
from secateurs.errors import InvalidInput
from secateurs_lab.compare.rows import (
    Answers,
    Count,
    comparison_rows,
)
from secateurs_lab.compare.run import ROWS
from secateurs_lab.reproduce.table3 import PAPER, findings, table3, table3_sheet, table3_text


def test_the_papers_figures_stand_above_ours() -> None:
    rows = [
        made_up_row(m, 0.45, a, macs=Count(1000, 540)) for m, a in (("paper", 0.895), ("li", 0.89), ("random:uniform", 0.5))
    ]
    sheet = table3_sheet({20: rows}, "none")
    assert [line[1] for line in sheet.lines] == [
        "SFP, published",
        "FPGM, published",
        "the paper, published",
        "paper, 45 %",
        "li, 45 %",
        "random:uniform, 45 %",
    ]
    assert sheet.lines[2] == ("20", "the paper, published", "–", "92.13", "91.42", "-0.71", "45.05", "46.42")
    assert sheet.lines[3] == ("20", "paper, 45 %", "1", "90.00", "89.50", "-0.50", "46.00", "40.00")
    first, second = findings({20: rows}, "none")
    assert first.endswith("The paper's method is 0.50 points ahead of the best rival (li).")
    assert second == (
        "ResNet-20, the paper's method: published -0.71 points at 45.05 % of the FLOPs; here -0.50 at 46.0 %: reached."
    )
    behind = [replace(one, test=Answers(0.9, 0.88, 9000, 8800, 10_000)) if one.method == "paper" else one for one in rows]
    assert findings({20: behind}, "none")[1].endswith("here -2.00 at 46.0 %: missed by 1.29 points.")
    assert "| 20 | li, 45 % |" in table3_text({20: rows})
    assert table3_text({}) == "No rows yet.\n"


def test_methods_of_table3_come_in_one_order_at_every_share() -> None:
    """Processes that share the work add their rows in any order; a method's own variants are not its rivals."""
    arrived = [("li", 0.1), ("paper", 0.1), ("ensemble", 0.1), ("ensemble", 0.2), ("paper", 0.2), ("li", 0.2)]
    rows = [made_up_row(method, target, {"li": 0.8, "paper": 0.85, "ensemble": 0.87}[method]) for method, target in arrived]
    made = [line[1] for line in table3_sheet({44: rows}, "none").lines]
    assert made == [f"{method}, {share} %" for share in (10, 20) for method in ("li", "paper", "ensemble")]
    assert findings({44: rows}, "none")[0].endswith("The paper's method is 5.00 points ahead of the best rival (li).")


def test_published_changes_are_those_of_the_text() -> None:
    """Every depth has the paper's own line, and its rivals' as far as they published one."""
    assert {depth: [line.who for line in lines] for depth, lines in PAPER.items()} == {
        20: ["SFP", "FPGM", "the paper"],
        32: ["SFP", "FPGM", "the paper"],
        56: ["Li et al.", "SFP", "FPGM", "the paper"],
        110: ["Li et al.", "SFP", "FPGM", "the paper"],
    }


def test_table3_is_made_of_the_rows_of_all_depths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setenv("COLUMNS", "200")  # so that no cell of the printed table is broken
    monkeypatch.setattr("secateurs_lab.reproduce.table3.rendered", lambda out: drawn.append(out) or [])
    written(tmp_path / "resnet20", [made_up_row("paper", 0.3, 0.89), made_up_row("li", 0.3, 0.88)])
    written(tmp_path / "resnet56", [made_up_row("paper", 0.3, 0.91, model="resnet56")])
    call(table3, "--render", "--out", str(tmp_path))
    text = (tmp_path / "table3.md").read_text()
    assert "| 20 | paper, 30 % |" in text
    assert "| 56 | paper, 30 % |" in text
    assert drawn == [tmp_path / "resnet20", tmp_path / "resnet56"]
    assert "the paper, published" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match="--depth 21: wanted 20, 32, 56, 110"):
        call(table3, "--depth", "21", "--out", str(tmp_path))


@pytest.mark.realdata
@pytest.mark.parametrize(("depth", "weights", "examples"), [(20, "public", 100), (110, "fresh", 16)])
def test_table3_on_cifar10(depth: int, weights: str, examples: int, tmp_path: Path) -> None:
    few = ["--budget", "none", "--targets", "0.3", "--examples", str(examples)]
    call(table3, "--depth", str(depth), "--weights", weights, "--methods", "random:uniform", "--only", *few, *places(tmp_path))
    (row,) = comparison_rows(tmp_path / "out" / f"resnet{depth}" / ROWS)
    assert (row.method, row.reached, row.test.count) == ("random:uniform", True, examples)
    assert "the paper, published" in (tmp_path / "out" / "table3.md").read_text()
