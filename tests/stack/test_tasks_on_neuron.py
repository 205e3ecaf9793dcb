"""The tasks of test_tasks.py in PROFILE=neuron, with the stand-ins of AWS's libraries."""

from __future__ import annotations

import pytest

from tests.stack.test_tasks import (  # noqa: F401
    TASKS,
    checkpoints,
    sentence_transformer,
    test_batched_answers_equal_single_ones,
    test_classifier_takes_a_second_text,
    test_concurrent_requests_get_their_own_prompts,
    test_fill_mask_equals_pipeline,
    test_question_answering_equals_the_pipelines_rule,
    test_smoke_sends_each_task_a_request,
    test_sparse_embedding_equals_sparse_encoder,
    test_text_half_of_clip_equals_get_text_features,
    test_text_ranking_equals_cross_encoder,
    test_token_classification_equals_pipeline,
    test_too_long_question_gets_400,
)
from tests.support.neuron import on_neuron
from tests.support.stacks import TestStack, bring_up

pytestmark = pytest.mark.slow

# Others have the outputs of these: `topics` those of `mood`, `features` those of `entities`.
SERVED = ("mood", "entities", "blanks", "questions", "splade", "captions", "sentences", "reranker")


@pytest.fixture(scope="module")
def served(new_stack, checkpoints) -> TestStack:  # noqa: F811
    """Serve on a stack whose profile is another."""
    stack = on_neuron(new_stack())
    settings = [{"SYSTEMS": name, "SOURCE": checkpoints[name], "TASK": TASKS.get(name, "")} for name in SERVED]
    # Models share no core.
    stack.assemble(*(one | {"NEURON_CORES": f"{core}:{core}"} for core, one in enumerate(settings)))
    stack.environment["SYSTEMS"] = " ".join(SERVED)
    return bring_up(stack)
