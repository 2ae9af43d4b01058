"""The cache of measurements returns what was stored, bit for bit, across processes and crashes."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import seeded
from secateurs.errors import InvalidInput, RunError
from secateurs.scoring.cache import MeasurementCache, context_of, mask_key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)])
def test_a_value_comes_back_bit_for_bit_from_the_file(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape, generator=seeded(0)) * 3).to(dtype)
    store = MeasurementCache(tmp_path / "measured.sqlite")
    store.put("here", [b"key"], [value])
    store.close()
    (found,) = MeasurementCache(tmp_path / "measured.sqlite").get("here", [b"key"])
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, value)


def test_nan_infinity_and_negative_zero_come_back() -> None:
    store = MeasurementCache()
    store.put("here", [b"a"], [torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64)])
    (found,) = store.get("here", [b"a"])
    assert found is not None
    assert str(found.tolist()) == "[nan, inf, -0.0]"


def test_contexts_and_keys_are_separate() -> None:
    store = MeasurementCache()
    store.put("one", [b"a", b"b"], [torch.tensor(1.0), torch.tensor(2.0)])
    store.put("two", [b"a"], [torch.tensor(3.0)])
    assert [None if v is None else v.item() for v in store.get("one", [b"b", b"c", b"a"])] == [2.0, None, 1.0]
    assert [None if v is None else v.item() for v in store.get("two", [b"a", b"b"])] == [3.0, None]
    assert len(store) == 3


def test_known_values_are_not_replaced() -> None:
    store = MeasurementCache()
    store.put("one", [b"a"], [torch.tensor(1.0)])
    store.put("one", [b"a"], [torch.tensor(2.0)])
    (found,) = store.get("one", [b"a"])
    assert found is not None
    assert found.item() == 1.0


def test_parts_of_a_context_do_not_run_together() -> None:
    assert context_of("ab", "c") != context_of("a", "bc")


@given(bits=st.lists(st.booleans(), min_size=1, max_size=40), other=st.lists(st.booleans(), min_size=1, max_size=40))
@settings(deadline=None, max_examples=50)
def test_masks_of_one_site_have_one_key_each(bits: list[bool], other: list[bool]) -> None:
    other = (other * len(bits))[: len(bits)]
    assert (mask_key(torch.tensor(bits)) == mask_key(torch.tensor(other))) == (bits == other)


def test_a_killed_process_loses_nothing_that_put_returned_from(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, torch
        from pathlib import Path
        from secateurs.scoring.cache import MeasurementCache as Store
        store = Store(Path(sys.argv[1]))
        for i in range(5):
            store.put("here", [bytes([i])], [torch.tensor(float(i))])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "measured.sqlite"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [v.item() for v in MeasurementCache(path).get("here", [bytes([i]) for i in range(5)]) if v is not None] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "measured.sqlite"
    path.write_bytes(b"this is no database, and long enough to be seen as none" * 10)
    with pytest.raises(RunError, match=r"measured\.sqlite.*Delete it"):
        MeasurementCache(path)


def test_a_changed_value_is_an_error_and_never_given_back(tmp_path: Path) -> None:
    path = tmp_path / "measured.sqlite"
    store = MeasurementCache(path)
    store.put("here", [b"key"], [torch.tensor([1.0, 2.0])])
    store.close()
    with sqlite3.connect(path) as base:
        base.execute("update measured set value = ?", (torch.tensor([1.0, 3.0]).numpy().tobytes(),))
    base.close()
    with pytest.raises(RunError, match=r"measured\.sqlite.*does not match its checksum.*Delete it, or restore it"):
        MeasurementCache(path).get("here", [b"key"])


def test_a_full_disk_asks_for_space_and_not_to_delete_what_was_measured(tmp_path: Path) -> None:
    store = MeasurementCache(tmp_path / "measured.sqlite")
    store._base.execute("pragma max_page_count = 3")
    with pytest.raises(RunError, match=r"measured\.sqlite.*the disk is full\. Free some space, then resume") as caught:
        store.put("here", [b"key"], [torch.zeros(100_000)])
    assert "elete" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere"):
        MeasurementCache(tmp_path / "nowhere" / "measured.sqlite")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"torch\.int64"):
        MeasurementCache().put("here", [b"a"], [torch.tensor(1)])


def test_plain_values_come_back_from_the_file_and_known_ones_are_not_replaced(tmp_path: Path) -> None:
    fields = {"order": [2, 0, 1], "loss": 0.1, "name": "ä", "none": None}
    store = MeasurementCache(tmp_path / "store.sqlite")
    store.put_fields("here", b"key", fields)
    store.put_fields("here", b"key", {"other": 1})
    store.close()
    again = MeasurementCache(tmp_path / "store.sqlite")
    assert again.get_fields("here", b"key") == fields
    assert again.get_fields("elsewhere", b"key") is None
