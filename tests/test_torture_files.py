"""Short forms of the fuzzers of files and folders: fixed seeds, a few seconds each."""

from __future__ import annotations

from torture import files, folders


def test_damaged_files_are_refused_or_load_to_the_same_network() -> None:
    found = files.run(600, seed=0, workers=1)
    assert found.failures == ()
    assert found.tried == sum(found.outcomes.values()) == 600
    assert {outcome.partition(":")[0] for outcome in found.outcomes} == {make.__name__ for make in files.MAKERS}


def test_damaged_folders_are_refused_or_end_with_the_same_network() -> None:
    found = folders.run(6, seed=0, workers=1)
    assert found.failures == ()
    assert found.tried == sum(found.outcomes.values()) == 6
