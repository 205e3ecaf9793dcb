"""Describe models that return a vector for each token: those of ColBERT's kind, and BGE-M3 with its three outputs."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from export.check.served import Tensors
from export.checkpoint.tasks import HEADS
from export.recipes.text.network import TextModel
from export.recipes.text.sentences import (
    DOCUMENT_PROMPTS,
    PROMPT_INPUTS,
    LibraryNetwork,
    SentenceModel,
    network_parameters,
    write_json,
)
from triton_transformers.protocol import VECTOR_COUNT
from triton_transformers.settings import UserError

QUERY = "query"
SETTINGS = "multi_vector.json"


class MultiVectorModel(SentenceModel):
    """A MultiVectorEncoder. It also reads the checkpoints of Stanford's ColBERT and of PyLate."""

    library = MultiVectorEncoder
    optional_inputs = (*PROMPT_INPUTS, QUERY)
    token_inputs = ["input_ids", "attention_mask"]  # noqa: RUF012
    pools_spans = False
    chat = None

    @cached_property
    def original(self) -> Any:
        model = super().original
        if not isinstance(model[0], Transformer) or "message" in model[0].modality_config:
            raise UserError(
                f"{self.job.system}: its texts pass through a {type(model[0]).__name__} or a chat template, and models "
                "that return a vector for each token are served only with a plain Transformer: choose another model"
            )
        kinds = [type(module) for module in model][1:]
        expected = [*[Dense] * kinds.count(Dense), MultiVectorMask, *[Normalize] * (Normalize in kinds)]
        if sorted(kinds, key=id) != sorted(expected, key=id):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise UserError(
                f"{self.job.system}: after its Transformer it has {names}, and multi-vector models are served with "
                "Dense, MultiVectorMask and Normalize: choose another model"
            )
        return model

    @property
    def scoring(self) -> Any:
        return next(module for module in self.original if isinstance(module, MultiVectorMask))

    @cached_property
    def roles(self) -> dict[str, dict[str, Any]]:
        """Return how queries and documents are tokenized: the fields of `Role` in serving/encoders/multi_vector.py."""
        first, limit = self.original[0], super().max_length
        roles = {}
        for name, own in ((QUERY, first.query_length), ("document", first.document_length)):
            role: dict[str, Any] = {"max_length": own or limit}
            if name in self.scoring.skiplist_tasks and self.scoring._skiplist_ids is not None:
                role["skipped"] = self.scoring._skiplist_ids.tolist()
            if name != QUERY and self.scoring.keep_only_token_ids:
                role["only"] = self.scoring.keep_only_token_ids
            roles[name] = role
        if expansion := first.query_expansion:
            length, is_fixed = expansion["length"], expansion["strategy"] == "fixed"
            tokenizer = self.hugging_face_tokenizer
            token = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
            if expansion["token"] is not None:
                token = tokenizer.convert_tokens_to_ids(expansion["token"])
            roles[QUERY] |= {
                "max_length": length if is_fixed else max(length, roles[QUERY]["max_length"]),
                "extended_to": length,
                "extension": tokenizer.pad_token_id if token is None else token,
                "extension_side": tokenizer.padding_side if is_fixed else "right",
                "attends": expansion["attend"],
            }
        return roles

    @cached_property
    def max_length(self) -> int:
        return max(role["max_length"] for role in self.roles.values())

    @cached_property
    def network(self) -> torch.nn.Module:
        return LibraryNetwork(self, "token_embeddings")

    def save_prompts(self, version: Path) -> None:
        prompts = self.original.prompts
        document = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), "")
        own = {QUERY: "", **prompts, "document": document}
        write_json(version / "prompts.json", {"default_prompt_name": "document", "prompts": own})
        takes_mean = self.original.similarity_fn_name == "meanmaxsim"
        write_json(version / SETTINGS, {"roles": self.roles, "mean": takes_mean})

    def reference(self, request: Tensors) -> Tensors:
        """Return the text's vectors as the library encodes it, and its score if there is a query."""
        (text,), choice = self.texts_of(request), self.options_of(request)
        name, query = choice.pop("prompt_name", ""), choice.pop(QUERY, None)
        encode = self.original.encode_query if name == QUERY else self.original.encode_document
        if "prompt" not in choice and name not in ("", QUERY, "document"):
            choice["prompt_name"] = name
        vectors = encode(text, convert_to_numpy=True, **choice)
        answers = {"token_embeddings": vectors[None], VECTOR_COUNT: np.array([[len(vectors)]])}
        if query is not None:
            own = self.original.encode_query(query, convert_to_numpy=True)
            answers["score"] = self.original.similarity([own], [vectors]).numpy()
        return answers

    @cached_property
    def layers(self) -> dict[str, object]:
        for layer in self.dense.values():
            if layer.use_residual or not hasattr(torch.nn, type(layer.activation_function).__name__):
                raise UserError(
                    f"{self.job.system}: FORMAT=python does not support its projection (a residual connection, or an "
                    "activation that torch.nn lacks): set FORMAT=onnx"
                )
        return {
            **network_parameters(self.transformer),
            **({"token_dense": ",".join(self.dense)} if self.dense else {}),
            "normalize_tokens": int(any(isinstance(module, Normalize) for module in self.original)),
        }


