"""Text encoders of any task: an ensemble of tokenizer, encoder, and where the task has them, answers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers
from tokenizers import Tokenizer

from scripts.common.corpus import MIXED
from scripts.common.settings import UserError
from scripts.models.catalogue import Order
from scripts.models.exporters import text_configs
from scripts.models.exporters.config_writer import write_config
from scripts.models.exporters.onnx_export import export, quantized, quiet
from scripts.models.exporters.parity import compare
from scripts.models.tasks import TEXT_TASKS, TextTask, save_labels

PARITY_TEXTS = 64
PUBLISHED_WIDTH = 384
LEAST_COSINE = 0.9999
LEAST_NEURON_COSINE = 0.999  # where NEURON_COMPILER_ARGS have it compute in bfloat16
POOLING = ("mean", "cls")  # as in shared/text_encoder.py
# Positions of these begin after the padding token's.
OFFSET_POSITIONS = ("camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl", "data2vec-text", "longformer")


@dataclass
class TextModel:
    """A model of the order, and the Triton models it becomes."""

    order: Order

    @cached_property
    def task(self) -> TextTask:
        return TEXT_TASKS[self.order.task]

    @cached_property
    def config(self):
        return transformers.AutoConfig.from_pretrained(
            self.order.weights, trust_remote_code=self.order.trust_remote_code, local_files_only=True
        )

    @cached_property
    def hugging_face_tokenizer(self):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.order.weights, trust_remote_code=self.order.trust_remote_code, local_files_only=True
        )
        if not tokenizer.is_fast:
            raise UserError(
                f"{self.order.system}: its {type(tokenizer).__name__} has no fast form, which is the one that is served"
            )
        return tokenizer

    @cached_property
    def max_length(self) -> int:
        """The longest text, in tokens: what the model was trained for, and has positions for."""
        positions = getattr(self.config, "max_position_embeddings", None) or 512
        if self.config.model_type in OFFSET_POSITIONS:
            positions -= self.config.pad_token_id + 1
        own = self.order.weights / "sentence_bert_config.json"
        trained = json.loads(own.read_text()).get("max_seq_length") if own.exists() else None
        longest = min(positions, trained or self.hugging_face_tokenizer.model_max_length)
        return self.order.neuron.lengths_up_to(longest, self.order.system)[-1] if self.order.neuron else longest

    @cached_property
    def mask(self) -> str:
        """The token to be filled in; empty where nothing is."""
        if "mask_logits" not in self.task.outputs:
            return ""
        if not (mask := self.hugging_face_tokenizer.mask_token):
            raise UserError(f"{self.order.system}: its tokenizer has no mask token to fill in")
        return mask

    @property
    def pairs(self) -> bool:
        return len(self.task.inputs) > 1

    @property
    def labels(self) -> list[str]:
        return [self.config.id2label[i] for i in range(len(self.config.id2label))]

    @cached_property
    def token_inputs(self) -> list[str]:
        """What the encoder is fed. Which of two texts a token is of says something only where there are two."""
        told_apart = self.pairs and getattr(self.config, "type_vocab_size", 0) > 1
        return ["input_ids", "attention_mask", *(["token_type_ids"] if told_apart else [])]

    @cached_property
    def pooling(self) -> dict[str, str]:
        """How PyTorch makes one vector of a text's tokens: what is plain in a sentence-transformer's modules."""
        modules = json.loads((self.order.weights / "modules.json").read_text())
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        mode = pooling_mode(json.loads((self.order.weights / "1_Pooling/config.json").read_text()))
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]) or mode not in POOLING:
            raise UserError(
                f"{self.order.system}: FORMAT=python knows no such sentence-transformer ({', '.join(kinds)}; {mode} "
                "pooling); take FORMAT=onnx"
            )
        return {"pooling": mode, "normalize": "1" if "Normalize" in kinds else "0"}

    def part(self, name: str) -> Path:
        """The folder of one of the Triton models. Those of `embedding` have their names from the published guides."""
        own = self.order.system if name == "ensemble" else f"{self.order.system}_{name}"
        published = {"ensemble": "embedding", "tokenizer": "tokenizer", "encoder": "encoder"}
        return self.order.folder / (published[name] if self.order.system == "embedding" else own)

    def version(self, name: str) -> Path:
        return self.part(name) / "1"

    @cached_property
    def original(self):
        """In PyTorch, with all that its task needs: what the weights lack would be drawn at random."""
        kind = getattr(transformers, self.task.model_class)
        model, found = kind.from_pretrained(
            self.order.weights,
            trust_remote_code=self.order.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **self.attention,
        )
        if missing := sorted(key for key in found["missing_keys"] if "pooler" not in key or self.classifies):
            raise UserError(f"{self.order.weights} is no model for {self.order.task}: it has no weights '{missing[0]}'")
        return model.eval()

    @property
    def attention(self) -> dict[str, str]:
        """Plain matrix products for Neuron's compiler."""
        return {"attn_implementation": "eager"} if self.order.neuron else {}

    @cached_property
    def whole(self) -> Whole:
        if self.order.task != "sentence-similarity":
            return Whole(self, self.original)
        from sentence_transformers import SentenceTransformer

        folder, options = str(self.order.weights), {"local_files_only": True, "model_kwargs": self.attention}
        return Whole(self, SentenceTransformer(folder, device="cpu", **options))

    @property
    def classifies(self) -> bool:
        return self.order.task == "text-classification"


