"""Tasks that take two texts, on tiny real models: the answers equal those of the reference library."""

from __future__ import annotations

import itertools
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from export.check.served import served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from export.recipes.text import references
from tests.support import served
from tests.support.checkpoints import encoders, language
from tests.support.served import assemble
from triton_transformers.corpus import MIXED
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("stored")

TEXTS = [*MIXED.texts[:10], "", "word " * 100]
CONTEXTS = [*(text for text in MIXED.texts[:30] if text), " ".join(MIXED.texts[40:46])]
QUESTIONS = ["Which one?", "why", "How many people live in Berlin?"]
QUERIES = ["Which one?", "why", "", "How many people live in Berlin?", "long " * 70, "a"] * 2


def ask(models: Path, **columns: list[str]) -> dict[str, np.ndarray]:
    """Return the answers of an assembled system to one request."""
    request = {name: np.array([[text.encode()] for text in texts], np.object_) for name, texts in columns.items()}
    return served.ask(models, request)[0]


def cross_encoder(folder: Path, **settings):
    from sentence_transformers import CrossEncoder  # takes seconds

    return CrossEncoder(str(folder), device="cpu", **settings)


@pytest.mark.parametrize(
    ("save", "labels", "activation", "format"),
    [
        (encoders.save_bert, 1, None, "onnx"),
        (encoders.save_roberta, 1, "Identity", "python"),
        pytest.param(encoders.save_bert, 3, None, "python", marks=pytest.mark.slow),
        pytest.param(encoders.save_roberta, 2, "Tanh", "onnx", marks=pytest.mark.slow),
        pytest.param(None, 1, None, "python", marks=pytest.mark.slow),  # a decoder without a padding token
    ],
)
def test_scores_equal_cross_encoder(tmp_path, save, labels, activation, format):
    function = getattr(torch.nn, activation)() if activation else None
    if save:
        weights = encoders.save_cross_encoder(tmp_path / "weights", save, labels, activation_fn=function)
    else:
        weights = language.save_llama_classifier(tmp_path / "weights", labels)
    assert task_of(Checkpoint("m", weights)) == ("text-ranking" if labels == 1 else "text-classification")
    reference = cross_encoder(weights)
    reference.tokenizer.pad_token = reference.tokenizer.pad_token or reference.tokenizer.eos_token
    expected = reference.predict(list(zip(QUERIES, TEXTS, strict=True)))
    answer = ask(assemble(weights, tmp_path / "models", format, "text-ranking"), query=QUERIES, text=TEXTS)
    assert answer["score"].shape == (len(TEXTS), labels)
    np.testing.assert_allclose(answer["score"], expected.reshape(-1, labels), atol=1e-5)
    assert answer["score"].std() > 1e-3
    if save:  # the count is that of the truncated pair, without padding
        lengths = [len(ids) for ids in reference.tokenizer(QUERIES, TEXTS, truncation=True).input_ids]
        assert min(lengths) < max(lengths) < max(len(ids) for ids in reference.tokenizer(QUERIES, TEXTS).input_ids)
        assert answer["token_count"].dtype == np.int32
        assert answer["token_count"].tolist() == [[length] for length in lengths]


