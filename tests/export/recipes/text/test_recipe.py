"""Tasks of one text on tiny real models, in every format: the answers equal those of the reference library."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export.check.served import InferenceRequest, answers, served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from loadtest.bench.architectures.small_models import wordpiece
from tests.support.checkpoints import encoders
from tests.support.served import ask, assemble, check, request
from triton_transformers.corpus import MIXED
from triton_transformers.tensors import TOKEN_IDS

pytestmark = pytest.mark.usefixtures("stored")

slow = pytest.mark.slow


def dpr(kind: str):
    return lambda folder, head: encoders.save_dpr(folder, f"{kind}Encoder", projection_dim=16)


# --- encoders that transformers loads by a class of its own, and the vectors of a decoder's tokens --------------------


@pytest.mark.parametrize(
    ("save", "kind", "output", "form"),
    [
        (encoders.save_t5_encoder, "T5EncoderModel", "last_hidden_state", "onnx"),
        (dpr("Question"), "DPRQuestionEncoder", "pooler_output", "onnx"),
        (dpr("Context"), "DPRContextEncoder", "pooler_output", "python"),
        pytest.param(encoders.save_gpt2, "AutoModel", "last_hidden_state", "onnx", marks=slow),  # no padding token
        pytest.param(encoders.save_t5_encoder, "T5EncoderModel", "last_hidden_state", "python", marks=slow),
        pytest.param(dpr("Context"), "DPRContextEncoder", "pooler_output", "onnx", marks=slow),
    ],
)
def test_vectors_equal_transformers(tmp_path, save, kind, output, form):
    texts = ["a", *MIXED.texts[:6], "word " * 100]
    weights = save(tmp_path / "weights", "Model")
    model = getattr(transformers, kind).from_pretrained(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    accepted = inspect.signature(model.forward).parameters
    rows = [tokenizer(text, truncation=True, max_length=encoders.POSITIONS, return_tensors="pt") for text in texts]
    with torch.inference_mode():
        expected = [model(**{key: row[key] for key in row if key in accepted})[output].numpy() for row in rows]
    name = "sentence_embedding" if output == "pooler_output" else output
    check(assemble(weights, tmp_path / "models", form), [request([text]) for text in texts], name, expected)


def test_classes_of_an_encoder_whose_configuration_has_no_width_equal_transformers(tmp_path):
    """The configuration of T5Gemma has the widths of its halves only."""
    tokenizer = wordpiece()
    half = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer)}  # fmt: skip
    config = transformers.T5GemmaConfig(
        encoder=half, decoder=half, vocab_size=len(tokenizer), is_encoder_decoder=False, num_labels=3, pad_token_id=0
    )
    transformers.T5GemmaForSequenceClassification(config).save_pretrained(tmp_path / "weights")
    tokenizer.save_pretrained(tmp_path / "weights")
    pipe: Any = transformers.pipeline("text-classification", model=str(tmp_path / "weights"), top_k=None)
    texts = MIXED.texts[:4]
    expected = [np.array([sorted_scores(found)]) for found in pipe(texts)]
    check(assemble(tmp_path / "weights", tmp_path / "models"), [request([text]) for text in texts], "scores", expected)


def sorted_scores(found: list[dict[str, Any]]) -> list[float]:
    """Return the scores in the order of the labels."""
    return [one["score"] for one in sorted(found, key=lambda one: one["label"])]


# --- masked words: the gateway puts each word into the tokens of the text, and asks for their text --------------------


@pytest.mark.parametrize("save", [encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
def test_tokens_of_filled_texts_become_those_of_the_pipeline(tmp_path, save):
    weights = save(tmp_path / "weights", "ForMaskedLM")
    pipe: Any = transformers.pipeline("fill-mask", model=str(weights))
    mask = pipe.tokenizer.mask_token
    with served_system("m", assemble(weights, tmp_path / "models")) as system:

        def other_form(*rows: str | list[int]) -> list[dict[str, Any]]:
            encoded = [
                row.encode() if isinstance(row, str) else TOKEN_IDS + np.array(row, "<i4").tobytes() for row in rows
            ]
            values = np.array(encoded, np.object_).reshape(-1, 1)
            (answer,) = answers(system.models["m_encoder"], [InferenceRequest({"input_text": values}, ["tokenized"])])
            return [json.loads(value) for value in answer.tensors["tokenized"].ravel()]

        text, masked = other_form(f"Rome (the old) is in {mask}  and it's big .", mask)
        before, after = masked["special"]
        ids, hole = text["ids"][before:-after], masked["ids"][-after - 1]
        for word in pipe(f"Rome (the old) is in {mask}  and it's big ."):
            (filled,) = other_form([word["token"] if id == hole else id for id in ids])
            assert filled["text"] == word["sequence"]


def encoded(row: str | list[int]) -> bytes:
    return row.encode() if isinstance(row, str) else TOKEN_IDS + np.array(row, "<i4").tobytes()


# --- SPLADE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "pooling", "activation"),
    [
        ("onnx", "max", "relu"),
        ("python", "sum", "log1p_relu"),
        pytest.param("python", "max", "relu", marks=slow),
        pytest.param("onnx", "sum", "log1p_relu", marks=slow),
    ],
)
def test_sparse_embeddings_equal_sparse_encoder(tmp_path, form, pooling, activation):
    from sentence_transformers import SparseEncoder

    pooled = {"pooling_strategy": pooling, "activation_function": activation}
    weights = encoders.save_sparse_encoder(tmp_path / "weights", encoders.PROMPTS, **pooled)
    library = SparseEncoder(str(weights), device="cpu")
    texts = [*MIXED.texts[:8], "a", "", "word " * 100]
    requests = [request([text]) for text in texts] + [request(texts[:1], prompt_name="query")]
    expected = [library.encode(text, convert_to_sparse_tensor=False).numpy() for text in texts]
    expected.append(library.encode(texts[0], prompt_name="query", convert_to_sparse_tensor=False).numpy())
    assert not np.allclose(expected[-1], expected[0])
    with served_system("m", assemble(weights, tmp_path / "models", form)) as system:
        for answers in (system.alone(requests), system.together(requests)):
            for answer, own in zip(answers, expected, strict=True):
                weights_of_ids = np.zeros_like(own)
                weights_of_ids[answer["token_id"][0]] = answer["weight"][0]
                np.testing.assert_allclose(weights_of_ids, own, atol=1e-4)
                words = [token.decode() for token in answer["token"][0]]
                assert words == library.tokenizer.convert_ids_to_tokens(answer["token_id"][0].tolist())
                assert (np.diff(answer["weight"][0]) <= 0).all()


# --- entities: those of transformers' pipeline, with each aggregation_strategy ----------------------------------------

# The corpus, and words that BERT's tokenizer splits, does not know, or finds beside punctuation.
ENTITY_TEXTS = [
    *MIXED.texts[:12], "Zwölfzylinder-Motor, O'Neill's xylophones 🦜🦜x (antidisestablishmentarianism)", "a", "",
]  # fmt: skip
# E-LOC and X-Y-Z have dashes that are not B- or I-.
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "X-Y-Z", "MISC"]


def set_parameter(config: Path, name: str, value: str) -> None:
    text = re.sub(rf'({name}"\n.*\n.*: )"\w+"', rf'\1"{value}"', config.read_text())
    assert f'"{value}"' in text
    config.write_text(text)


@pytest.fixture(scope="module", params=[encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
def tagger(tmp_path_factory, request) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tagger")
    weights = request.param(folder / "weights", "ForTokenClassification", **encoders.labels(LABELS))
    return weights, assemble(weights, folder / "models", "python")


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_entities_equal_pipeline(tagger, strategy):
    weights, folder = tagger
    set_parameter(folder / "m_answers/config.pbtxt", "aggregation_strategy", strategy)
    classify = transformers.pipeline("token-classification", str(weights), aggregation_strategy=strategy, device="cpu")
    classify.tokenizer.model_max_length = encoders.POSITIONS
    (answer,) = ask(folder, request(ENTITY_TEXTS))
    name = "entity" if strategy == "none" else "entity_group"
    count = 0
    for row, text in enumerate(ENTITY_TEXTS):
        columns = zip(*(answer[key][row] for key in ("label", "start", "end", "score")), strict=True)
        served = [(label.decode(), *others) for label, *others in columns if label]
        expected = [(e[name], e["start"], e["end"], pytest.approx(e["score"], abs=1e-5)) for e in classify(text)]
        assert served == expected
        count += len(served)
    assert count > len(ENTITY_TEXTS) / 2


# --- zero-shot classification, from the scores of a served NLI model (docs/models.md) ---------------------------------

CANDIDATES = ["travel", "cooking", "the weather"]
CONTRADICTION, ENTAILMENT = 0, 2


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_zero_shot_equals_pipeline(tmp_path):
    names = encoders.labels(["contradiction", "neutral", "entailment"])
    weights = encoders.save_bert(tmp_path / "weights", "ForSequenceClassification", **names)
    assert task_of(Checkpoint("m", weights)) == "text-classification"
    folder = assemble(weights, tmp_path / "models", "python")
    set_parameter(folder / "m_answers/config.pbtxt", "activation", "none")
    text = "one day I will see the rain in another country"
    hypotheses = [f"This example is {label}." for label in CANDIDATES]
    (answer,) = ask(folder, request([text] * len(CANDIDATES), text_pair=hypotheses))
    logits = answer["scores"]
    classify = transformers.pipeline("zero-shot-classification", str(weights), device="cpu")
    pairs = softmax(logits[:, [CONTRADICTION, ENTAILMENT]])
    for multi_label, scores in ((True, pairs[:, 1]), (False, softmax(logits[:, ENTAILMENT]))):
        expected = classify(text, CANDIDATES, multi_label=multi_label)
        served = dict(zip(CANDIDATES, scores, strict=True))
        np.testing.assert_allclose([served[label] for label in expected["labels"]], expected["scores"], atol=1e-5)
