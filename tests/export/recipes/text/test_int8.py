"""FORMAT=int8: text encoders that OpenVINO runs with matrices in 8 bits, and the measures of what they keep."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from export.catalogue import Job, System
from export.check import quality
from export.check.quality import Quality, kendall, kept_neighbours, measure_quality
from export.check.served import served_system
from export.decision import decide
from export.recipes.text import int8, recipe
from export.recipes.text.int8 import Channels, Conversion, Matrix, Variant
from export.sources.source import Folder, Weights
from tests.support.checkpoints import encoders
from tests.support.served import request
from triton_transformers.corpus import MIXED
from triton_transformers.settings import Settings, UserError

TEXTS = [*MIXED.texts[:6], "rain"]


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """Return an embedder that is assembled in int8, and the outcome."""
    weights, folder = (tmp_path_factory.mktemp(name) for name in ("weights", "models"))
    source = encoders.save_sentence_transformer(weights)
    # Random vectors are all about equally near.
    job = Job("m", "sentence-similarity", "int8", source, False, folder, min_quality=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "QUALITY", MIXED)
        patch.setattr(int8, "MIN_SPEEDUP", 0)  # a model of two thin layers gains nothing
        return job, recipe.assemble(job)


def test_only_the_int8_graph_is_kept_and_recorded(assembled):
    job, outcome = assembled
    version = job.folder / "m_encoder/1"
    assert not (version / "model.onnx").exists()
    assert (version / "int8.bin").stat().st_size < outcome.facts["fp32_bytes"] * 0.6
    assert 0.5 <= outcome.facts["int8_neighbours"] < quality.MIN_NEIGHBOURS
    assert outcome.facts["int8_rank_correlation"] > 0.99
    assert "of neighbours" in outcome.summary
    assert "KIND_CPU" in (job.folder / "m_encoder/config.pbtxt").read_text()


def test_quality_that_no_format_measures_is_refused(assembled, tmp_path):
    weights = Weights(assembled[0].weights, "m", "")
    system = System("m", "sentence-similarity", Folder(weights.folder), min_quality=0.98)
    with pytest.raises(UserError, match=r"MIN_QUALITY: m is sentence-similarity \(onnx\), and only FORMAT=int8"):
        decide(system, weights, tmp_path, Settings.load())


def test_int8_is_near_fp32_and_the_same_alone_and_in_a_batch(assembled):
    job, _ = assembled
    requests = [request([line]) for line in TEXTS]
    original = recipe.text_model(job)
    expected = [original.reference(own)["sentence_embedding"] for own in requests]
    with served_system("m", job.folder) as served:
        labels = served.models["m_encoder"].engine_labels
        alone, together = served.alone(requests), served.together(requests)
    for own, answer, in_batch in zip(expected, alone, together, strict=True):
        assert 0.99 < float((own * answer["sentence_embedding"]).sum()) < 1 - 1e-9
        np.testing.assert_array_equal(answer["sentence_embedding"], in_batch["sentence_embedding"])
    assert labels["engine"] == "openvino"
    assert labels["precision"].startswith("int8 (")
    assert labels["precision"].endswith("% of neighbours)")


def test_table_in_16_bits_keeps_its_check_of_indices(assembled):
    from serving.engines.graphs import OpenVinoGraph
    from serving.triton.types import BadRequest

    graph = OpenVinoGraph(assembled[0].folder / "m_encoder/1/int8.xml", ["sentence_embedding"])
    rows = graph.limits["input_ids"]
    feed = {"input_ids": np.array([[2, rows]]), "attention_mask": np.ones((1, 2), np.int64)}
    with pytest.raises(BadRequest, match=f"'input_ids' must be from -{rows} to {rows - 1}"):
        graph.compile("f32", 1, 1).run(["sentence_embedding"], feed)


@pytest.mark.parametrize(("bound", "kept", "measured"), [(0.98, 0, 1), (0.983, 0, 1), (0.989, 7, 2), (0.992, 8, 2)])
def test_costly_matrices_stay_in_fp32_until_the_bound_holds(search, bound, kept, measured):
    conversion = search(bound)
    assert conversion.choose().kept == set(conversion.order[:kept])
    assert len(conversion.variant.mock_calls) == measured


def test_matrices_that_are_large_for_their_error_are_quantized_first(search):
    conversion = search(0.99)
    conversion.errors = {"small": 1.0, "large": 2.0, "harmless": 0.1}
    sizes = {"small": 100, "large": 400, "harmless": 100}
    conversion.matrices = {name: Mock(numbers=np.empty(size)) for name, size in sizes.items()}
    assert conversion.order == ["small", "large", "harmless"]


@pytest.mark.parametrize(
    ("bound", "speed", "refusal"),
    [
        (
            0.998,
            1.6,
            r"keeps 98.32% of neighbours at 1.60 times the speed of fp32 \(0 of 10 matrices in fp32\), or 100.00% .* "
            r"1.00 .*\(10 of 10 .*; 99.80% at 1.1 are required. Set MIN_QUALITY=0.983 to accept less, or FORMAT=onnx",
        ),
        (0.98, 1.05, r"98.32% of neighbours at 1.05 .*\(0 of 10 matrices in fp32\); .* are required. Set FORMAT=onnx"),
    ],
)
def test_refusal_names_what_was_reached_and_the_way_out(search, bound, speed, refusal):
    with pytest.raises(UserError, match=refusal):
        search(bound, speed).outcome()


@pytest.fixture
def search(monkeypatch):
    """Return a function that prepares the search of an encoder that loses 1.68 % in int8, for a bound."""

    def variant(kept, *, errors: dict[str, float], bound: float, speed: float) -> Variant:
        error = sum(own for name, own in errors.items() if name not in kept)
        speedup = speed + (1 - speed) * len(kept) / len(errors)
        return Variant(frozenset(kept), len(errors), Quality(1 - error**0.5, "neighbours", bound), speedup)

    def prepared(bound: float, speed: float = 1.6) -> Conversion:
        job = Mock(system="m")
        conversion = Conversion(Mock(job=job), [], [], lambda feeds: feeds[0])
        conversion.errors = {str(number): 0.0168**2 / 10 for number in range(10)}
        conversion.matrices = {name: Mock(numbers=np.empty(1)) for name in conversion.errors}
        measure = partial(variant, errors=conversion.errors, bound=bound, speed=speed)
        monkeypatch.setattr(conversion, "variant", Mock(side_effect=measure))
        return conversion

    return prepared


def test_large_channel_does_not_cost_the_others(monkeypatch):
    divided = product_error()
    monkeypatch.setattr(Channels, "divisors", np.ones(128, np.float32))
    assert divided < product_error() / 2


def test_channels_make_up_for_the_errors_of_others(monkeypatch):
    monkeypatch.setattr(int8, "LARGEST", 7)
    compensated = product_error()
    monkeypatch.setattr(int8, "DAMPING", 1e6)  # the channels seem to be independent
    assert compensated < product_error() / 1.5


def product_error() -> float:
    """Return the error of a product in int8 that has a large channel."""
    import openvino
    from openvino import opset13 as ops

    random = np.random.default_rng(1)
    few, mixed, weights = (random.standard_normal(shape) for shape in ((400, 16), (16, 128), (128, 8)))
    rows, weights = (few @ mixed).astype(np.float32), weights.astype(np.float32)
    rows[:, 5] *= 30
    source = ops.parameter([-1, 128], np.float32)
    graph = openvino.Model([ops.matmul(source, ops.constant(weights), False, False)], [source], "m")
    channels = Channels(weights.T)
    channels.add(rows)
    (product,) = int8.products(graph)
    Matrix.quantized(weights.T, channels).replace(product, {})
    assert not int8.products(graph)
    settings = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": int8.GROUP, "INFERENCE_PRECISION_HINT": "f32"}
    # CPUs without AVX-512 leave activations in fp32. Those that quantize them find numbers of 8 bits already.
    groups = (rows / channels.divisors).reshape(len(rows), -1, int8.GROUP)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 127
    quantized = (np.rint(groups / scales) * scales).reshape(rows.shape) * channels.divisors
    (answer,) = openvino.Core().compile_model(graph, "CPU", settings)(quantized).values()
    return float(np.square(answer - rows @ weights).mean())


# --- quality ----------------------------------------------------------------------------------------------------------


def test_kept_neighbours_counts_those_that_stay():
    vectors = np.random.default_rng(1).standard_normal((200, 8))
    assert kept_neighbours(vectors, 3 * vectors) == 1
    assert kept_neighbours(vectors, vectors[::-1]) < 0.2
    assert 0.5 < kept_neighbours(vectors, vectors + 0.1 * np.random.default_rng(2).standard_normal((200, 8))) < 1


def test_texts_that_are_not_told_apart_are_equal_neighbours():
    same = np.ones((30, 4))
    assert kept_neighbours(same, same + np.random.default_rng(1).standard_normal((30, 4))) == 1


def test_kendall_compares_orders():
    scores = np.array([0.1, 0.4, 0.2, 0.9])
    assert kendall(scores, scores**3) == 1
    assert kendall(scores, -scores) == -1
    assert kendall(scores, np.array([0.1, 0.2, 0.4, 0.9])) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("task", "changed", "share", "facts"),
    [
        (
            "text-classification",
            [[2.0, 1.0], [0.0, 1.0]],
            2 / 3,
            {"int8_labels": 2 / 3, "int8_probability_change": 0.4621},
        ),
        ("sentence-similarity", [[1.0, 2.1], [0.0, 0.1]], 1.0, {"int8_neighbours": 1.0, "int8_rank_correlation": 1.0}),
    ],
)
def test_each_task_has_a_measure(task, changed, share, facts):
    expected = [np.array([[1.0, 2.0]]), np.array([[0.0, 1.0]]), np.array([[3.0, 0.0]])]
    actual = [*(np.array([row]) for row in changed), expected[2]]
    measured = measure_quality(task, "softmax", expected, actual)
    assert measured.share == pytest.approx(share)
    assert measured.facts == pytest.approx(facts, abs=1e-4)


def test_ranker_is_measured_by_the_order_for_each_query(monkeypatch):
    monkeypatch.setattr(quality, "DOCUMENTS", 2)
    expected = [np.array([[score]]) for score in (1.0, 2.0, 5.0, 4.0)]
    actual = [np.array([[score]]) for score in (7.0, 8.0, 0.0, 1.0)]
    measured = measure_quality("text-ranking", "", expected, actual)
    assert (measured.share, measured.holds) == (0.0, False)  # one query's order stays, the other's is turned
