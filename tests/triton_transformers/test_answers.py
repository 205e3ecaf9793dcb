"""How near the answers of a format are to those of another."""

import numpy as np
import pytest

from triton_transformers.answers import agreement


def test_labels_vectors_and_numbers_are_compared():
    labels = [{"label": np.array([[name]], object), "score": np.array([[0.9]])} for name in (b"calm", b"cross")]
    assert agreement(labels, labels[:1] * 2) == {"equal_labels": 0.5}
    vectors = [{"vector": np.array([[1.0, 0.0]]), "count": np.array([[2]])} for _ in range(2)]
    other = [{"vector": np.array([[0.6, 0.8]])}, {"vector": np.array([[2.0, 0.0]])}]
    assert agreement(vectors, other) == {"cosine_min": pytest.approx(0.6), "cosine_mean": pytest.approx(0.8)}
    # One number has no direction: all answers together have.
    scores = [{"score": np.array([[number]])} for number in (3.0, 4.0)]
    assert agreement(scores, scores[::-1])["cosine_min"] == pytest.approx(0.96)
