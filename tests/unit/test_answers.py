"""A model's numbers as answers: the corners that a served model hardly shows."""

from __future__ import annotations

import numpy as np

from shared import answers


def test_classes_in_order_of_the_labels():
    found = answers.classify(np.log([[0.2, 0.7, 0.1], [0.5, 0.25, 0.25]]), ["a", "b", "c"])
    assert found["label"].tolist() == [[b"b"], [b"a"]]
    np.testing.assert_allclose(found["score"], [[0.7], [0.5]], rtol=1e-6)
    np.testing.assert_allclose(found["scores"][0], [0.2, 0.7, 0.1], rtol=1e-6)


def test_large_numbers_are_no_overflow():
    with np.errstate(over="raise"):
        assert answers.softmax(np.array([1000.0, 0.0])).tolist() == [1.0, 0.0]
        assert answers.activate(np.array([[50.0]]), "sigmoid")[0, 0] == 1


def logits(*best: int) -> np.ndarray:
    return np.eye(5)[list(best)] * 9


LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
OFFSETS = np.array([[i * 3, i * 3 + 2] for i in range(8)])


def entities(*best: int, special: tuple = ()) -> list[tuple]:
    mask = np.array([int(i in special) for i in range(len(best))])
    return [each[:1] + each[2:] for each in answers.entities(logits(*best), OFFSETS, mask, LABELS)]


def test_neighbours_of_one_kind_are_one_entity():
    assert entities(1, 2, 2, 0, 3, 4) == [("PER", 0, 8), ("LOC", 12, 17)]


def test_a_beginning_begins_another():
    assert entities(1, 1, 2) == [("PER", 0, 2), ("PER", 3, 8)]


def test_special_tokens_and_padding_are_nothing():
    assert entities(1, 2, 1, special=(0, 2)) == [("PER", 3, 5)]
    assert entities(0, 0) == []
    assert entities(1, special=(0,)) == []


def test_a_span_is_of_the_context_in_order_and_not_too_long():
    start, end = np.zeros(8), np.zeros(8)
    start[6], end[2] = 9, 8  # the best end is before the best start
    context = np.array([0, 0, 1, 1, 1, 1, 1, 0])
    span = answers.best_span(start, end, context, OFFSETS)
    assert (span.start, span.end) == (18, 20)
    start[:] = end[:] = 0
    start[2], end[6] = 9, 9
    span = answers.best_span(start, end, context, OFFSETS, longest=3)
    assert (span.end - span.start) <= 8


def test_no_context_is_no_answer():
    assert answers.best_span(np.ones(3), np.ones(3), np.zeros(3), OFFSETS[:3]) == (0.0, 0, 0)


def test_the_most_probable_first():
    best, probabilities = answers.most_probable(np.log([[0.1, 0.6, 0.3]]), 2)
    assert best.tolist() == [[1, 2]]
    np.testing.assert_allclose(probabilities, [[0.6, 0.3]], rtol=1e-6)
