"""STANDS IN for vLLM, which runs on GPUs: the part of vLLM 0.27's synchronous API that the backend calls.

It generates with the real model in transformers, on the CPU, one token per running text and step. Long prompts are
read in chunks. It obeys grammars with xgrammar, as vLLM does. Names, signatures and error messages are vLLM's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NotRequired, TypedDict

import torch
import transformers

from serving.generation.adapters import AdapterFiles, adapted
from serving.structure.worker import xgrammar

from .lora.request import LoRARequest
from .sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.27.1"
BLOCK = 16  # tokens; only whole blocks of a prompt are found in the prefix cache
CACHE_TOKENS = 4096
DEAD_END = -1  # in place of a token, where a grammar allows none


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[dict[str, Any]]


@dataclasses.dataclass
class EngineArgs:
    model: str = "Qwen/Qwen3-0.6B"
    dtype: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    structured_outputs_config: dict[str, str] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    disable_log_stats: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    speculative_config: dict[str, Any] | None = None  # which the stand-in ignores


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False


@dataclasses.dataclass
class Request:
    """One text of the engine."""

    id: str
    prompt: list[int]
    params: SamplingParams
    images: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    adapter: Any = None  # its matrices
    read: int = 0  # tokens of the prompt
    cached_tokens: int = 0
    new: list[int] = dataclasses.field(default_factory=list)
    cache: Any = None
    random: torch.Generator | None = None
    matcher: Any = None  # of its grammar


class LLMEngine:
    def __init__(self, args: EngineArgs, stat_loggers: list[Callable[[Any, int], Any]]) -> None:
        folder = Path(args.model)
        architectures = json.loads((folder / "config.json").read_text())["architectures"]
        if not hasattr(transformers, architectures[0]):
            raise ValidationError(
                f"Value error, Model architectures {architectures} are not supported for now. "
                "Supported architectures: dict_keys(['AfmoeForCausalLM', 'ApertusForCausalLM'])"
            )
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise AssertionError("the backend must run vLLM in its own process")
        network = getattr(transformers, architectures[0])
        self.model = network.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
        limit = self.model.config.get_text_config().max_position_embeddings
        # vLLM prepares images with a processor that requires its tokenizer.
        sees = architectures[0].endswith("ForConditionalGeneration") and not args.skip_tokenizer_init
        self.processor = transformers.AutoProcessor.from_pretrained(folder) if sees else None
        length = limit if args.max_model_len in (None, -1) else args.max_model_len
        self.model_config = SimpleNamespace(dtype=self.model.dtype, quantization=None, max_model_len=length)
        self.engine_core = SimpleNamespace(shutdown=self.shut_down)
        self.args = args
        self.adapters: dict[str, Any] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prompts: list[list[int]] = []  # those in the prefix cache
        self.loggers = [] if args.disable_log_stats else [factory(None, 0) for factory in stat_loggers]
        for logger in self.loggers:
            logger.log_engine_initialized()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: list[Callable[[Any, int], Any]] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        return cls(engine_args, stat_loggers or [])

    def add_lora(self, lora_request: LoRARequest) -> bool:
        if not self.args.enable_lora:
            raise RuntimeError("LoRA is not enabled.")
        rank = json.loads((Path(lora_request.lora_path) / "adapter_config.json").read_text())["r"]
        if rank > self.args.max_lora_rank:
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {self.args.max_lora_rank}.")
        folder = Path(lora_request.lora_path)
        self.adapters[lora_request.lora_name] = AdapterFiles(folder.parents[1]).load(folder)
        return True

    def add_request(
        self, request_id: str, prompt: TokensPrompt, params: SamplingParams, lora_request: LoRARequest | None = None
    ) -> str:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id)}")
        tokens, images = prompt["prompt_token_ids"], {}
        if data := prompt.get("multi_modal_data"):
            if self.processor is None:
                raise ValueError("You cannot initialize the multi-modal processor when `skip_tokenizer_init=True`")
            text = self.processor.tokenizer.decode(tokens)
            images = self.processor([data["image"]], [text], add_special_tokens=False, return_tensors="pt")
            tokens = images.pop("input_ids")[0].tolist()
            del images["attention_mask"]
        if len(tokens) >= self.model_config.max_model_len:
            raise ValueError(
                f"The decoder prompt (length {len(tokens)}) is longer than the maximum model length of "
                f"{self.model_config.max_model_len}. Make sure that `max_model_len` is no smaller than the number of "
                "text tokens."
            )
        adapter = self.adapters[lora_request.lora_name] if lora_request else None
        self.waiting.append(Request(request_id, list(tokens), params, dict(images), adapter))
        return f"{request_id}-0a1b2c3d"

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        self.waiting = [request for request in self.waiting if request.id not in request_ids]
        self.running = [request for request in self.running if request.id not in request_ids]

    @torch.inference_mode()
    def step(self) -> list[Any]:
        while self.waiting and len(self.running) < (self.args.max_num_seqs or 256):
            self.start(self.waiting.pop(0))
        budget = self.args.max_num_batched_tokens or 2048
        outputs = []
        for request in list(self.running):
            budget = self.advance(request, budget, outputs)
        used = sum(len(request.prompt) + len(request.new) for request in self.running)
        if outputs:
            stats = SimpleNamespace(kv_cache_usage=used / CACHE_TOKENS)
            for logger in self.loggers:
                logger.record(stats, SimpleNamespace(), mm_cache_stats=None, engine_idx=0)
        return outputs

    def start(self, request: Request) -> None:
        if self.args.enable_prefix_caching is not False:
            common = max((common_length(request.prompt, other) for other in self.prompts), default=0)
            request.cached_tokens = min(common, len(request.prompt) - 1) // BLOCK * BLOCK
            self.prompts.append(request.prompt)
        request.random = torch.Generator()
        if request.params.seed is not None:
            request.random.manual_seed(request.params.seed)
        request.cache = transformers.DynamicCache()
        if request.params.structured_outputs:
            request.matcher = self.matcher(request.params)
        self.running.append(request)

    def matcher(self, params: SamplingParams) -> Any:
        library = xgrammar()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.args.model)
        vocabulary = library.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.model.config.vocab_size, stop_token_ids=params.stop_token_ids
        )
        compiler, structure = library.GrammarCompiler(vocabulary), params.structured_outputs
        compiled = (
            compiler.compile_grammar(structure.grammar)
            if structure.grammar
            else compiler.compile_structural_tag(structure.structural_tag)
        )
        return library.GrammarMatcher(compiled)

    def advance(self, request: Request, budget: int, outputs: list[Any]) -> int:
        """Read the next tokens of a text, within the budget, and add its next token. Return the budget that is left."""
        unread = (request.prompt + request.new)[request.read :][:budget]
        if not unread:
            return budget
        images = {} if request.read else request.images
        with adapted(self.model, [request.adapter]):
            answer = self.model(torch.tensor([unread]), past_key_values=request.cache, use_cache=True, **images)
        logits = answer.logits[0, -1]
        request.read += len(unread)
        if request.read == len(request.prompt) + len(request.new):
            scores = allowed(adjusted(logits, request), request)
            request.new.append(sample(scores, request) if scores.isfinite().any() else DEAD_END)
            if request.matcher and request.new[-1] != DEAD_END:
                request.matcher.accept_token(request.new[-1])
            outputs.append(self.output(request, logits.float().log_softmax(-1)))
        return budget - len(unread)

    def output(self, request: Request, logprobs: torch.Tensor) -> Any:
        token, params = request.new[-1], request.params
        reason = None
        if token == DEAD_END:
            reason = "error"
        elif token in (params.stop_token_ids or ()):
            reason = "stop"
        elif len(request.new) >= (params.max_tokens or 16):
            reason = "length"
        if reason:
            self.running.remove(request)
        delta = params.output_kind is RequestOutputKind.DELTA
        return SimpleNamespace(
            request_id=request.id,
            finished=reason is not None,
            num_cached_tokens=request.cached_tokens,
            prompt_token_ids=request.prompt,
            prompt_logprobs=self.prompt_logprobs(request),
            outputs=[
                SimpleNamespace(
                    token_ids=[] if token == DEAD_END else [token] if delta else request.new,
                    finish_reason=reason,
                    logprobs=None
                    if params.logprobs is None or token == DEAD_END
                    else [position(token, logprobs, params.logprobs)],
                )
            ],
        )

    def prompt_logprobs(self, request: Request) -> list[dict[int, Any] | None] | None:
        """Return those of each token of the prompt with the first new token, as vLLM does."""
        count, prompt = request.params.prompt_logprobs, request.prompt
        if count is None or len(request.new) > 1:
            return None
        scores = self.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        return [None, *(position(token, own, count) for token, own in zip(prompt[1:], scores, strict=True))]

    def shut_down(self) -> None:
        del self.model


def adjusted(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the scores after the processors and penalties of vLLM, in its order."""
    params, logits = request.params, logits.float().clone()
    if len(request.new) < params.min_tokens:
        logits[params.stop_token_ids or []] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*request.prompt, *request.new}:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in {*request.new}:
        logits[token] -= params.presence_penalty + params.frequency_penalty * request.new.count(token)
    return logits


