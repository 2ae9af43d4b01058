"""Short forms of the torture (docs/reliability.md): some generated networks, some killed runs. `make torture` has thousands."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from torture import __main__ as main
from torture import files, folders, graphs, kills
from torture.contracts import KINDS, MAX_DROP, World, ended, run, simulate, tail
from torture.networks import generate


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (12, 24, 36, 48))])
def test_generated_networks_obey_the_laws_of_surgery(first: int) -> None:
    tally = graphs.run(12, first, workers=1)
    assert tally.tried == sum(tally.outcomes.values()) == 12
    assert not tally.failures, "\n".join(tally.failures)
    equal = sum(count for outcome, count in tally.outcomes.items() if "equal" in outcome)
    assert equal >= 4, tally.outcomes  # a generator of networks that are all refused would find nothing


WRITTEN = {
    "grouped queries": r"repeat_interleave\(\d, dim=1\)|enable_gqa|expand\(-1, -1, \d, -1, -1\)",
    "keys and values of one head": r"view\([^)]*, 1, \d\)\.transpose\(1, 2\)",
    "rotary positions": r"torch\.stack\(\[-v\d+\[\.\.\., 1::2\]|torch\.cat\(\[-v\d+",
    "norms of queries and keys": r"= s\.m\d+\(v\d+\)\n +v\d+ = s\.m\d+\(v\d+\)\n +v\d+ = F\.scaled_dot",
    "a view that changes nothing": r"\.reshape\([^)]*, (-1|\d), \d+, \d\)\n +v\d+ = v\d+\.(transpose\(1, 2\)|permute)",
    "windows": r"permute\(0, 1, 3, 2, 4, 5\)",
    "attention over features": r"F\.normalize\(v\d+, dim=-2\)",
    "attention without weights of places": r"\.softmax\(-2\)\.transpose",
    "global response norm": r"norm\(p=2, dim=\(1",
    "a gated perceptron": r"F\.silu\(s\.m\d+\(v\d+\)\) \* s\.m",
    "demodulated weights": r"\.rsqrt\(\)",
    "masked weights": r"masked_fill\(~s\.b|v\d+ = s\.p\d+ \* s\.b",
    "weight norm": r"weight_norm",
    "an attention behind another": r"need_weights=\w+\)\[0\]\n +v\d+ = .*need_weights",
    "one head without a bias": r"MultiheadAttention\(\d, 1, [^)]*bias=False",
    "a stream begun by a recurrent module": r"(v\d+) = s\.m\d+\(v\d+\)\[0\]\n(.*\n)*? +v\d+ = (\1 \+ v|v\d+ \+ \1)\b",
    "a stream begun by an embedding": r"nn\.Embedding",
}


@pytest.mark.filterwarnings("ignore")
def test_the_generator_writes_what_hostile_networks_had() -> None:
    sources = [generate(seed).source() for seed in range(800)]
    missing = [name for name, pattern in WRITTEN.items() if not any(re.search(pattern, source) for source in sources)]
    assert not missing


def test_a_part_that_was_stopped_goes_on_and_the_table_counts_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "PIECES", {"graphs": 2})
    monkeypatch.setattr(main, "COUNTS", {"graphs": 5})
    results = tmp_path / "torture.json"
    options = ["--part", "graphs", "--workers", "1", "--results", str(results), "--resume"]
    main.main([*options, "--scale", "0.4"])  # two of the five, then stopped
    first = main.read(results)["graphs"]
    main.main(options)
    pieces = main.read(results)["graphs"]
    assert [(piece["seed"], piece["tried"]) for piece in pieces] == [(0, 2), (2, 2), (4, 1)]
    assert pieces[0] == first[0]
    assert main.table({"graphs": pieces}).splitlines()[2].startswith("| graphs | 5 | 0 |")


def test_killed_and_starved_runs_end_like_undisturbed_ones() -> None:
    tally = kills.run(4, 0, workers=1, recipes=["two rounds with fine-tuning"])
    assert tally.tried == 4
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.outcomes["runs that end like the undisturbed one"] > 0
    assert tally.outcomes["full disks"] > 0


# ---- damaged files and folders -------------------------------------------------------------------------------------------


def test_damaged_files_are_refused_or_load_to_the_same_network() -> None:
    found = files.run(600, seed=0, workers=0)
    assert found.failures == ()
    assert found.tried == sum(found.outcomes.values()) == 600
    assert {outcome.partition(":")[0] for outcome in found.outcomes} == {make.__name__ for make in files.MAKERS}


def test_damaged_folders_are_refused_or_end_with_the_same_network() -> None:
    found = folders.run(6, seed=0, workers=0)
    assert found.failures == ()
    assert found.tried == sum(found.outcomes.values()) == 6


# ---- simulated contracts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_contracts_are_kept_and_not_wasted(kind: str) -> None:
    pairs = ended(kind, range(4))
    violated = sum(held.drop > MAX_DROP for held, _ in pairs)
    assert tail(violated, len(pairs)) > 0.01
    assert fmean(held.drop for held, _ in pairs) > 0.2 * MAX_DROP
    assert fmean(guessed.drop for _, guessed in pairs) > 0.8 * MAX_DROP  # point estimates promise nothing: the test can fail


def test_a_run_that_certifies_nothing_would_be_found_out() -> None:
    """Point estimates, counted as contracts, are too many violations for chance."""
    violated = sum(simulate("sequential", World(seed), 0.0).drop > MAX_DROP for seed in range(8))
    assert tail(violated, 8) < 0.01


def test_the_same_seed_gives_the_same_tally() -> None:
    first, again = run(1, 5, workers=1), run(1, 5, workers=1)
    assert first.outcomes == again.outcomes
    assert (first.part, first.tried, first.failures) == ("contracts", len(KINDS), ())


@pytest.mark.parametrize(("violated", "count", "chance"), [(0, 400, 1.0), (1, 1, 0.05), (2, 2, 0.0025), (1, 2, 0.0975)])
def test_the_tail_is_the_binomial_one(violated: int, count: int, chance: float) -> None:
    assert tail(violated, count) == pytest.approx(chance)
