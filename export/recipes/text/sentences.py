"""Describe a model of sentence-transformers that is being assembled, so that it is served as encode() answers."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, Normalize, Pooling, StaticEmbedding
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SparseStaticEmbedding, SpladePooling
from sentence_transformers.util import select_max_active_dims
from tokenizers import Tokenizer

from export.check.served import Tensors
from export.checkpoint.adapters import check_adapters
from export.checkpoint.silence import quiet
from export.recipes.low_rank import ADAPTER, Adapters
from export.recipes.onnx_export import Network, attention, export, load_original
from export.recipes.text.network import TextModel
from triton_transformers.protocol import SPAN_VECTORS
from triton_transformers.settings import UserError
from triton_transformers.tasks.task import Encoder
from triton_transformers.tasks.vectors import SPAN_ANSWERS, SPAN_OUTPUTS

# Int8 has no exact vectors of tokens, and Neuron's compiled models return the text's alone.
SPAN_FORMATS = ("onnx", "python")
PROMPT_INPUTS = ("prompt_name", "prompt")
POOLING_MASK = "pooling_mask"
# The prompts that encode_document() takes: the first of them that there is.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# Names by which clients of Jina's API ask for adapters whose folders have an underscore.
JINA_TASKS = ("retrieval.query", "retrieval.passage", "text-matching")
# The maximum number of tokens for a table of vectors, which sets none. The library would not cut its texts.
TABLE_LENGTH = 2**15


class SentenceModel(TextModel):
    library: ClassVar[type[BaseModel]] = SentenceTransformer

    @cached_property
    def original(self) -> Any:
        """Return the model as the library loads it. Its texts must go through a tokenizer as they are."""
        with quiet():  # it warns about a default prompt
            model = self.library(
                str(self.job.weights),
                device="cpu",
                trust_remote_code=self.job.trust_remote_code,
                local_files_only=True,
                model_kwargs={"use_safetensors": True, "dtype": torch.float32, **attention(self.job)},
                processor_kwargs=self.processor_options,
            )
        parts = [module for module in model.modules() if isinstance(module, Transformer)]
        for module, part in zip(parts, self.job.checkpoint.parts, strict=True):
            # Raises if weights are missing. In the type of the file, they need no memory.
            load_original(self.job, type(module.model), part.folder, dtype="auto")
        return model.eval()

    @cached_property
    def routes(self) -> dict[str, str]:
        router = self.original[0]
        routes: dict[str, str] = {}
        if isinstance(router, Router):
            for name in ("", "document", "query"):
                with suppress(ValueError):  # it has none
                    routes[name] = router._resolve_route(name or None, "text") or ""
        return routes

    @cached_property
    def encoders(self) -> dict[str, TextModel]:
        router, *others = self.original
        if not self.routes:
            return {"": self}
        encoders: dict[str, TextModel] = {}
        for route in dict.fromkeys(self.routes.values()):
            encoders[route] = encoder = type(self)(self.job, self.pads, route)
            own = self.library(modules=[*router.sub_modules[route], *others], device="cpu")
            for name in ("prompts", "default_prompt_name", "truncate_dim", "max_active_dims"):
                setattr(own, name, getattr(self.original, name, None))
            encoder.original = own.eval()
        return encoders

    @property
    def first(self) -> Any:
        """Return the module that gets the texts: if there are routes, that of texts without a prompt's name."""
        module = self.original[0]
        return module.sub_modules[next(iter(self.routes.values()))][0] if self.routes else module

    @cached_property
    def whole_config(self) -> Any:
        """Return the configuration of the transformer; a table of vectors has none."""
        if isinstance(self.first, Transformer):
            return self.first.config
        return transformers.PretrainedConfig.from_dict({"vocab_size": len(self.hugging_face_tokenizer)})

    @property
    def is_table(self) -> bool:  # type: ignore[override]
        return isinstance(self.first, StaticEmbedding | SparseStaticEmbedding)

    @property
    def transformer(self) -> transformers.PreTrainedModel:
        return self.first.model

    def reference(self, request: Tensors) -> Tensors:
        texts = self.texts_of(request)
        answers = {next(iter(self.task.outputs)): self.encode(texts, **self.options_of(request))}
        if "spans" in request:
            answers[SPAN_VECTORS] = self.encode_spans(texts[0], request["spans"][0])[None]
        return answers

    def encode(self, texts: list[str], prompt_name: str | None = None, **options: Any) -> np.ndarray:
        """Return the vectors. The names query and document stand for the methods that are called so."""
        self.choose_adapter(prompt_name or "")
        if prompt_name in self.adapter_prompts:  # the library knows no adapters, and may not have its prompt
            options, prompt_name = {"prompt": self.adapter_prompts[prompt_name]} | options, None
        methods = {"query": self.original.encode_query, "document": self.original.encode_document}
        if prompt_name in methods:
            return methods[prompt_name](texts, **options)
        return self.original.encode(texts, prompt_name=prompt_name or None, **options)

    @cached_property
    def prompts(self) -> dict[str, str]:
        """Return the prompts, with the ones that encode_query() and encode_document() take."""
        own = self.original.prompts
        default = own.get(self.original.default_prompt_name, "")
        document = next((own[name] for name in DOCUMENT_PROMPTS if name in own), default)
        return {"query": default, "document": document} | own | self.adapter_prompts

    @cached_property
    def adapters(self) -> Adapters | None:
        """Return the adapters beside the weights: the name of a row's prompt chooses one of them."""
        folders = self.job.checkpoint.adapters if self.job.task == "sentence-similarity" else []
        if not folders:
            return None
        names, first = ", ".join(folder.name for folder in folders), self.original[0]
        if self.job.format not in ("onnx", "onnx-int8", "int8"):
            raise UserError(
                f"{self.job.system}: its adapters ({names}) are served with FORMAT=onnx on a CPU or GPU only"
            )
        if not isinstance(first, Transformer):
            raise UserError(
                f"{self.job.system}: its adapters ({names}) belong to a {type(first).__name__}, and only those of a "
                "Transformer are served: choose another model"
            )
        check_adapters(self.job.system, self.job.weights)
        return Adapters(self.job.system, self.transformer, folders)

    @cached_property
    def adapter_numbers(self) -> dict[str, int]:
        """Return the number of the adapter for each name of a prompt that chooses one."""
        numbers: dict[str, int] = {}
        if not self.adapters:
            return numbers
        for number, folder in enumerate(self.job.checkpoint.adapters, start=1):
            others = (*self.original.prompts, *self.task_instructions, *JINA_TASKS)
            same = (name for name in others if plain(name) == plain(folder.name))
            numbers |= dict.fromkeys([folder.name, *same], number)
        own = dict(numbers)
        for kind, words in {"query": ("query",), **dict.fromkeys(DOCUMENT_PROMPTS, DOCUMENT_PROMPTS)}.items():
            fitting = (own[name] for word in words for name in own if word in plain(name).split("_"))
            if kind in self.original.prompts and (number := next(fitting, 0)):
                numbers.setdefault(kind, number)
        return numbers

    @property
    def task_instructions(self) -> dict[str, str]:
        """Return the prompts that Jina writes into config.json."""
        return getattr(self.whole_config, "task_instructions", None) or {}

    @cached_property
    def adapter_prompts(self) -> dict[str, str]:
        """Return the prompt for each name of an adapter: that of this name, or of another one for the same adapter."""
        numbers = self.adapter_numbers
        texts = {name: text for name, text in (self.task_instructions | self.original.prompts).items() if text}
        shared = {numbers[name]: text for name, text in texts.items() if name in numbers}
        return {name: texts.get(name, shared.get(number, "")) for name, number in numbers.items()}

    def choose_adapter(self, name: str) -> None:
        """Let the original compute with the adapter of this prompt, or of the default one if the name is empty."""
        if self.adapters:
            self.adapters.merge(self.adapter_numbers.get(name or self.original.default_prompt_name or "", 0))

    def load_tokenizer(self) -> Any:
        """Return the library's tokenizer, which may also put texts into lower case and knows the maximum length."""
        tokenizer = self.first.tokenizer
        if isinstance(self.first, Transformer):
            return tokenizer
        own = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer.backend_tokenizer
        own = Tokenizer.from_str(own.to_str())
        own.post_processor = None  # a table of vectors gets no special tokens
        limit = getattr(tokenizer, "model_max_length", (own.truncation or {}).get("max_length", TABLE_LENGTH))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=own, model_max_length=min(limit, TABLE_LENGTH))

    @property
    def processor_options(self) -> dict[str, Any]:
        """Return the options with which the library loads the tokenizer."""
        return {}

    @cached_property
    def max_length(self) -> int:
        options = getattr(self.first, "processing_kwargs", {})
        own = [options.get(name, {}).get("max_length") for name in ("common", "text", "chat_template")]
        return min([super().max_length, *filter(None, own)])

    @cached_property
    def chat(self) -> dict[str, Any] | None:
        """Return the fields of serving/text/embedding_prompts.py's Chat if the texts pass through a chat template."""
        first = self.first
        if "message" not in getattr(first, "modality_config", {}):
            return None
        variables = dict(first.processing_kwargs.get("chat_template", {}))
        try:
            template = first.processor.get_chat_template(variables.pop("chat_template", None))
        except ValueError:
            raise UserError(
                f"{self.job.system}: its texts pass through a chat template, and its tokenizer has none: write it to "
                "chat_template.jinja, or remove message from the modality_config in sentence_bert_config.json"
            ) from None
        return {
            "template": template,
            "special_tokens": first.tokenizer.special_tokens_map,
            "roles": ["query", "document"] if self.takes_pairs else ["user"],
            "parts": first.input_formatter.message_format == "structured",
            "variables": variables,
        }

    @cached_property
    def adds_special_tokens(self) -> bool:  # type: ignore[override]
        return not self.chat  # the template writes them

    @cached_property
    def pools_prompt(self) -> bool:
        return all(module.include_prompt for module in self.original if isinstance(module, Pooling))

    @cached_property
    def optional_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the inputs that choose a prompt, unless the model has none."""
        has_prompts = any(self.original.prompts.values()) or not self.pools_prompt or self.chat or self.adapters
        return PROMPT_INPUTS if has_prompts or self.route or self.routes else ()

    @cached_property
    def token_inputs(self) -> list[str]:
        others = {POOLING_MASK: not self.pools_prompt, ADAPTER: self.adapters}
        return ["input_ids", "attention_mask", *(name for name, is_needed in others.items() if is_needed)]

    @cached_property
    def width(self) -> int:
        """Return the width of a vector. That in the configuration of Pooling may be another, which changes nothing."""
        return self.original.encode("rain").shape[-1]

    @cached_property
    def network(self) -> torch.nn.Module:
        names = ("sentence_embedding", *(["token_embeddings"] if self.pools_spans else []))
        if self.adapters:
            self.adapters.install()
        return LibraryNetwork(self, *names)

    @cached_property
    def pools_spans(self) -> bool:  # type: ignore[override]
        """Return whether a vector is the mean of the tokens' vectors, so that a span of a text has one too."""
        if self.route or self.job.format not in SPAN_FORMATS or self.job.system == "embedding":
            return False
        modules: list[Any] = [*self.original, None]
        first, second = modules[:2]
        takes_texts = isinstance(first, Transformer) and "message" not in first.modality_config
        return takes_texts and isinstance(second, Pooling) and second.pooling_mode in ("mean", ("mean",), ["mean"])

    @property
    def task(self) -> Encoder:
        task = super().task
        if not self.pools_spans:
            return task
        return replace(task, outputs=task.outputs | SPAN_OUTPUTS, answers=SPAN_ANSWERS, encoder_answers=True)

    def export(self, path: Path, examples: list[Tensors]) -> None:
        super().export(path, examples)
        if self.pools_spans:
            rows = {"vectors": np.ones((2, self.transformer.config.hidden_size), np.float32)}
            export(
                head(self.original),
                {"vectors": {0: "spans"}},
                {"embeddings": {0: "spans"}},
                [rows],
                path.with_name("head.onnx"),
            )

    @torch.inference_mode()
    def encode_spans(self, text: str, spans: np.ndarray) -> np.ndarray:
        """Return the vector of each span of a text, as late chunking defines it."""
        self.choose_adapter("")
        prompt = self.original.prompts.get(self.original.default_prompt_name or "", "")
        tokens = self.hugging_face_tokenizer(
            prompt + text,
            truncation=True,
            max_length=self.max_length,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
        hidden = self.original[0]({name: tokens[name] for name in ("input_ids", "attention_mask")})["token_embeddings"]
        last = tokens["offset_mapping"][0, :, 1] - 1 - len(prompt)
        ordinary = tokens["special_tokens_mask"][0] == 0
        pooled = [hidden[0, ordinary & (last >= start) & (last < end)].mean(dim=0) for start, end in spans.tolist()]
        return head(self.original)(torch.stack(pooled))[0].numpy()

    def save_prompts(self, version: Path) -> None:
        if not self.optional_inputs:
            return
        fields = {"default_prompt_name": self.original.default_prompt_name, "prompts": self.prompts}
        if self.chat:
            fields["chat"] = self.chat
        if self.adapters:
            fields["adapters"] = self.adapter_numbers
        write_json(version / "prompts.json", fields)

    @cached_property
    def dense(self) -> dict[str, Dense]:
        """Return the dense layers after the pooling, by the name of their folder."""
        layers = [module for module in self.original if isinstance(module, Dense)]
        return {f"{number}_Dense": layer for number, layer in enumerate(layers, start=2)}

    def save_layers(self, version: Path) -> None:
        _ = self.layers  # raises if they are not supported
        for name, layer in self.dense.items():
            (version / name).mkdir()
            layer.save(str(version / name))

    @cached_property
    def layers(self) -> dict[str, object]:
        transformer, *modules = self.original
        if self.route or not isinstance(transformer, Transformer):
            raise UserError(
                f"{self.job.system}: FORMAT=python serves a Transformer and its pooling, and this model begins with a "
                f"{'Router' if self.route else type(transformer).__name__}: set FORMAT=onnx"
            )
        kinds = [type(module) for module in modules if not isinstance(module, Dropout)]
        supported = [Pooling, *[Dense] * len(self.dense), *[Normalize] * (Normalize in kinds)]
        if kinds != supported or not all(map(is_plain, self.dense.values())):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise UserError(
                f"{self.job.system}: FORMAT=python does not support this sentence-transformer's modules after its "
                f"Transformer ({names}): set FORMAT=onnx"
            )
        modes: Any = modules[0].pooling_mode
        parameters: dict[str, object] = {
            **network_parameters(transformer.model),
            "pooling": modes if isinstance(modes, str) else "+".join(modes),
            "dense": ",".join(self.dense),
            "normalize": int(Normalize in kinds),
            "dimensions": self.original.truncate_dim,
        }
        return {name: value for name, value in parameters.items() if value not in ("", None)}


class SparseModel(SentenceModel):
    """A SparseEncoder: a vector with a weight for each token of the vocabulary, or for each dimension of its own."""

    library = SparseEncoder
    pools_spans = False

    @cached_property
    def original(self) -> Any:
        model = super().original
        if not (self.job.weights / "modules.json").exists() and not isinstance(model[-1], SpladePooling):
            raise UserError(
                f"{self.job.system}: TASK={self.job.task} serves masked language models and sparse encoders that "
                "sentence-transformers saved, and this is neither: choose another model"
            )
        return model

    @cached_property
    def vocabulary(self) -> int:
        return self.width

    def encode(self, texts: list[str], prompt_name: str | None = None, **options: Any) -> np.ndarray:
        vectors: Any = super().encode(texts, prompt_name, convert_to_sparse_tensor=False, **options)
        return vectors.float().numpy()

    @cached_property
    def layers(self) -> dict[str, object]:
        names = ", ".join(type(module).__name__ for module in self.original)
        if self.route or names.removeprefix("MLM") != "Transformer, SpladePooling":
            raise UserError(
                f"{self.job.system}: FORMAT=python serves a masked language model with SPLADE's pooling, and this is a "
                f"sparse encoder of {'a Router with ' if self.route else ''}{names}: set FORMAT=onnx"
            )
        transformer, pooling = self.original
        return {
            **network_parameters(transformer.model),
            "model_class": self.task.model_class,
            "splade_pooling": pooling.pooling_strategy,
            "splade_activation": pooling.activation_function,
        }


class LibraryNetwork(torch.nn.Module):
    """The modules of the library, from the tensors of `token_inputs` to their outputs of these names."""

    def __init__(self, model: SentenceModel, *names: str) -> None:
        super().__init__()
        self.inputs = model.token_inputs
        self.adapters = model.adapters
        self.modality = "message" if model.chat else "text"
        self.names = names
        self.dimensions = getattr(model.original, "truncate_dim", None)  # only a SentenceTransformer has it
        self.active = getattr(model.original, "max_active_dims", None)  # only a SparseEncoder has it
        self.chain = torch.nn.ModuleList(exportable(module, self.active) for module in model.original)
        for module in self.chain:
            if isinstance(module, Pooling):
                module.register_forward_pre_hook(use_pooling_mask)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True)) | {"modality": self.modality}
        if self.adapters:
            self.adapters.choose(features.pop(ADAPTER)[:, :1])
        for module in self.chain:
            features = module(features)
        first, *others = (features[name] for name in self.names)
        vectors: torch.Tensor = first[:, : self.dimensions]
        return (select_max_active_dims(vectors, self.active) if self.active else vectors, *others)


