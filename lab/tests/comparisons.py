"""Rows and commands of comparisons for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cyclopts import App

from secateurs_lab.compare.rows import (
    Answers,
    Count,
    Row,
    append_row,
)
from secateurs_lab.compare.run import ROWS
from secateurs_lab.methods import NO_TRAINING


def call(function: Callable[..., None], *tokens: str) -> None:
    """Parse the tokens as the console does, and run the command; errors come through."""
    app = App(result_action="return_value", suppress_keyboard_interrupt=False)
    app.default(function)
    app(list(tokens), exit_on_error=False)


def places(folder: Path) -> list[str]:
    return ["--out", str(folder / "out"), "--runs", str(folder / "runs")]


def made_up_row(method: str, target: float, after: float, seed: int = 0, **changes: Any) -> Row:
    """A row made up by hand: 10,000 images, 9,000 of them right before."""
    made = Row(
        model="resnet20",
        model_options={},
        weights="builtin",
        weights_sha256="a" * 64,
        data="cifar10",
        data_sha256="b" * 64,
        images={"train": 45_000, "search": 5_000, "test": 10_000},
        shortcut="before",
        method=method,
        budget=NO_TRAINING,
        target=target,
        seed=seed,
        macs=Count(1000, round(1000 * (1 - target))),
        parameters=Count(200, 100),
        counted_weights=Count(100, 60),
        filters={"conv1": (16, 12)},
        search=Answers(0.91, after, 4550, 5000 * after, 5000),
        test=Answers(0.9, after, 9000, 10_000 * after, 10_000),
        images_trained=0,
        rate_sum=0.0,
        passes=10,
        search_seconds=1.0,
        training_seconds=0.0,
        network_sha256="c" * 64,
    )
    return replace(made, **changes)


def written(folder: Path, rows: Sequence[Row]) -> Path:
    for one in rows:
        append_row(folder / ROWS, asdict(one))
    return folder
