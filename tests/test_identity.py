"""One loss or metric is told from another by what it does, on the day and on another day."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateurs.metrics import Measure, changed, correct, cross_entropy, display_name, fingerprint, fingerprints

PAIRS: dict[str, tuple[Measure, Measure]] = {
    "instructions": (lambda o, t: o + t, lambda o, t: o - t),
    "constants": (lambda o, t: o.topk(1), lambda o, t: o.topk(5)),
    "names": (lambda o, t: o.argmax(1), lambda o, t: o.argmin(1)),
    "defaults": (lambda o, t, k=1: o.topk(k), lambda o, t, k=5: o.topk(k)),
    "keyword defaults": (lambda o, t, *, k=1: o.topk(k), lambda o, t, *, k=5: o.topk(k)),
    "what partial is given": (partial(cross_entropy, label_smoothing=0.0), partial(cross_entropy, label_smoothing=0.1)),
    "settings of a module": (nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(reduction="sum")),
    "functions": (correct, cross_entropy),
}


def top(k: int) -> Measure:
    return lambda o, t: (o.topk(k, 1).indices == t[:, None]).any(1)


class Top:
    def __init__(self, k: int) -> None:
        self.k, self.seen = k, [0]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen[0] += len(targets)
        return (outputs.topk(self.k, 1).indices == targets[:, None]).any(1)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def goes_on(first: Measure, second: Measure) -> bool:
    """Whether a run that was started with the one may go on with the other."""
    return not changed({"metric": second}, {"metric": display_name(first)}, fingerprints({"metric": first}))


PAIRS |= {
    "what a closure holds": (top(1), top(5)),
    "settings of an object": (Top(1), Top(5)),
    "the object of a method": (Top(1).measure, Top(5).measure),
}


@pytest.mark.parametrize(("first", "second"), PAIRS.values(), ids=PAIRS)
def test_measures_that_differ_are_told_apart(first: Measure, second: Measure) -> None:
    assert fingerprint(first) != fingerprint(second)
    assert not goes_on(first, second)
    assert goes_on(first, first)
    assert goes_on(second, second)


@pytest.mark.parametrize("make", [lambda: top(3), lambda: Top(3), lambda: Top(3).measure, nn.CrossEntropyLoss])
def test_a_measure_that_is_made_anew_is_the_same(make: Callable[[], Measure]) -> None:
    assert goes_on(make(), make())


def test_what_a_measure_gathers_does_not_change_it() -> None:
    used = Top(2)
    used(torch.randn(4, 10), torch.zeros(4, dtype=torch.long))
    assert used.seen == [4]
    assert goes_on(Top(2), used)


def test_a_measure_is_the_same_in_another_process_and_from_another_module() -> None:
    source = "from secateurs.metrics import fingerprints\ndef metric(o, t): return o in {'a', 'b', 'c', 'd'}\n"
    printed = "print(fingerprints({'metric': metric})['metric'])"
    found = {
        subprocess.run(
            [sys.executable, "-c", f"{source}{line}{printed}"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed, line in (("1", ""), ("2", ""), ("3", "metric.__module__ = 'mine'\n"))
    }
    assert len(found) == 1


def test_another_python_compares_names_and_an_older_folder_nothing() -> None:
    kept = {**fingerprints({"metric": correct}), "python": "CPython 3.0.0"}
    names = {"metric": "accuracy"}
    assert changed({"metric": correct}, names, kept) == []
    assert changed({"metric": top(1)}, names, kept) == ["metric"]
    assert changed({"metric": top(1)}, names, {}) == []


def test_functions_of_torch_are_what_they_are_called() -> None:
    def mse_loss(*given: Any) -> Tensor:
        raise AssertionError("a stand-in, never called")

    mse_loss.__module__, mse_loss.__qualname__ = "torch.nn.functional", "mse_loss"
    assert goes_on(nn.functional.mse_loss, mse_loss)  # as another version of torch may have it
    assert not goes_on(nn.functional.mse_loss, nn.functional.l1_loss)
