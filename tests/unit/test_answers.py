"""The postprocessor's arithmetic, on cases that served models rarely reach."""

from __future__ import annotations

import numpy as np
import pytest

from shared import answers

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
OFFSETS = np.array([[i * 3, i * 3 + 2] for i in range(8)])


def test_classify_returns_best_label_and_scores_in_label_order():
    outputs = answers.classify(np.log([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25]]), ["a", "b", "c"])
    assert outputs["label"].tolist() == [[b"b"], [b"a"]]
    np.testing.assert_allclose(outputs["score"], [[0.7], [0.5]], rtol=1e-6)
    np.testing.assert_allclose(outputs["scores"][0], [0.2, 0.7, 0.1], rtol=1e-6)


def test_large_logits_do_not_overflow():
    with np.errstate(over="raise"):
        assert answers.softmax(np.array([1000.0, 0.0])).tolist() == [1.0, 0.0]
        assert answers.activate(np.array([[50.0]]), "sigmoid")[0, 0] == 1


@pytest.mark.parametrize(
    ("best_labels", "special", "expected"),
    [
        pytest.param([1, 2, 2, 0, 3, 4], (), [("PER", 0, 8), ("LOC", 12, 17)], id="adjacent tokens of one kind join"),
        pytest.param([1, 1, 2], (), [("PER", 0, 2), ("PER", 3, 8)], id="B- begins another entity"),
        pytest.param([1, 2, 1], (0, 2), [("PER", 3, 5)], id="special tokens are ignored"),
        pytest.param([0, 0], (), [], id="O is no entity"),
        pytest.param([1], (0,), [], id="only special tokens"),
    ],
)
def test_token_labels_become_entities(best_labels, special, expected):
    logits = np.eye(len(LABELS))[best_labels] * 9
    mask = np.array([int(i in special) for i in range(len(best_labels))])
    entities = answers.entities(logits, OFFSETS, mask, LABELS)
    assert [(entity.label, entity.start, entity.end) for entity in entities] == expected


def test_span_is_in_context_in_order_and_within_max_tokens():
    start, end = np.zeros(8), np.zeros(8)
    start[6], end[2] = 9, 8  # the best end is before the best start
    context = np.array([0, 0, 1, 1, 1, 1, 1, 0])
    span = answers.best_span(start, end, context, OFFSETS)
    assert (span.start, span.end) == (18, 20)
    start[:] = end[:] = 0
    start[2], end[6] = 9, 9
    span = answers.best_span(start, end, context, OFFSETS, max_tokens=3)
    assert (span.end - span.start) <= 8


def test_missing_context_gives_an_empty_span():
    assert answers.best_span(np.ones(3), np.ones(3), np.zeros(3), OFFSETS[:3]) == (0.0, 0, 0)


def test_labels_are_sorted_by_probability():
    best, probabilities = answers.most_probable(np.log([[0.1, 0.6, 0.3]]), 2)
    assert best.tolist() == [[1, 2]]
    np.testing.assert_allclose(probabilities, [[0.6, 0.3]], rtol=1e-6)