class HybridModel(TextModel):
    """BGE-M3: one run for a vector of the text, a weight for each of its tokens, and a vector for each."""

    optional_inputs = (QUERY,)

    @cached_property
    def original(self) -> Any:
        self.check_pooling()
        heads = (self.load_head(name) for name in HEADS)
        return HybridNetwork(self.load(transformers.AutoModel), *heads).eval()

    @property
    def transformer(self) -> transformers.PreTrainedModel:
        return self.original.encoder

    def load_head(self, name: str) -> torch.nn.Linear:
        """Read one of the heads that FlagEmbedding saves."""
        try:
            weights = load_file(self.job.weights / name)
            outputs, inputs = weights["weight"].shape
            head = torch.nn.Linear(inputs, outputs, bias="bias" in weights)
            head.load_state_dict(weights)
        except Exception as error:  # a damaged file makes torch raise anything
            raise UserError(
                f"{self.job.system}: {name} is not the linear layer that FlagEmbedding saves ({type(error).__name__}): "
                "download it again"
            ) from error
        return head.float()

    def check_pooling(self) -> None:
        """Raise if sentence-transformers would make the text's vector in another way than FlagEmbedding."""
        path = self.job.weights / "1_Pooling/config.json"
        pooling = json.loads(path.read_text()) if path.exists() else {}
        modes = [key for key, value in pooling.items() if key.startswith("pooling_mode") and value]
        if pooling and modes != ["pooling_mode_cls_token"] and pooling.get("pooling_mode") != "cls":
            raise UserError(
                f"{self.job.system}: 1_Pooling/config.json does not take the first token's vector, as FlagEmbedding "
                f"does for models with {HEADS[0]}: correct it, or set TASK=sentence-similarity"
            )

    @cached_property
    def network(self) -> torch.nn.Module:
        return self.original

    @property
    def token_width(self) -> int:
        return self.original.vectors.out_features

    @cached_property
    def unweighted(self) -> list[int]:
        """Return the tokens that have no weight."""
        tokenizer = self.hugging_face_tokenizer
        ids = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        return [id for id in ids if id is not None]

    def save_prompts(self, version: Path) -> None:
        role = {"max_length": self.max_length, "skipped_first": 1}
        settings = {"roles": {QUERY: role, "document": role}, "mean": True, "unweighted": self.unweighted}
        write_json(version / SETTINGS, settings)

    def save_layers(self, version: Path) -> None:
        for name, head in self.heads.items():
            (version / name).mkdir()
            plain = Dense(
                head.in_features,
                head.out_features,
                bias=head.bias is not None,
                activation_function=torch.nn.Identity(),
                init_weight=head.weight,
                init_bias=head.bias,
            )
            plain.save(str(version / name))

    @property
    def heads(self) -> dict[str, torch.nn.Linear]:
        return {"sparse_linear": self.original.weights, "colbert_linear": self.original.vectors}

    @cached_property
    def layers(self) -> dict[str, object]:
        weight, token = self.heads
        return {
            **network_parameters(self.transformer),
            "pooling": "cls",
            "normalize": 1,
            "weight_dense": weight,
            "token_dense": token,
        }

    @torch.inference_mode()
    def reference(self, request: Tensors) -> Tensors:
        """Return the results of BGEM3FlagModel.encode() and compute_score()."""
        vector, weights, vectors = self.outputs(*self.texts_of(request))
        answers = {
            "sentence_embedding": vector,
            "sparse": weights,
            "token_embeddings": vectors[None],
            VECTOR_COUNT: np.array([[len(vectors)]]),
        }
        if query := self.options_of(request):
            _, _, own = self.outputs(query[QUERY])
            answers["score"] = (own @ vectors.T).max(axis=1).mean().reshape(1, 1)
        return answers

    def outputs(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = self.hugging_face_tokenizer(text, truncation=True, max_length=self.max_length, return_tensors="pt")
        ids = tokens["input_ids"]
        vector, weights, vectors = self.original(ids, tokens["attention_mask"])
        sparse = torch.zeros(1, self.config.vocab_size).scatter_reduce(1, ids, weights, reduce="amax")
        sparse[:, self.unweighted] = 0
        return vector.numpy(), sparse.numpy(), vectors[0, 1:].numpy()

    def comparable(self, answers: Tensors) -> Tensors:
        """Add the sparse vector as a whole: its tokens, sorted by weight, may change places on a tie."""
        sparse = np.zeros((len(answers["token_id"]), self.config.vocab_size), np.float32)
        for row, ids, weights in zip(sparse, answers["token_id"], answers["weight"], strict=True):
            row[ids[ids >= 0]] = weights[ids >= 0]
        return answers | {"sparse": sparse}


class HybridNetwork(torch.nn.Module):
    """The network from tokens to the text's vector, and each token's weight and vector, as FlagEmbedding has it."""

    def __init__(self, encoder: Any, weights: torch.nn.Linear, vectors: torch.nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.weights = weights
        self.vectors = vectors

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        normalize = torch.nn.functional.normalize
        return (
            normalize(tokens[:, 0], dim=-1),
            self.weights(tokens)[..., 0].relu(),
            normalize(self.vectors(tokens), dim=-1),
        )
