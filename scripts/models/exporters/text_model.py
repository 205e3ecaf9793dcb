"""Describe a text encoder that is being assembled: its files, its tokenizer, and the PyTorch original."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from scripts.common.settings import UserError
from scripts.models.catalogue import Job
from scripts.models.tasks import TEXT_TASKS, TextTask

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

# The modules of torch that CrossEncoder applies to logits -> the postprocessor's name for them.
RANKING_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax", "Tanh": "tanh"}
POOLING = ("mean", "cls")  # the ones that shared/text_encoder.py implements
# In these types the first position is the one after the padding token's id.
OFFSET_POSITIONS = ("camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl", "data2vec-text", "longformer")
# The names that the published guides use for `embedding`.
PUBLISHED_PARTS = {"ensemble": "embedding", "tokenizer": "tokenizer", "encoder": "encoder"}


@dataclass
class TextModel:
    job: Job

    @cached_property
    def task(self) -> TextTask:
        return TEXT_TASKS[self.job.task]

    @cached_property
    def config(self) -> Any:
        return transformers.AutoConfig.from_pretrained(
            self.job.weights, trust_remote_code=self.job.trust_remote_code, local_files_only=True
        )

    @cached_property
    def hugging_face_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.job.weights, trust_remote_code=self.job.trust_remote_code, local_files_only=True
        )
        if not tokenizer.is_fast:
            raise UserError(
                f"{self.job.system}: its {type(tokenizer).__name__} has no fast version in transformers, and only fast "
                "tokenizers can be served"
            )
        return tokenizer

    @cached_property
    def max_length(self) -> int:
        """Return the maximum length of a text in tokens: what the model was trained for and has positions for."""
        positions = getattr(self.config, "max_position_embeddings", None) or 512
        if self.config.model_type in OFFSET_POSITIONS:
            positions -= self.config.pad_token_id + 1
        own = self.job.weights / "sentence_bert_config.json"
        trained = json.loads(own.read_text()).get("max_seq_length") if own.exists() else None
        maximum = min(positions, trained or self.hugging_face_tokenizer.model_max_length)
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
    def takes_pairs(self) -> bool:
        return len(self.task.inputs) > 1

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
        return (
            max(own, -1) if own is not None else -1 if self.task.model_class.endswith("SequenceClassification") else 0
        )

    @property
    def labels(self) -> list[str]:
        return [self.config.id2label[i] for i in range(len(self.config.id2label))]

    @cached_property
    def cross_encoder(self) -> CrossEncoder:
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(
            str(self.job.weights),
            device="cpu",
            trust_remote_code=self.job.trust_remote_code,
            local_files_only=True,
            model_kwargs={"dtype": torch.float32, "use_safetensors": True, **self.attention},
        )
        first, *others = model
        if others or first.transformer_task != "sequence-classification":
            kinds = ", ".join(type(module).__name__ for module in model)
            raise UserError(
                f"{self.job.system}: cross-encoders are served if they are sequence classifiers, and this one is "
                f"{kinds} for {first.transformer_task}: convert it to a sequence classifier with one label"
            )
        return model

    @cached_property
    def ranking_activation(self) -> str:
        """Return the function that turns a cross-encoder's logits into scores."""
        name = type(self.cross_encoder.activation_fn).__name__
        if name not in RANKING_ACTIVATIONS:
            raise UserError(
                f"{self.job.system}: its scores pass through {name}, which is not served. Only "
                f"{', '.join(RANKING_ACTIVATIONS)} are"
            )
        return RANKING_ACTIVATIONS[name]

    @cached_property
    def token_inputs(self) -> list[str]:
        """Return the encoder's inputs. token_type_ids distinguish two texts, so only pairs need them."""
        has_types = (
            self.takes_pairs
            and getattr(self.config, "type_vocab_size", 0) > 1
            and "token_type_ids" in self.hugging_face_tokenizer.model_input_names
        )
        return ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]

    @cached_property
    def pooling(self) -> dict[str, str]:
        """Return the parameters with which the backend makes one vector of a text's tokens, as the original does."""
        modules = json.loads((self.job.weights / "modules.json").read_text())
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        mode = pooling_mode(json.loads((self.job.weights / "1_Pooling/config.json").read_text()))
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]) or mode not in POOLING:
            raise UserError(
                f"{self.job.system}: FORMAT=python does not support this sentence-transformer ({', '.join(kinds)}; "
                f"{mode} pooling): set FORMAT=onnx"
            )
        return {"pooling": mode, "normalize": "1" if "Normalize" in kinds else "0"}

    def part(self, name: str) -> Path:
        """Return the folder of one of the Triton models."""
        own = self.job.system if name == "ensemble" else f"{self.job.system}_{name}"
        return self.job.folder / (PUBLISHED_PARTS[name] if self.job.system == "embedding" else own)

    def version(self, name: str) -> Path:
        return self.part(name) / "1"

    @cached_property
    def original(self) -> transformers.PreTrainedModel:
        """Return the PyTorch model. Raise if weights are missing: transformers would draw them at random."""
        kind = getattr(transformers, self.task.model_class)
        model, info = kind.from_pretrained(
            self.job.weights,
            trust_remote_code=self.job.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            **self.attention,
        )
        # Only sequence classifiers read the pooler.
        uses_pooler = "SequenceClassification" in self.task.model_class
        if missing := sorted(key for key in info["missing_keys"] if "pooler" not in key or uses_pooler):
            raise UserError(
                f"{self.job.weights} is not a model for {self.job.task}: it lacks the weights '{missing[0]}'"
            )
        return model.eval()

    @property
    def attention(self) -> dict[str, str]:
        """Return the options that give Neuron's compiler plain matrix products."""
        return {"attn_implementation": "eager"} if self.job.neuron else {}

    @cached_property
    def network(self) -> OriginalNetwork:
        if self.job.task != "sentence-similarity":
            if self.pad_token_id < 0:  # as in shared/text_encoder.py
                self.original.config.pad_token_id = self.pad_token_id
                self.original.get_input_embeddings().register_forward_pre_hook(lambda _, ids: (ids[0].clamp(min=0),))
            return OriginalNetwork(self, self.original)
        from sentence_transformers import SentenceTransformer

        folder, options = str(self.job.weights), {"local_files_only": True, "model_kwargs": self.attention}
        return OriginalNetwork(self, SentenceTransformer(folder, device="cpu", **options))


class OriginalNetwork(torch.nn.Module):
    """The original from tokens to the outputs that are served."""

    def __init__(self, model: TextModel, network: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.network = network.eval()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = dict(zip(self.model.token_inputs, tensors, strict=True))
        if self.model.job.task == "sentence-similarity":
            return (self.network(tokens)["sentence_embedding"],)
        outputs = self.network(**tokens)
        if self.model.mask:
            where = (tokens["input_ids"] == self.model.hugging_face_tokenizer.mask_token_id).int().argmax(dim=1)
            return (outputs.logits[torch.arange(len(where)), where],)
        return tuple(outputs[name] for name in self.model.task.outputs)


def pooling_mode(config: dict) -> str:
    """Return mean, cls, ... from a pooling module's configuration, in its old form or its new one."""
    if "pooling_mode" in config:
        return config["pooling_mode"]
    chosen = [key.split("_")[2] for key, value in config.items() if key.startswith("pooling_mode_") and value]
    return "+".join(chosen)