def test_cross_encoder_of_several_labels_classifies_pairs(tmp_path):
    weights = encoders.save_cross_encoder(tmp_path / "weights", encoders.save_bert, 3)
    pairs = [(query, text) for query, text in zip(QUERIES, TEXTS, strict=True) if text]  # "" is no second text
    expected = cross_encoder(weights).predict(pairs, apply_softmax=True)
    queries, texts = map(list, zip(*pairs, strict=True))
    answer = ask(assemble(weights, tmp_path / "models"), input_text=queries, text_pair=texts)
    np.testing.assert_allclose(answer["scores"], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("save", [encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_two_long_texts_are_truncated_as_by_the_library_in_few_parts(tmp_path, save, side):
    lengths, ends = (0, 33, 64, 65, 200), ("", "🦜x" * 9)
    texts = [" ".join(["long"] * length) + end for length, end in itertools.product(lengths, ends)]
    with served_system("m", assemble(encoders.save_cross_encoder(tmp_path / "m", save), tmp_path / "models")) as system:
        backend = system.models["m_encoder"].tokenization
        backend.tokenizer.enable_truncation(encoders.POSITIONS, strategy="longest_first", direction=side)
        for pair in itertools.product(texts, texts):
            (encoding,), expected = backend.encode([pair]), backend.tokenizer.encode(*pair)
            assert (encoding.ids, encoding.type_ids) == (expected.ids, expected.type_ids)
            assert bool(encoding.overflowing) == bool(expected.overflowing)
        (encoding,) = backend.encode([("long " * 1000, "long " * 2000)])
        assert len(encoding.overflowing) < 100  # the library alone makes 34,000


ROLES = "{% for role in ['system', 'query', 'document'] %}{% for m in messages if m.role == role %}"
IN_TEXT = f"{ROLES}<{{{{ role }}}}> {{{{ m.content }}}} {{% endfor %}}{{% endfor %}}</s> so:"
IN_PARTS = IN_TEXT.replace("m.content", "m.content[0].text")


def save_language_reranker(
    folder: Path, false_token: int | None = None, template: str | None = None, **settings
) -> Path:
    """Save a language model that ranks by one token or two, its texts as a pair or in a chat."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    plain = language.save_mistral(folder / "plain")
    tokenizer = {"chat_template": template} if template else {}
    transformer = Transformer(
        str(plain), transformer_task="text-generation", processor_kwargs={"pad_token": "</s>", **tokenizer}
    )
    chain = [transformer, LogitScore(true_token_id=5, false_token_id=false_token)]
    CrossEncoder(modules=chain, device="cpu", **settings).save_pretrained(str(folder))
    shutil.rmtree(plain)
    return folder


@pytest.mark.parametrize(
    ("false_token", "template", "format"),
    [(None, None, "onnx"), (7, IN_TEXT, "python"), pytest.param(7, IN_PARTS, "onnx", marks=pytest.mark.slow)],
    ids=["pair", "chat", "parts"],
)
def test_language_model_ranks_as_cross_encoder(tmp_path, false_token, template, format):
    prompts = {"prompts": {"web": "search the web"}, "default_prompt_name": "web"}
    weights = save_language_reranker(tmp_path / "weights", false_token, template, **prompts)
    assert task_of(Checkpoint("m", weights)) == "text-ranking"
    reference, models = cross_encoder(weights), assemble(weights, tmp_path / "models", format)
    pairs = list(zip(QUERIES, TEXTS, strict=True))
    assert len(reference.tokenizer(" ".join(pairs[-1])).input_ids) > language.CONTEXT  # truncated before the chat's end
    for choice in ({}, {"prompt": "find rain"}, {"prompt": ""}):
        expected = reference.predict(pairs, batch_size=1, **choice)
        answer = ask(models, query=QUERIES, text=TEXTS, **{name: [text] * len(pairs) for name, text in choice.items()})
        np.testing.assert_allclose(answer["score"].ravel(), expected, atol=1e-5)
        assert answer["score"].std() > 1e-3


@pytest.mark.parametrize("format", ["onnx", pytest.param("python", marks=pytest.mark.slow)])
def test_qwen3_reranker_ranks_as_its_model_card(tmp_path, format):
    weights = language.save_qwen3_reranker(tmp_path / "weights")
    models = assemble(weights, tmp_path / "models", format, "text-ranking")
    for instruction in (None, "Find what the weather is like"):
        column = {"prompt": [instruction] * len(TEXTS)} if instruction else {}
        answer = ask(models, query=QUERIES, text=TEXTS, **column)
        expected = [model_card_score(weights, *pair, instruction) for pair in zip(QUERIES, TEXTS, strict=True)]
        np.testing.assert_allclose(answer["score"].ravel(), expected, atol=1e-5)
        assert answer["token_count"].max() == language.RANKED
        assert answer["score"].std() > 1e-3


def model_card_score(folder: Path, query: str, document: str, instruction: str | None) -> float:
    """Compute what the model card of Qwen3-Reranker computes, for one pair."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    instruction = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    beginning = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    ending = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (beginning, ending))
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    middle = tokenizer(text, truncation="longest_first", max_length=language.RANKED - len(first) - len(last)).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([first + middle + last])).logits[0, -1]
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    return torch.log_softmax(torch.stack([logits[no], logits[yes]]), dim=0)[1].exp().item()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Return a function that answers as transformers' pipeline did, and the folder with the same model as served."""
    folder = tmp_path_factory.mktemp("questions")
    weights = encoders.save_bert(folder / "weights", "ForQuestionAnswering")
    models = assemble(weights, folder / "models")
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(weights).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    return partial(references.find_answer, network, tokenizer, max_length=encoders.POSITIONS), models


def test_answers_equal_those_of_the_pipelines_rule(questions):
    """Contexts of one word to many times the model's maximum, which are cut into windows."""
    reference, models = questions
    asked = [QUESTIONS[row % len(QUESTIONS)] for row in range(len(CONTEXTS))]
    answer = ask(models, question=asked, context=CONTEXTS)
    for row, (question, context) in enumerate(zip(asked, CONTEXTS, strict=True)):
        expected = reference(question=question, context=context)
        assert answer["score"][row, 0] == pytest.approx(expected.score, abs=1e-5)
        span = answer["answer"][row, 0].decode(), answer["start"][row, 0], answer["end"][row, 0]
        assert span == (expected.text, expected.start, expected.end)


def test_parameter_returns_answers_that_end_within_words(tmp_path, questions):
    reference, models = questions
    models = shutil.copytree(models, tmp_path / "models")
    config = models / "m_answers/config.pbtxt"
    text = config.read_text()
    config.write_text(re.sub(r'("align_to_words"\s+value \{\s+string_value: )"1"', r'\1"0"', text))
    assert config.read_text() != text
    answer = ask(models, question=["why"] * 8, context=CONTEXTS[:8])
    for row, context in enumerate(CONTEXTS[:8]):
        expected = reference(question="why", context=context, align_to_words=False)
        assert (answer["start"][row, 0], answer["end"][row, 0]) == (expected.start, expected.end)


def test_questions_and_contexts_that_are_too_long_are_refused(questions):
    _, models = questions
    for question in ("why " * 20, "why " * 100):
        with pytest.raises(UserError, match="input 'question' leaves no room for 'context': shorten it"):
            ask(models, question=["why", question], context=["because"] * 2)
    with pytest.raises(UserError, match="the request has more than 256 windows of 64 tokens: send fewer"):
        ask(models, question=["why"], context=["because " * 5000])


@pytest.mark.slow
def test_decoder_answers_as_the_pipelines_rule(tmp_path):
    """A decoder's tokenizer has no CLS token that competes with the context."""
    weights = language.save_llama_for_questions(tmp_path / "weights")
    models = assemble(weights, tmp_path / "models", "python")  # raises if a score differs from the reference's
    assert 'key: "first_token_competes"' in (models / "m_answers/config.pbtxt").read_text()


@pytest.mark.parametrize("format", ["onnx", pytest.param("python", marks=pytest.mark.slow)])
def test_classifier_takes_a_second_text(tmp_path, format):
    weights = encoders.save_bert(tmp_path / "weights", "ForSequenceClassification", **encoders.labels(encoders.MOODS))
    classify = transformers.pipeline("text-classification", model=str(weights), device="cpu", top_k=None)
    models = assemble(weights, tmp_path / "models", format)
    pairs = [{"text": query, "text_pair": text} for query, text in zip(QUERIES, TEXTS, strict=True)]
    for inputs, examples in (({"input_text": QUERIES}, QUERIES), ({"input_text": QUERIES, "text_pair": TEXTS}, pairs)):
        answer = ask(models, **inputs)
        for row, expected in enumerate(classify(examples, truncation=True)):
            scores = {label["label"]: label["score"] for label in expected}
            np.testing.assert_allclose(answer["scores"][row], [scores[name] for name in encoders.MOODS], atol=1e-5)
