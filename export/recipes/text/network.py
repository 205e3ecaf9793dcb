"""Describe a text encoder that is being assembled: its files, its tokenizer, and the PyTorch original."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers

from export.catalogue import FormatUnavailable, Job
from export.check.served import Tensors
from export.checkpoint.tasks import activation
from export.recipes.onnx_export import export, load_original
from export.recipes.text.references import find_answer
from triton_transformers.settings import UserError
from triton_transformers.tasks.table import ENCODERS, TASKS
from triton_transformers.tasks.task import PIPELINE, Encoder

WINDOW = 384  # tokens of a question and a part of its context, as in transformers' pipeline
DEFAULT_LENGTH = 512  # of texts for a model that sets no limit
# The names that the published guides use for `embedding`.
PUBLISHED_PARTS = {"ensemble": "embedding", "tokenizer": "tokenizer", "encoder": "encoder"}


@dataclass
class TextModel:
    """A text encoder of transformers. The subclasses describe those of other libraries."""

    job: Job
    pads: bool = True  # whether texts of unequal length may share a run
    route: str = ""  # the route that this encoder serves, if texts take several

    # The subclasses override these, some by a property, which mypy allows only with consent.
    adds_special_tokens = True
    # Further inputs of the tokenizer: a text for each row, if the client sets them.
    optional_inputs: ClassVar[tuple[str, ...]] = ()
    fills_rows = False  # whether the model takes each text padded to the maximum length
    reads_padding = False  # whether a model that fills rows has no mask, so that it reads the padding, too
    is_table = False  # of vectors, one for each token
    pools_spans = False  # whether it returns a vector for each span of a text

    @property
    def task(self) -> Encoder:
        return ENCODERS[self.job.task]

    @property
    def inputs(self) -> list[str]:
        return [*TASKS[self.job.task].inputs]

    @cached_property
    def whole_config(self) -> Any:
        return transformers.AutoConfig.from_pretrained(
            self.job.weights, trust_remote_code=self.job.trust_remote_code, local_files_only=True
        )

    @cached_property
    def config(self) -> Any:
        """Return the configuration of the part that takes texts, if the model has several."""
        return getattr(self.whole_config, "text_config", self.whole_config)

    def load_tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(
            self.job.weights, trust_remote_code=self.job.trust_remote_code, local_files_only=True
        )

    @cached_property
    def hugging_face_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        tokenizer = self.load_tokenizer()
        if not tokenizer.is_fast:
            raise FormatUnavailable(
                f"its {type(tokenizer).__name__} has no fast version, and only transformers' pipelines do without one",
                instead=PIPELINE,
            )
        return tokenizer

    @property
    def special_token(self) -> str:
        """Return a token that looks like padding if a text has it."""
        return self.hugging_face_tokenizer.pad_token or self.hugging_face_tokenizer.eos_token or ""

    @cached_property
    def max_length(self) -> int:
        """Return the maximum length of a text in tokens: what the model was trained for and has positions for."""
        positions = getattr(self.config, "max_position_embeddings", None) or 0
        if positions:
            positions -= unused_positions(self.transformer)
        # A tokenizer without a limit has an enormous one, and a model with relative positions none or -1.
        limits = [limit for limit in (positions, self.hugging_face_tokenizer.model_max_length) if 0 < limit < 10**9]
        maximum = min(limits, default=DEFAULT_LENGTH)
        if self.task.cuts_windows:
            maximum = min(maximum, WINDOW)
        return self.job.neuron.lengths_up_to(maximum, self.job.system)[-1] if self.job.neuron else maximum

    @cached_property
    def mask(self) -> str:
        """Return the mask token if the task is to fill it in, else ""."""
        if "mask_logits" not in self.task.outputs:
            return ""
        if not (mask := self.hugging_face_tokenizer.mask_token):
            raise UserError(f"{self.job.system}: its tokenizer has no mask token, which TASK=fill-mask requires")
        return mask

    @property
    def routes(self) -> dict[str, str]:
        """Return the route of the texts of each kind, if these differ: of queries, of documents, and of others ("")."""
        return {}

    @property
    def encoders(self) -> dict[str, TextModel]:
        """Return the encoders that serve the model, by route: itself, or one for each route."""
        return {"": self}

    @property
    def vocabulary(self) -> int:
        """Return the number of words that the task's outputs tell apart."""
        return self.config.vocab_size

    @property
    def prompts(self) -> dict[str, str]:
        """Return the prompts that clients can name."""
        return {}

    @property
    def width(self) -> int:
        """Return the width of the encoder's vectors, or -1 if only a part of the configuration has it (T5Gemma)."""
        return getattr(self.config, "hidden_size", -1)

    @property
    def token_width(self) -> int:
        """Return the width of each token's vector."""
        return self.width

    def comparable(self, answers: Tensors) -> Tensors:
        """Return a system's answers as the reference has them."""
        return answers

    @property
    def takes_pairs(self) -> bool:
        return len(self.inputs) > 1

    @cached_property
    def pad_token_id(self) -> int:
        """Return the id that fills the padded columns of input_ids.

        A classifier may find the last token of a text by this id. If it has none, it gets -1, which no token has.
        """
        own = getattr(self.config, "pad_token_id", None)
        if own is not None and own >= self.config.vocab_size:
            raise UserError(
                f"{self.job.system}: config.json sets pad_token_id={own}, but the model has only "
                f"{self.config.vocab_size} tokens: correct it there"
            )
        if own is None:
            return -1 if self.model_class.endswith("SequenceClassification") else 0
        return max(own, -1)

    @property
    def model_class(self) -> str:
        """Return the class of transformers that loads the weights: AutoModel knows no encoder without its decoder."""
        own = next(iter(self.config.architectures or []), "")
        if self.task.model_class == "AutoModel" and own.endswith("EncoderModel") and hasattr(transformers, own):
            return own
        return self.task.model_class

    @property
    def label_count(self) -> int:
        return self.config.num_labels

    @property
    def labels(self) -> list[str]:
        return [self.config.id2label[i] for i in range(len(self.config.id2label))]

    @cached_property
    def activation(self) -> str:
        """Return the function that turns logits into scores."""
        return activation(self.config)

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """Return the parts that tokenize. Clients of the published guides also call the tokenizer of `embedding`."""
        return ("encoder", "tokenizer") if self.job.system == "embedding" else ("encoder",)

    @cached_property
    def token_inputs(self) -> list[str]:
        """Return the encoder's inputs. token_type_ids distinguish two texts, so only pairs need them."""
        has_types = (
            self.takes_pairs
            and getattr(self.config, "type_vocab_size", 0) > 1
            and "token_type_ids" in self.hugging_face_tokenizer.model_input_names
        )
        return ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]

    def export(self, path: Path, examples: list[Tensors]) -> None:
        """Write the ONNX graph from tokens to the encoder's outputs."""
        per_text, per_token = {0: "texts"}, {0: "texts", 1: "tokens"}
        inputs = dict.fromkeys(self.token_inputs, per_token)
        outputs = {name: per_token if axes[0] == "T" else per_text for name, axes in self.task.outputs.items()}
        export(self.network.float(), inputs, outputs, examples, path)

    def request(self, *texts: str) -> Tensors:
        """Return a request with one row. The second of two texts may be optional."""
        rows = zip(self.inputs, texts, strict=False)
        return {name: np.array([[text.encode()]], np.object_) for name, text in rows}

    def texts_of(self, request: Tensors) -> list[str]:
        """Return the texts of a request's row."""
        return [request[name][0, 0].decode() for name in self.inputs if name in request]

    def options_of(self, request: Tensors) -> dict[str, str]:
        """Return the further inputs of a request's row, such as the name of its prompt."""
        return {name: request[name][0, 0].decode() for name in self.optional_inputs if name in request}

    @torch.inference_mode()
    def reference(self, request: Tensors) -> Tensors:
        """Return the answer that the served system must give to one row, computed with the model's own library.

        The names are those of the served tensors: answers, or outputs of the encoder if the answers are discrete
        (spans, words), because these jump on a tie.
        """
        texts = self.texts_of(request)
        if self.task.cuts_windows and not self.job.neuron:  # on Neuron only the encoder's outputs can be compared
            question, context = texts
            answer = find_answer(self.original, self.hugging_face_tokenizer, question, context, self.max_length)
            return {"score": np.array([[answer.score]], np.float32)}
        tokens = self.tokenize(texts)
        accepted = inspect.signature(self.original.forward).parameters
        outputs = self.original(**{name: tensor for name, tensor in tokens.items() if name in accepted})
        if self.mask:
            position = int((tokens["input_ids"][0] == self.hugging_face_tokenizer.mask_token_id).int().argmax())
            return {"mask_logits": outputs.logits[:, position].numpy()}
        return {name: outputs[name].numpy() for name in self.task.outputs}

    def tokenize(self, texts: list[str]) -> dict[str, torch.Tensor]:
        if self.task.second_is_optional:
            texts = texts[:1] + [text for text in texts[1:] if text]  # the pipeline ignores an empty second text
        return self.hugging_face_tokenizer(
            *([text] for text in texts),  # as lists: beside a single text, transformers ignores an empty second one
            truncation=self.task.truncation,
            max_length=self.max_length,
            return_tensors="pt",
        )

    def encode_spans(self, text: str, spans: np.ndarray) -> np.ndarray:
        """Return a vector for each span of a text, if the model returns them."""
        raise NotImplementedError

    def save_prompts(self, version: Path) -> None:
        """Save what the tokenizer puts before texts."""

    def save_layers(self, version: Path) -> None:
        """Save the layers that serving/encoders/on_torch.py applies after the model of transformers."""

    @cached_property
    def layers(self) -> dict[str, object]:
        """Return the parameters by which serving/encoders/on_torch.py applies these layers."""
        return {}

    def part(self, name: str) -> Path:
        """Return the folder of one of the Triton models."""
        own = self.job.system if name == "ensemble" or self.task.is_one_model else f"{self.job.system}_{name}"
        return self.job.folder / (PUBLISHED_PARTS[name] if self.job.system == "embedding" else own)

    def version(self, name: str) -> Path:
        return self.part(name) / "1" / self.route

    @cached_property
    def original(self) -> Any:
        """Return the PyTorch model."""
        return self.load(getattr(transformers, self.model_class))

    @property
    def transformer(self) -> transformers.PreTrainedModel:
        """Return the part of the original that transformers knows."""
        return self.original

    def load(self, kind: Any) -> transformers.PreTrainedModel:
        model, _ = load_original(self.job, kind)
        return model

    def forget_original(self) -> None:
        """Free the memory of the original."""
        for name in ("original", "network", "encoders", "adapters"):
            self.__dict__.pop(name, None)

    @cached_property
    def network(self) -> torch.nn.Module:
        """Return the original from the tensors of `token_inputs` to the outputs that are served."""
        self.accept_padding()
        return OriginalNetwork(self, self.transformer)

    def accept_padding(self) -> None:
        """Let the original take an id of padding that no token has, as serving/encoders/on_torch.py does."""
        if self.pad_token_id < 0:
            self.transformer.config.pad_token_id = self.pad_token_id
            self.transformer.get_input_embeddings().register_forward_pre_hook(lambda _, ids: (ids[0].clamp(min=0),))


class OriginalNetwork(torch.nn.Module):
    """The original from tokens to the outputs that are served."""

    def __init__(self, model: TextModel, network: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.network = network.eval()
        self.accepted = inspect.signature(network.forward).parameters  # FNet takes no mask

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = dict(zip(self.model.token_inputs, tensors, strict=True))
        outputs = self.network(**{name: tensor for name, tensor in tokens.items() if name in self.accepted})
        if self.model.mask:
            where = (tokens["input_ids"] == self.model.hugging_face_tokenizer.mask_token_id).int().argmax(dim=1)
            return (outputs.logits[torch.arange(where.shape[0]), where],)
        return tuple(outputs[name] for name in self.model.task.outputs)


def unused_positions(network: torch.nn.Module) -> int:
    """Return how many rows of the table of positions come before that of the first token, as in RoBERTa."""
    for module in network.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(getattr(module, "position_embeddings", None), torch.nn.Embedding):
            return padding + 1
    return 0
