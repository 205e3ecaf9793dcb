"""What the recipe of language models puts into the folder of a system."""

from __future__ import annotations

import pytest

from export.catalogue import Job
from export.recipes.language.recipe import assemble
from tests.support.checkpoints import language


@pytest.mark.parametrize(
    ("system", "is_written"), [("mine", True), ("chat", True), ("text-generation", True), ("falcon7b", False)]
)
def test_configurations_that_git_lacks_are_written(tmp_path, system, is_written):
    weights = language.save_llama(tmp_path / "weights")
    (tmp_path / "made").mkdir()
    assemble(Job(system, "text-generation", "vllm", weights, False, tmp_path / "made"))
    for model in (system, f"{system}_stream"):
        assert (tmp_path / "made" / model / "config.pbtxt").is_file() == is_written