def exportable(module: torch.nn.Module, active: int | None) -> torch.nn.Module:
    """Return a module of the library as a graph of padded rows can have it."""
    if isinstance(module, StaticEmbedding):
        return VectorTable(module.embedding.weight)
    if isinstance(module, SparseStaticEmbedding):
        return WeightTable(module.weight)
    return LargestLatents(module, active or module.k) if isinstance(module, SparseAutoEncoder) else module


class VectorTable(torch.nn.Module):
    """The mean of the vectors of a text's tokens, as StaticEmbedding computes it."""

    def __init__(self, vectors: torch.Tensor) -> None:
        super().__init__()
        self.vectors = torch.nn.Parameter(vectors)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"][..., None].to(self.vectors.dtype)
        total = (self.vectors[features["input_ids"]] * mask).sum(dim=1)
        return features | {"sentence_embedding": total / mask.sum(dim=1).clamp(min=1)}


class WeightTable(torch.nn.Module):
    """The weight of each token that a text has, as SparseStaticEmbedding returns it."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        tokens, mask = features["input_ids"], features["attention_mask"].to(self.weights.dtype)
        counts = torch.zeros(tokens.shape[0], len(self.weights), dtype=mask.dtype).scatter_add(1, tokens, mask)
        return features | {"sentence_embedding": counts.clamp(max=1) * self.weights}


class LargestLatents(torch.nn.Module):
    """The largest latents of an autoencoder, without its computations for training."""

    def __init__(self, encoder: SparseAutoEncoder, count: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.count = count

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        vectors, _ = self.encoder.prepare(features["sentence_embedding"])
        latents, _ = self.encoder.top_k(self.encoder.encode_pre_act(vectors), self.count, compute_aux=False)
        return features | {"sentence_embedding": latents}


def head(original: SentenceTransformer) -> Network:
    """Return the layers after the pooling, for the pooled vectors of spans."""
    layers, name = torch.nn.Sequential(*list(original)[2:]), "sentence_embedding"
    return Network(layers, lambda vectors: [layers({name: vectors})[name][:, : original.truncate_dim]])


def plain(name: str) -> str:
    """Return a name as folders spell it: retrieval_query for retrieval.query."""
    return re.sub(r"[.-]", "_", name)


def use_pooling_mask(_: torch.nn.Module, args: tuple[dict[str, Any]]) -> None:
    if POOLING_MASK in args[0]:
        args[0]["attention_mask"] = args[0].pop(POOLING_MASK)


def network_parameters(network: transformers.PreTrainedModel) -> dict[str, object]:
    """Return the parameters by which the server loads a network of transformers."""
    name = type(network).__name__
    return {
        # The library takes only the encoder of an encoder-decoder. Code of the model's own has no class here.
        "model_class": name if hasattr(transformers, name) else "AutoModel",
        "dtype": str(network.dtype).removeprefix("torch."),
    }


def is_plain(layer: Dense) -> bool:
    """Return whether a dense layer computes on the pooled vector, with an activation that torch.nn has."""
    names = layer.module_input_name, layer.module_output_name
    return names == ("sentence_embedding",) * 2 and hasattr(torch.nn, type(layer.activation_function).__name__)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(content, ensure_ascii=False, indent=2)}\n", encoding="utf-8")