class Whole(torch.nn.Module):
    """The original, from tokens to the outputs that are served."""

    def __init__(self, model: TextModel, network: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.network = network.eval()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = dict(zip(self.model.token_inputs, tensors, strict=True))
        if self.model.order.task == "sentence-similarity":
            return (self.network(tokens)["sentence_embedding"],)
        found = self.network(**tokens)
        if self.model.mask:
            where = (tokens["input_ids"] == self.model.hugging_face_tokenizer.mask_token_id).int().argmax(dim=1)
            return (found.logits[torch.arange(len(where)), where],)
        return tuple(found[name] for name in self.model.task.outputs)


def pooling_mode(config: dict) -> str:
    """mean, cls, ... however old the file is."""
    if "pooling_mode" in config:
        return config["pooling_mode"]
    chosen = [key.split("_")[2] for key, value in config.items() if key.startswith("pooling_mode_") and value]
    return "+".join(chosen)


def assemble(order: Order) -> dict:
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = TextModel(order)
    if order.system == "embedding":
        check_published(model)
    for part in ("ensemble", "tokenizer", "encoder", *(["answers"] if model.task.answers else [])):
        model.version(part).mkdir(parents=True)
    tokenizer = save_tokenizer(model)
    if model.task.answers:
        save_answers(model)
    with quiet():
        facts = SAVE[order.format](model, tokenizer)
    for part, (config, parameters) in text_configs.configs(model, facts.pop("width")).items():
        # Those of `embedding` are in git, with comments.
        if order.system != "embedding":
            write_config(model.part(part), f"{order.task}, written by `make models`", config, parameters)
    return {"max_length": model.max_length, **facts}


def check_published(model: TextModel) -> None:
    """Its configs are in git, and promise what other formats and weights do not keep."""
    if model.order.format == "python" or model.config.hidden_size != PUBLISHED_WIDTH:
        raise UserError(
            f"embedding is ONNX and answers vectors of {PUBLISHED_WIDTH}: what is otherwise takes another name"
        )


def save_tokenizer(model: TextModel) -> Tokenizer:
    """The model's own, with the length the model takes; what its file says of lengths is not the model's."""
    tokenizer = Tokenizer.from_str(model.hugging_face_tokenizer.backend_tokenizer.to_str())
    tokenizer.enable_truncation(model.max_length, strategy="only_second" if model.pairs else "longest_first")
    theirs = model.hugging_face_tokenizer
    tokenizer.enable_padding(pad_id=theirs.pad_token_id or 0, pad_token=theirs.pad_token or "[PAD]")
    tokenizer.save(str(model.version("tokenizer") / "tokenizer.json"))
    return tokenizer


def save_answers(model: TextModel) -> None:
    if model.mask:
        shutil.copy(model.version("tokenizer") / "tokenizer.json", model.version("answers"))
    elif "label" in model.task.answers:
        save_labels(model.version("answers"), model.labels)


# --- the encoder ------------------------------------------------------------------------------------------------------


def save_onnx(model: TextModel, tokenizer: Tokenizer) -> dict:
    target = model.version("encoder") / "model.onnx"
    sentences = model.order.task == "sentence-similarity"
    outputs = ["logits"] if model.mask else list(model.task.outputs)
    export(
        model.order.weights,
        "feature-extraction" if sentences else model.order.task,
        target.parent,
        outputs,
        library="sentence_transformers" if sentences else "transformers",
    )
    if model.mask:
        keep_masked(target, tokenizer.token_to_id(model.mask))
    feeds = [feed(encoding) for encoding in tokenizer.encode_batch(parity_texts(model))]
    found = run(target, feeds)
    facts = parity(model, feeds, found, LEAST_COSINE) | {"width": width(model, found)}
    if model.order.format == "onnx-int8":
        int8 = quantized(target, lambda: run(target, feeds))
        facts |= int8 | {"said": f"{facts['said']}; {int8['said']}"}
    return facts


def parity(model: TextModel, feeds: list[dict[str, np.ndarray]], found: list[np.ndarray], least: float) -> dict:
    cosine = compare(reference(model, feeds), found, least)
    said = f"cosine with the original at least {cosine:.6f} on {len(feeds)} texts"
    return {"least_cosine": cosine, "parity_texts": len(feeds), "said": said}


def save_python(model: TextModel, tokenizer: Tokenizer) -> dict:
    _ = model.original  # it loads
    model.order.take_model(model.version("encoder"))
    return {"width": model.config.hidden_size}


def save_neuron(model: TextModel, tokenizer: Tokenizer) -> dict:
    from scripts.neuron.compile import Compiled, on_cores

    target = model.order.neuron
    if target.chip == "inf1":
        raise UserError(
            "make models compiles for Inf2 and Trn1; for Inf1 compile with torch-neuron yourself, and make the model's "
            "folder with scripts/neuron/gen_triton_model.py"
        )
    lengths = target.lengths_up_to(model.max_length, model.order.system)
    compiled = Compiled(model.whole, model.token_inputs, target, lengths, model.version("encoder"))
    with on_cores():
        compiled.compile()
    feeds = [feed(encoding) for encoding in tokenizer.encode_batch(parity_texts(model))]
    facts = {"neuron": target.record(), "width": width(model, reference(model, feeds[:1]))}
    if not target.device:
        return facts | {"said": "not held against the original, for there is no Neuron device (NEURON_DEVICES=0)"}
    with on_cores():
        found = list(cut(model, feeds, compiled.answers(feeds)))
    return facts | parity(model, feeds, found, LEAST_NEURON_COSINE)


def cut(model: TextModel, feeds: list, answers: Iterator[list[np.ndarray]]) -> Iterator[np.ndarray]:
    """Of what each text was answered, that for its own tokens; all outputs in one row."""
    for each, arrays in zip(feeds, answers, strict=True):
        length = each["input_ids"].shape[1]
        axes = model.task.outputs.values()
        own = [array[:length] if shape[0] == "T" else array for shape, array in zip(axes, arrays, strict=True)]
        yield np.concatenate([array.ravel() for array in own])


SAVE = {"onnx": save_onnx, "onnx-int8": save_onnx, "python": save_python, "neuron": save_neuron}


def width(model: TextModel, found: list[np.ndarray]) -> int:
    """Of the vectors the encoder makes. A sentence-transformer may have a last layer of its own."""
    return found[0].size if "sentence_embedding" in model.task.outputs else model.config.hidden_size


def keep_masked(path: Path, mask_id: int) -> None:
    """Logits of the masked token alone leave the graph: of each token they are as many as there are words."""
    model = onnx.load(path)
    graph = model.graph
    (logits,) = graph.output
    helper = onnx.helper
    graph.initializer.append(helper.make_tensor("mask_id", onnx.TensorProto.INT64, [], [mask_id]))
    graph.node.extend(
        [
            helper.make_node("Equal", ["input_ids", "mask_id"], ["is_mask"]),
            helper.make_node("Cast", ["is_mask"], ["is_mask_number"], to=onnx.TensorProto.INT32),
            helper.make_node("ArgMax", ["is_mask_number"], ["mask_position"], axis=1, keepdims=1),
            helper.make_node("GatherND", [logits.name, "mask_position"], ["mask_logits"], batch_dims=1),
        ]
    )
    batch, _, words = logits.type.tensor_type.shape.dim
    shape = [batch.dim_param or "batch_size", words.dim_value]
    graph.output.append(helper.make_tensor_value_info("mask_logits", onnx.TensorProto.FLOAT, shape))
    graph.output.remove(logits)
    onnx.checker.check_model(model)
    onnx.save(model, path)


# --- is it still the model? -------------------------------------------------------------------------------------------


def parity_texts(model: TextModel) -> list:
    texts = example_texts(model.max_length)
    if model.pairs:
        return [("Which one?", text) for text in texts]
    return [f"{model.mask} {text}" for text in texts] if model.mask else texts


def example_texts(max_length: int) -> list[str]:
    """Some of the committed ones, and what they leave out: nothing, one token, what just fits, one more, too much."""
    texts = MIXED.texts
    edges = ["", " ", "a", "?", "word " * (max_length - 2), "word " * (max_length - 1), " ".join(texts[:40])]
    return [*texts[:: len(texts) // PARITY_TEXTS], *edges, "漢" * 2 * max_length]


def feed(encoding) -> dict[str, np.ndarray]:
    """One text as the graph takes it, without padding."""
    used = sum(encoding.attention_mask)
    columns = {
        "input_ids": encoding.ids,
        "attention_mask": encoding.attention_mask,
        "token_type_ids": encoding.type_ids,
    }
    return {name: np.array([column[:used]], np.int64) for name, column in columns.items()}


def run(path: Path, feeds: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """All outputs of each text, in one row."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    taken = [node.name for node in session.get_inputs()]
    results = (session.run(None, {name: each[name] for name in taken}) for each in feeds)
    return [np.concatenate([array.ravel() for array in arrays]) for arrays in results]


@torch.inference_mode()
def reference(model: TextModel, feeds: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """What the original says."""
    answers = (model.whole(*(torch.from_numpy(each[name]) for name in model.token_inputs)) for each in feeds)
    return [np.concatenate([tensor.numpy().ravel() for tensor in tensors]) for tensors in answers]
