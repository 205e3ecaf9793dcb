"""Embedding models with LoRA adapters: each row is answered as its adapter, merged into the weights, answers it."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from export.check.served import ServedSystem
from export.checkpoint.adapters import CONFIG, WEIGHTS
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from export.checkpoint.unsupported import check_model
from export.recipes.text.sentences import SentenceModel
from tests.support.checkpoints import encoders
from tests.support.served import assemble, request, systems_once
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("stored")

TEXTS = ["a", "Rain in the valley, and nobody goes out.", "word " * 30]
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
INSTRUCTIONS = {"retrieval.query": "Find: ", "retrieval.passage": "Passage: ", "text-matching": ""}
# The keys of jinaai/jina-embeddings-v3-hf that transformers does not read.
JINA = {
    "load_trained_adapters": True,
    "lora_adaptations": list(INSTRUCTIONS),
    "lora_alpha": 1,
    "lora_main_params_trainable": False,
    "lora_rank": 4,
    "matryoshka_dimensions": [16, 32],
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": INSTRUCTIONS,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "retrieval_query": {"r": 4, "lora_alpha": 1},
    "retrieval_passage": {"r": 2, "lora_alpha": 3, "use_rslora": True, "lora_dropout": 0.1, "bias": "none"},
    "text_matching": {"r": 3, "lora_alpha": 6, "use_dora": False, "rank_pattern": {}},
}
# The name of a prompt -> the folder of its adapter, and the prompt's text.
CHOICES = {
    "retrieval.query": ("retrieval_query", "Find: "),
    "retrieval_query": ("retrieval_query", "Find: "),
    "query": ("retrieval_query", "Find: "),
    "retrieval.passage": ("retrieval_passage", "Passage: "),
    "document": ("retrieval_passage", "Passage: "),
    "text-matching": ("text_matching", ""),
    "": ("", ""),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_jina(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def serve(source, tmp_path_factory) -> Iterator[Callable[[str], ServedSystem]]:
    with systems_once(tmp_path_factory) as served:
        yield lambda format="onnx": served(source, format)


def save_jina(folder: Path) -> Path:
    """Save a small model of the type with its adapters: that of passages changes the attention only."""
    encoders.save(folder, "JinaEmbeddingsV3Model", encoders.byte_level(), type_vocab_size=1)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | JINA))
    network = transformers.JinaEmbeddingsV3Model.from_pretrained(folder)
    torch.manual_seed(1)
    for name, options in OPTIONS.items():
        tensors = {}
        for layer, module in network.named_modules():
            is_table = isinstance(module, torch.nn.Embedding)
            if (is_table or isinstance(module, torch.nn.Linear)) and ("self_attn" in layer or "passage" not in name):
                outputs, inputs = module.weight.T.shape if is_table else module.weight.shape
                ends = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
                for end, shape in zip(ends, ((options["r"], inputs), (outputs, options["r"])), strict=True):
                    tensors[f"{file_name(layer, name)}.{end}"] = torch.randn(shape) * 0.3
        save_adapter(folder / name, tensors, options)
    return folder


def file_name(layer: str, adapter: str) -> str:
    """Return the name of a layer in an adapter's file: as in Jina's own files, or as peft saves it."""
    if adapter != "retrieval_query":
        return f"base_model.model.{layer}"
    return "roberta." + layer.replace("layers.", "encoder.layers.").replace("self_attn.o_proj", "mixer.out_proj")


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA"} | options))


def merged(source: Path, adapter: str) -> SentenceTransformer:
    """Return the library's model with W + scale * B A for each layer that the adapter changes."""
    model = SentenceTransformer(str(source), device="cpu")
    if not adapter:
        return model
    options, tensors = OPTIONS[adapter], load_file(source / adapter / WEIGHTS)
    scale = options["lora_alpha"] / options["r"] ** (0.5 if options.get("use_rslora") else 1)
    for layer, module in model[0].model.named_modules():
        of_layer = {key: value for key, value in tensors.items() if key.startswith(f"{file_name(layer, adapter)}.lora")}
        if layer and of_layer:
            down, up = (value for _, value in sorted(of_layer.items()))
            change = scale * up @ down
            module.weight.data += change.T if isinstance(module, torch.nn.Embedding) else change
    return model


@pytest.fixture(scope="module")
def expected(source) -> Callable[[str, str, str], np.ndarray]:
    models = functools.cache(lambda adapter: merged(source, adapter))

    def vector(adapter: str, prompt: str, given: str) -> np.ndarray:
        return models(adapter).encode([given], prompt=prompt)[0]

    different = [vector(adapter, "", TEXTS[1]) for adapter in ("", *OPTIONS)]
    for one, other in itertools.combinations(different, 2):  # otherwise an adapter that is ignored would pass
        assert np.abs(one - other).max() > 0.01
    return vector