def allowed(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Return the scores without the tokens that the text's grammar excludes."""
    if not request.matcher:
        return logits
    mask = torch.full((1, (len(logits) + 31) // 32), -1, dtype=torch.int32)
    request.matcher.fill_next_token_bitmask(mask)
    bits = (mask[0][:, None] >> torch.arange(32)) & 1
    return logits.masked_fill(bits.reshape(-1)[: len(logits)] == 0, -math.inf)


def sample(logits: torch.Tensor, request: Request) -> int:
    params = request.params
    if not params.temperature:
        return int(logits.argmax())
    scores, order = (logits.double() / params.temperature).softmax(-1).sort(descending=True)
    scores[scores < params.min_p * scores[0]] = 0
    scores[params.top_k or len(scores) :] = 0
    scores /= scores.sum()
    scores[scores.cumsum(-1) - scores >= params.top_p] = 0
    return int(order[torch.multinomial(scores, 1, generator=request.random)])


def position(token: int, logprobs: torch.Tensor, count: int) -> dict[int, Any]:
    """Return the new token and the most probable ones, as vLLM does."""
    tokens = [token, *logprobs.topk(count).indices.tolist()]
    return {token: SimpleNamespace(logprob=logprobs[token].item(), decoded_token=None) for token in tokens}


def common_length(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


class ValidationError(ValueError):
    """Stands in for pydantic's, which adds lines about itself to the text."""

    def errors(self) -> list[dict[str, str]]:
        return [{"msg": str(self.args[0])}]
