"""Each task answers as the library of its checkpoint does, in every format, alone and in a batch, in this process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from export.check.served import served_system
from export.checkpoint.tasks import TEXT_IMAGE
from tests.conformance.tasks.rows import ROWS, Columns, Row
from tests.conformance.tasks.run import check, differ, expect, single, tensors
from tests.support.checkpoints.pipelines import SMALL_PIPELINES
from tests.support.served import assemble
from triton_transformers.settings import UserError
from triton_transformers.tasks import generation
from triton_transformers.tasks.table import ENCODERS, TASKS

pytestmark = pytest.mark.usefixtures("stored")

RUNS = [
    pytest.param(row, form, id=f"{row.name}-{form}", marks=[pytest.mark.slow] if form in row.slow else [])
    for row in ROWS
    for form in (*row.forms, *row.slow)
]


@pytest.fixture(autouse=True)
def check_environment():
    """Fail if an image processor that ran in this process left it USE_TORCH=0."""
    yield
    assert "USE_TORCH" not in os.environ


@pytest.mark.parametrize(("row", "form"), RUNS)
def test_answers_are_the_librarys(row: Row, form: str, tmp_path: Path):
    weights = row.save(tmp_path / "weights")
    folder = assemble(weights, tmp_path / "models", form, row.task if row.is_chosen else "")
    library = row.reference(weights)
    for system, columns in requests_by_system(row).items():
        whole = [(one, expect(library, one)) for one in columns]
        rows = [(one, [own]) for columns, owns in whole for one, own in zip(single(columns), owns, strict=True)]
        assert differ([own for _, (own,) in rows])
        with served_system(system, folder) as served:
            requests = [tensors(one) for one, _ in (*whole, *rows)]
            for given, (_, expected) in zip(served.together(requests), (*whole, *rows), strict=True):
                check(given, expected)
            for given, (_, expected) in zip(served.alone(requests[len(whole) :]), rows, strict=True):
                check(given, expected)
            for wrong, reason in row.wrong:
                with pytest.raises(UserError, match=re.escape(reason)) as refusal:
                    served.together([tensors(wrong)])
                assert "secret" not in str(refusal.value)


def requests_by_system(row: Row) -> dict[str, list[Columns]]:
    """Return the requests to each half of a system of texts and images, or all to the system."""
    if row.task != TEXT_IMAGE:
        return {"m": [*row.requests]}
    halves: dict[str, list[Columns]] = {"m_text": [], "m_image": []}
    for columns in row.requests:
        halves["m_text" if "input_text" in columns else "m_image"].append(columns)
    return {half: columns for half, columns in halves.items() if columns}


def test_each_task_has_a_row():
    """The suite of the engines has rows for the tasks that continue texts."""
    rows = {row.task for row in ROWS} | {small.task for small in SMALL_PIPELINES}
    assert {*TASKS} - {*generation.TASKS} - rows == set()
    formats = {(row.task, form) for row in ROWS for form in (*row.forms, *row.slow)}
    assert {(name, form) for name in ENCODERS for form in ("onnx", "python")} - formats == set()