def test_each_adapter_answers_alone_and_padded_as_merged(serve, expected):
    for name, (adapter, prompt) in CHOICES.items():
        vectors = np.stack([expected(adapter, prompt, given) for given in TEXTS])
        (together,) = serve().together([request(TEXTS, prompt_name=name)])
        alone = [serve().together([request([given], prompt_name=name)])[0]["sentence_embedding"] for given in TEXTS]
        np.testing.assert_allclose(together["sentence_embedding"], vectors, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(np.concatenate(alone), vectors, atol=1e-5, err_msg=name)


def test_rows_of_a_batch_have_their_own_adapters(serve, expected):
    rows = [(given, name) for name in CHOICES for given in TEXTS]
    parts = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    requests = [request([given for given, _ in part], prompt_name=[name for _, name in part]) for part in parts]
    answers = np.concatenate([answer["sentence_embedding"] for answer in serve().together(requests)])
    vectors = [expected(*CHOICES[name], given) for given, name in rows]
    np.testing.assert_allclose(answers, np.stack(vectors), atol=1e-5)


def test_prompt_of_the_client_leaves_the_choice_of_the_adapter_to_the_name(serve, expected):
    (answer,) = serve().together([request(TEXTS, prompt_name="separation|query", prompt="Look: ")])
    vectors = [expected("retrieval_query", "Look: ", given) for given in TEXTS]
    np.testing.assert_allclose(answer["sentence_embedding"], np.stack(vectors), atol=1e-5)


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}])
def test_unknown_task_is_refused(serve, prompt):
    known = "document, query, retrieval.passage, retrieval.query, retrieval_passage, retrieval_query, text-matching"
    with pytest.raises(UserError, match=f"row 0 has an unknown name; this model's prompts: {re.escape(known)}"):
        serve().together([request(["a"], prompt_name="separation", **prompt)])


def test_keys_about_adapters_are_refused_without_adapters(tmp_path):
    config = {"model_type": "jina_embeddings_v3", "architectures": ["JinaEmbeddingsV3Model"]} | JINA
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"sets load_trained_adapters, .*, task_instructions, which"):
        check_model(Checkpoint("jina", tmp_path))


def test_adapter_that_is_more_than_lora_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    save_adapter(tmp_path / "adapters/own", {}, {"option_of_tomorrow": 1})
    with pytest.raises(UserError, match=r"adapters/own sets option_of_tomorrow in .*: merge it into its model"):
        check_model(Checkpoint("a model", tmp_path))


def test_states_of_a_training_are_no_adapters(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    save_adapter(tmp_path / "checkpoint-500", {}, {"use_dora": True})
    check_model(Checkpoint("a model", tmp_path))
    assert task_of(Checkpoint("a model", tmp_path)) == "feature-extraction"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"layers.7.self_attn.q_proj.lora_A.weight": (2, 32)}, "which changes no linear or embedding layer"),
        ({"mixer.Wqkv.lora_A.weight": (2, 32)}, "which changes no linear or embedding layer"),
        ({"embeddings.LayerNorm.lora_A.weight": (2, 32)}, "which changes no linear or embedding layer"),
        ({"pooler.dense.bias": (32,)}, "has 'pooler.dense.bias', which"),
        ({"pooler.dense.lora_A.weight": (2, 32)}, "does not fit 'pooler.dense' of its model"),
        ({"pooler.dense.lora_A.weight": (3, 32), "pooler.dense.lora_B.weight": (32, 3)}, "does not fit"),
    ],
)
def test_tensors_that_change_no_layer_are_refused(source, tmp_path, tensors, reason):
    folder = tmp_path / "source"
    folder.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    save_adapter(folder / "own", {name: torch.ones(shape) for name, shape in tensors.items()}, {"r": 2})
    with pytest.raises(UserError, match=re.escape(reason)):
        assemble(folder, tmp_path / "models")


@pytest.mark.parametrize(
    ("form", "task", "reason"),
    [
        ("python", "sentence-similarity", "retrieval_query, text_matching) are served with FORMAT=onnx"),
        ("onnx", "feature-extraction", "are served with TASK=sentence-similarity"),
    ],
)
def test_other_formats_and_tasks_do_not_ignore_adapters(source, tmp_path, form, task, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        assemble(source, tmp_path / "models", form, task)


def test_lost_adapter_is_refused(source, tmp_path, anew, monkeypatch):
    """Parity is checked against merged weights, not against the network that is exported."""

    def save_without_adapters(self: SentenceModel, version: Path) -> None:
        (version / "prompts.json").write_text(json.dumps({"prompts": self.prompts}))

    monkeypatch.setattr(SentenceModel, "save_prompts", save_without_adapters)
    with pytest.raises(UserError, match="the served model answers differently from the original"):
        assemble(source, tmp_path / "models")


@pytest.mark.slow
def test_int8_keeps_adapters(serve, expected):
    for name, (adapter, prompt) in CHOICES.items():
        (answer,) = serve("onnx-int8").together([request(TEXTS, prompt_name=name)])
        vectors = np.stack([expected(adapter, prompt, given) for given in TEXTS])
        scale = np.linalg.norm(vectors, axis=1) * np.linalg.norm(answer["sentence_embedding"], axis=1)
        assert ((answer["sentence_embedding"] * vectors).sum(1) / scale).min() > 0.95
