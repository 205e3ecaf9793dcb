"""Multi-vector models: tests/conformance/tasks compares their answers, and this module how often they run."""

from __future__ import annotations

import pytest

from export.check.served import served_system
from tests.conformance.tasks.rows import ASKED, MATCHED
from tests.support.checkpoints import encoders
from tests.support.served import assemble, request


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("form", ["onnx", "python"])
def test_query_that_occurs_twice_runs_once(tmp_path, form):
    models = assemble(encoders.save_bge_m3(tmp_path / "weights"), tmp_path / "models", form)
    with served_system("m", models) as system:
        model = system.models["m"]
        runs = getattr(model, "backend", model).runs
        rows, run_rows = [], runs.run_rows
        runs.run_rows = lambda texts: rows.append(len(texts)) or run_rows(texts)
        system.together([request(MATCHED, query=ASKED), request(ASKED)])
    assert rows == [len(MATCHED) + 2 * len(ASKED) - 1]
