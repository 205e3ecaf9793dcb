"""An assembly that takes much more memory than its files explain ends with a sentence."""

from __future__ import annotations

import time

import pytest

from export import memory_limit
from export.memory_limit import limited_memory
from triton_transformers.settings import UserError

MEGABYTE = 1 << 20


def grow(bytes: int) -> None:
    """Take this much memory, and catch errors as code does that falls back to another way."""
    taken = []
    while sum(map(len, taken)) < bytes:
        try:
            taken.append(bytearray(MEGABYTE))
        except Exception:
            taken.clear()
    time.sleep(5 * memory_limit.PERIOD_S)


@pytest.fixture
def spare(monkeypatch) -> int:
    """Leave 300 MB to what has no files."""
    monkeypatch.setattr(memory_limit, "SPARE_BYTES", 300 * MEGABYTE)
    return 300 * MEGABYTE


def test_runaway_assembly_is_stopped(spare, tmp_path):
    with (
        pytest.raises(UserError, match=r"mymodel takes more than .* GB of memory"),
        limited_memory("mymodel", tmp_path),
    ):
        grow(1 << 34)


def test_files_raise_the_limit(spare, tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part/model.safetensors").write_bytes(bytes(40 * MEGABYTE))
    with limited_memory("mymodel", tmp_path):
        grow(2 * spare)
