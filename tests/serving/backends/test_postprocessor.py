"""The postprocessor's arithmetic, on cases that served models rarely reach."""

from __future__ import annotations

import numpy as np
import pytest

from serving.encoders import answers

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


def window(start, end, in_context, word_offsets=OFFSETS) -> answers.Window:
    return answers.Window(np.array(start), np.array(end), np.array(in_context), OFFSETS, np.array(word_offsets))


CONTEXT = "".join(f"{chr(97 + i)}{i} " for i in range(8))
IN_CONTEXT = [0, 0, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("align_to_words", [True, False])
def test_span_is_in_context_in_order_and_within_max_tokens(align_to_words):
    start, end = np.zeros(8), np.zeros(8)
    start[6], end[2] = 9, 8  # the best end is before the best start
    span = answers.best_answer(CONTEXT, [window(start, end, IN_CONTEXT)], 15, align_to_words)
    assert (span.start, span.end) == (18, 20)
    start[:] = end[:] = 0
    start[2], end[6] = 9, 9
    span = answers.best_answer(CONTEXT, [window(start, end, IN_CONTEXT)], 3, align_to_words)
    assert (span.end - span.start) <= 8


def test_spans_of_the_same_words_add_their_scores():
    words = [(-1, -1)] * 2 + [(6, 11), (6, 11), (12, 14), (15, 17), (18, 20), (-1, -1)]
    row = window([0, 0, 5, 5, 0, 0, 0, 0], [0, 0, 5, 5, 0, 0, 0, 0], IN_CONTEXT, words)
    aligned = answers.best_answer(CONTEXT, [row], 15, align_to_words=True)
    exact = answers.best_answer(CONTEXT, [row], 15, align_to_words=False)
    assert (aligned.start, aligned.end) == (6, 11)
    assert (exact.start, exact.end) in ((6, 8), (6, 11), (9, 11))
    assert aligned.score == pytest.approx(3 * exact.score)


def test_same_answer_in_two_windows_adds_its_scores():
    first = window([0, 0, 9, 0, 0, 0, 0, 0], [0, 0, 9, 0, 0, 0, 0, 0], IN_CONTEXT)
    one = answers.best_answer(CONTEXT, [first], 15, align_to_words=False)
    two = answers.best_answer(CONTEXT, [first, first], 15, align_to_words=False)
    assert two == one._replace(score=2 * one.score)


def test_tokens_without_a_word_keep_their_own_characters():
    words = [(-1, -1)] * 8
    row = window([0, 0, 9, 0, 0, 0, 0, 0], [0, 0, 0, 9, 0, 0, 0, 0], IN_CONTEXT, words)
    span = answers.best_answer(CONTEXT, [row], 15, align_to_words=True)
    assert (span.start, span.end) == (6, 11)


def test_missing_context_gives_an_empty_span():
    assert answers.best_answer("", [window([1, 1, 1], [1, 1, 1], [0, 0, 0])], 15, True) == (0.0, 0, 0)


def test_labels_are_sorted_by_probability():
    best, probabilities = answers.most_probable(np.log([[0.1, 0.6, 0.3]]), 2)
    assert best.tolist() == [[1, 2]]
    np.testing.assert_allclose(probabilities, [[0.6, 0.3]], rtol=1e-6)
