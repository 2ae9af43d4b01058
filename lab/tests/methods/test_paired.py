"""Leads on the same test examples: known by hand, and kept in the rows."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comparisons import made_up_row
from secateurs.config import TrainSettings
from secateurs.errors import RunError
from secateurs_lab.compare.paired import lead_of, packed_answers, right_answers
from secateurs_lab.compare.rows import Answers, Row
from secateurs_lab.compare.tables import leads_sheet, tables_text
from secateurs_lab.methods import Budget


def answered(method: str, right: str, seed: int = 0, target: float = 0.5, **changes: object) -> Row:
    """A row whose network has those test examples right that are marked by "x"."""
    values = torch.tensor([float(mark == "x") for mark in right], dtype=torch.float64)
    test = Answers(0.9, float(values.mean()), 0.9 * len(right), float(values.sum()), len(right))
    return replace(
        made_up_row(method, target, float(values.mean()), seed),
        **{"test": test, "right_answers": packed_answers(values), **changes},  # type: ignore[arg-type]
    )


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_packed_answers_come_back(right: list[bool]) -> None:
    row = answered("l1", "".join("x" if one else "." for one in right))
    found = right_answers(row)
    assert found is not None
    assert found.tolist() == right


def test_a_lead_over_two_seeds_by_hand() -> None:
    ours = [answered("ours", "xxxx.", 0), answered("ours", "xxx.x", 1), answered("ours", "xxxxx", 2)]  # seed 2 has no partner
    theirs = [answered("theirs", "xx..x", 1), answered("theirs", "xx.x.", 0)]
    lead = lead_of(ours, theirs)
    assert lead is not None
    # seed 0 differs in the third example, seed 1 in the third: (0, 0, 1, 0, 0) in the mean over seeds
    assert (lead.only_first, lead.only_second, lead.seeds) == (2, 0, 2)
    assert lead.difference == pytest.approx(0.2)
    assert lead.error == pytest.approx(sqrt((4 * 0.2**2 + 0.8**2) / 4) / sqrt(5))


def test_the_error_is_that_of_repeated_test_sets() -> None:
    # by simulation: two methods right with 0.9 and 0.88, three seeds, many test sets of 400 examples
    draw = np.random.default_rng(0)
    leads = []
    for _ in range(300):
        rows = [
            [answered(name, "".join("x" if one else "." for one in draw.random(400) < share), seed) for seed in range(3)]
            for name, share in (("ours", 0.9), ("theirs", 0.88))
        ]
        found = lead_of(rows[0], rows[1])
        assert found is not None
        leads.append((found.difference, found.error))
    differences, errors = np.array(leads).T
    assert errors.mean() == pytest.approx(differences.std(), rel=0.12)
    assert differences.mean() == pytest.approx(0.02, abs=3 * differences.std() / sqrt(300))


def test_rows_that_do_not_say_which_answers_are_right_have_no_lead() -> None:
    assert lead_of([answered("ours", "xx.")], [answered("theirs", "x..", right_answers="")]) is None
    assert packed_answers(torch.tensor([0.25, 1.0])) == packed_answers(None) == ""  # pixels of a segmentation
    assert leads_sheet([made_up_row("ours", 0.5, 0.8), made_up_row("theirs", 0.5, 0.7)]) is None


@pytest.mark.parametrize("text", ["no base64!", "AAAA", packed_answers(torch.ones(40)), packed_answers(torch.ones(3))])
def test_damaged_answers_name_the_row(text: str) -> None:
    with pytest.raises(RunError, match=r"row of ours \(budget none, target 0.5, seed 4\): right_answers is damaged"):
        right_answers(answered("ours", "xx.", 4, right_answers=text))


def test_the_best_is_compared_with_all_others_at_their_own_rates() -> None:
    def trained(rate: float) -> Budget:
        return Budget(f"gentle@{rate:g}", after=TrainSettings(lr=rate))

    rows = [
        answered("ours", "xxxxxx....", budget=trained(0.01), search=Answers(0.9, 0.8, 9, 8, 10)),
        answered("theirs", "xxxxx.....", budget=trained(0.01), search=Answers(0.9, 0.7, 9, 7, 10)),
        answered("theirs", "....xxxxx.", budget=trained(0.03), search=Answers(0.9, 0.8, 9, 8, 10)),  # validation prefers it
        answered("third", "xxxx......", budget=trained(0.03), search=Answers(0.9, 0.8, 9, 8, 10)),
    ]
    sheet = leads_sheet(rows)
    assert sheet is not None
    assert [line[:7] for line in sheet.lines] == [
        ("gentle", "50 %", "ours", "theirs", "1", "4", "3"),
        ("gentle", "50 %", "ours", "third", "1", "2", "0"),
    ]
    # ±1 in seven of ten examples, mean 0.1: variance (7 - 10 * 0.1²) / 9, of the mean a tenth of it
    assert sheet.lines[0][7] == f"10.00 ± {100 * sqrt(6.9 / 9 / 10):.2f}"
    assert "Lead of the best method" in tables_text(rows)
