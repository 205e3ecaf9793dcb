"""Continuous batching with vLLM, on a GPU. Written for vLLM 0.27, which is in NVIDIA's release 26.08."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from serving.generation.adapters import CONFIG, FOLDER, WEIGHTS, AdapterFiles, adapter_names
from serving.generation.continuous import ContinuousGeneration, EngineFailed, EngineStats, NewTokens, TokenEngine
from serving.generation.job import Job
from serving.generation.row import Logprobs, Options, Row
from serving.structure.checks import DEAD_END
from serving.text.prompts import PromptRequest
from serving.text.tokenizer import TextTokenizer
from serving.triton.memory import HEADROOM, one_load_at_a_time
from serving.triton.parameters import DEVICES, choice_parameter, parameter, weights_folder
from serving.triton.types import BadRequest, ConfigError, InstanceArgs, ModelConfig
from triton_transformers.engines import VLLM

# Arguments of the engine, which `make models` writes and users edit.
(SETTINGS,) = VLLM.files
# Arguments that the backend sets, and where to set them instead.
SET_ELSEWHERE = {"max_num_seqs": "the parameter 'max_batch' in config.pbtxt"}
DRAFT = "speculative_config"
# The memory of a model: as a share of the GPU's, or as the bytes for the keys and values of its texts.
SHARE, CACHE = "gpu_memory_utilization", "kv_cache_memory_bytes"
GPU_COUNTS = ("tensor_parallel_size", "pipeline_parallel_size")
# The defaults of arguments that model.json does not set. vLLM itself reserves a share of the GPU's whole memory, so a
# second model would find none. With CACHE a model takes its weights and that, and -1 shortens the context to what then
# fits. The backend itself turns texts to tokens; vLLM needs the tokenizer for structured output.
DEFAULTS = {CACHE: 4 * 2**30, "max_model_len": -1, "structured_outputs_config": {"backend": "xgrammar"}}
ENVIRONMENT = {
    # Run the engine in this process, so that its memory is freed when this process ends, and its errors reach the log.
    # A process of the engine's own would inherit the server's sockets.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",  # vLLM reports each start to its authors
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Counting the GPUs must not start CUDA: with several GPUs vLLM forks a process for each.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
MAX_REASON = 300
# The ranks that vLLM reserves memory for, and how many adapters it keeps beside those of the batch.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
MAX_ADAPTERS_IN_BATCH, KEPT_ADAPTERS = 8, 64

T = TypeVar("T")


class VllmGeneration(ContinuousGeneration):
    text_engine = VLLM
    counters = (*ContinuousGeneration.counters, "prefix_cached_tokens")

    def load_model(self, config: ModelConfig, args: InstanceArgs) -> TextTokenizer:
        tokenizer = super().load_model(config, args)
        self.engine: VllmEngine
        self.engine.end_tokens = tokenizer.end_tokens
        self.adapters = VllmAdapters(weights_folder(config, args), self.engine)
        tokenizer.context = self.engine.context
        return tokenizer

    def encoded(self, read: PromptRequest, prompt: str) -> tuple[list[int], Any]:
        """Return the tokens, which check and count the prompt, and the prompt as vLLM takes it if it has images.

        vLLM prepares the images itself, and keeps what it has prepared.
        """
        tokens, inputs = super().encoded(read, prompt)
        if inputs and self.chat_images:
            images = {"image": self.chat_images.decode(read.images)}
            inputs = {"prompt_token_ids": self.chat_images.tokens(prompt), "multi_modal_data": images}
        return tokens, inputs

    def begin(self, key: int, row: Row[Job]) -> None:
        self.engine.add(key, row.prompt_tokens, row.options, row.images or None)

    def load_engine(self, folder: Path, config: ModelConfig, args: InstanceArgs) -> TokenEngine:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        has_one_gpu = args["model_instance_kind"] == "GPU"
        if has_one_gpu:  # before torch and vLLM count the GPUs
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(int(args["model_instance_device_id"]))
        check_device(config, args)
        arguments = engine_arguments(folder, config)
        gpus = math.prod(arguments.get(name, 1) for name in GPU_COUNTS)
        if has_one_gpu and gpus > 1:
            raise ConfigError(
                f"{folder / SETTINGS} spreads the model over {gpus} GPUs: set KIND_MODEL in instance_group of "
                "config.pbtxt, so that one instance gets all of them"
            )
        arguments = adapter_arguments(folder) | arguments
        with one_load_at_a_time():
            if gpus == 1 and arguments.get(CACHE):
                arguments[SHARE] = memory_share(args["model_name"], folder, arguments)
            return VllmEngine(arguments | {"max_num_seqs": self.max_batch})

    def find_adapter(self, name: str) -> Any:
        return self.adapters.find(name)


class VllmAdapters(AdapterFiles):
    """The adapters as vLLM's requests name them."""

    def __init__(self, weights: Path, engine: VllmEngine) -> None:
        super().__init__(weights)
        self.engine, self.numbers = engine, itertools.count(1)

    def load(self, folder: Path) -> Any:
        """Let vLLM read the adapter now: a missing file would end the engine later."""
        from vllm.lora.request import LoRARequest

        number = next(self.numbers)  # one that replaces another has a name of its own, also for the prefix cache
        request = LoRARequest(f"{folder.name}@{number}", number, str(folder))
        try:
            self.engine.call(self.engine.engine.add_lora, request)
        except Exception as error:
            raise RuntimeError(
                f"vLLM {version()} cannot serve the adapter '{folder.name}': {reason(error)}. Load the model again, or "
                f"change max_lora_rank in {SETTINGS}"
            ) from error
        return request


def adapter_arguments(folder: Path) -> dict[str, Any]:
    """Return the defaults of the arguments for adapters: none without adapters, because they take memory."""
    configs = [json.loads((folder / FOLDER / name / CONFIG).read_text()) for name in adapter_names(folder)]
    if not configs:
        return {}
    rank = max(config["r"] for config in configs)
    return {
        "enable_lora": True,
        "max_loras": min(len(configs), MAX_ADAPTERS_IN_BATCH),
        "max_cpu_loras": KEPT_ADAPTERS,
        "max_lora_rank": next((size for size in RANKS if size >= rank), rank),
    }


def check_device(config: ModelConfig, args: InstanceArgs) -> None:
    """Raise if there is no GPU or no vLLM. Small images have no torch either, so the imports are in functions."""
    remedy = "`make models FORMAT=python` assembles the model for a CPU and for images without vLLM"
    if args["model_instance_kind"] == "CPU" or choice_parameter(config, "device", DEVICES, "auto") == "cpu":
        raise ConfigError(f"vLLM runs on a GPU, and this instance was placed on a CPU. {remedy}")
    try:
        import torch
        from vllm import LLMEngine  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"this server has no vLLM ({error}). `make up PROFILE=cuda` builds and starts an image that has it if "
            f"SYSTEMS names this system. {remedy}"
        ) from None
    if not torch.cuda.is_available():
        raise ConfigError(f"vLLM runs on a GPU, and the installed torch finds none. {remedy}")


def visible_gpu(device: int) -> str:
    """Return the GPU's name for CUDA. Triton counts only the GPUs that its own environment shows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[device].strip() if visible else str(device)


def engine_arguments(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Return model.json with the defaults filled in. Raise ConfigError for what vLLM or this backend does not take."""
    from vllm import AsyncEngineArgs

    from serving.engines.pretrained import chosen_dtype, name_of, stored_weights

    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold one JSON object")
    for name in settings:
        if name in SET_ELSEWHERE:
            raise ConfigError(f"{path} sets '{name}': remove it there, and set {SET_ELSEWHERE[name]}")
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(f"{path} sets {', '.join(map(repr, unknown))}, which vLLM {version()} does not know")
    for name in (CACHE, *GPU_COUNTS):
        if name in settings and type(settings[name]) is not int:
            raise ConfigError(f"{path} sets {name} to {settings[name]!r}: it must be a whole number")
    if SHARE in settings and CACHE in settings:
        raise ConfigError(f"{path} sets both {SHARE} and {CACHE}: remove one of the two")
    settings["model"] = model_folder(path, settings.get("model", "."))
    if draft := (settings.get(DRAFT) or {}).get("model"):
        settings[DRAFT] = settings[DRAFT] | {"model": model_folder(path, draft)}
    dtype = parameter(config, "dtype", "auto")
    if dtype != "auto" and settings.setdefault("dtype", dtype) != dtype:
        raise ConfigError(f"{path} sets dtype '{settings['dtype']}', and config.pbtxt '{dtype}': remove one of the two")
    if settings.get("dtype", "auto") == "auto":  # vLLM's auto would halve float32
        settings["dtype"] = name_of(chosen_dtype("auto", stored_weights(Path(settings["model"]))))
    return {name: value for name, value in DEFAULTS.items() if name != CACHE or SHARE not in settings} | settings


def model_folder(path: Path, model: object) -> str:
    folder = path.parent / str(model)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{path} sets model '{model}', and there is no {folder}/config.json: name a folder with the weights, "
            "or '.' for the one that model.json is in"
        )
    return str(folder)


def memory_share(name: str, folder: Path, arguments: dict[str, Any]) -> float:
    """Return the share of the GPU's memory that the model takes. Raise ConfigError if that much is not free."""
    import torch

    from serving.engines.pretrained import DTYPES, chosen_dtype, name_of, size, stored_weights, weight_files

    weights = Path(arguments["model"])
    stored = stored_weights(weights)
    if stored.keys() <= DTYPES.keys() and arguments["dtype"] in map(name_of, DTYPES.values()):
        loaded = size(stored, chosen_dtype(arguments["dtype"], stored))
    else:  # quantized
        loaded = sum(file.stat().st_size for file in weight_files(weights))
    if draft := (arguments.get(DRAFT) or {}).get("model"):
        loaded += sum(file.stat().st_size for file in weight_files(Path(draft)))
    adapters = (path.stat().st_size for path in folder.glob(f"{FOLDER}/*/{WEIGHTS}"))
    needed = loaded * HEADROOM + arguments[CACHE] + arguments.get("max_loras", 0) * max(adapters, default=0)
    free, total = torch.cuda.mem_get_info(0)
    if needed > free:
        raise ConfigError(
            f"{name} takes about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB of "
            f"memory are free: unload another model, or lower {CACHE} in {folder / SETTINGS}"
        )
    return float(needed / total)


class VllmEngine(TokenEngine):
    name = VLLM.name
    end_tokens: frozenset[int] = frozenset()

    def __init__(self, arguments: dict[str, Any]) -> None:
        # vLLM keeps its CUDA streams per thread: the thread that loads it makes all calls.
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self.keys: dict[int, Options] = {}  # of the running texts
        self.structured: set[int] = set()  # the texts with a structure
        self.counted: set[int] = set()  # the texts whose cached tokens are in `prefix_tokens`
        self.prefix_tokens = 0
        self.watcher = Watcher()
        draft = arguments.get(DRAFT)
        self.draft: str = draft.get("method", "draft") if draft else ""
        try:
            self.engine = self.call(self.load, arguments)
        except Exception as error:
            self.thread.shutdown(wait=False)
            raise ConfigError(
                f"vLLM {version()} cannot serve {arguments['model']}: {reason(error)}. Change {SETTINGS} there, or "
                "assemble the model with FORMAT=python"
            ) from error
        config = self.engine.model_config
        precision: str = config.quantization or str(config.dtype).removeprefix("torch.")
        self.precision = f"{precision}, {self.draft}" if self.draft else precision
        self.context: int = config.max_model_len

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return self.thread.submit(function, *arguments).result()

    def load(self, arguments: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs, LLMEngine

        return LLMEngine.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda *_: self.watcher])

    def add(self, key: int, tokens: list[int], options: Options, prompt: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if self.draft:
            for name, is_set in (("min_p", options.min_p and options.temperature), ("logit_bias", options.logit_bias)):
                if is_set:
                    raise BadRequest(
                        f"option '{name}': {VLLM.title} does not have it together with a draft (DRAFT)", name
                    )
        structure = options.structured_outputs
        sampling = SamplingParams(
            max_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=options.seed if options.temperature else None,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=dict(options.logit_bias) or None,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            min_tokens=options.min_tokens,
            ignore_eos=True,  # the backend and the engine must agree on which tokens end a text
            stop_token_ids=sorted({*options.stop_token_ids, *(() if options.ignore_eos else self.end_tokens)}),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(**{structure.form: structure.text}) if structure else None,
        )
        adapter = {"lora_request": options.adapter} if options.adapter else {}
        prompt = prompt or TokensPrompt(prompt_token_ids=tokens)
        self.call(partial(self.engine.add_request, **adapter), str(key), prompt, sampling)
        self.keys[key] = options
        if structure:
            self.structured.add(key)

    def cancel(self, key: int) -> None:
        if key in self.keys:
            self.forget(key)
            self.call(self.engine.abort_request, [str(key)])

    def step(self) -> list[NewTokens]:
        try:
            # vLLM prepares a step while the GPU computes the one before, so its first call has nothing to return.
            outputs = self.call(self.engine.step) or self.call(self.engine.step)
        except Exception as error:  # after any error vLLM's scheduler and its model no longer agree
            raise EngineFailed(f"vLLM failed: {reason(error)}") from error
        return [self.new_tokens(output) for output in outputs if int(output.request_id) in self.keys]

    def new_tokens(self, output: Any) -> NewTokens:
        key, (completion,) = int(output.request_id), output.outputs
        options = self.keys[key]
        if key not in self.counted:
            self.counted.add(key)
            self.prefix_tokens += output.num_cached_tokens or 0
        error: str | BadRequest = ""
        if output.finished and completion.finish_reason not in ("stop", "length"):
            # vLLM ends a text so if its grammar allows none of the tokens.
            is_dead_end = completion.finish_reason == "error" and key in self.structured
            error = (
                BadRequest(DEAD_END, "structured_outputs")
                if is_dead_end
                else f"vLLM ended the text: {completion.finish_reason}"
            )
        if output.finished:
            self.forget(key)
        logprobs = read_logprobs(completion.token_ids, completion.logprobs or (), options.logprobs or 0)
        prompt_logprobs = None
        if positions := output.prompt_logprobs:
            prompt_logprobs = read_logprobs(output.prompt_token_ids[1:], positions[1:], options.prompt_logprobs or 0)
        tokens = [] if error else list(completion.token_ids)
        cached = output.num_cached_tokens or 0
        return NewTokens(key, tokens, output.finished, error, logprobs, cached, prompt_logprobs)

    def forget(self, key: int) -> None:
        self.keys.pop(key, None)
        self.counted.discard(key)
        self.structured.discard(key)

    def stats(self) -> EngineStats:
        return EngineStats(self.watcher.cache_usage, self.prefix_tokens)

    def close(self) -> None:
        self.call(self.engine.engine_core.shutdown)
        self.thread.shutdown()


def read_logprobs(tokens: Sequence[int], positions: Sequence[Mapping[int, Any]], count: int) -> list[Logprobs]:
    """Return the logprobs of each token with this many alternatives, or nothing if vLLM reports none."""
    return [
        Logprobs(position[token].logprob, most_probable(position, count))
        for token, position in zip(tokens, positions, strict=False)
    ]


def most_probable(position: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """Return the first of the tokens for which vLLM reports logprobs; the new one is among them, whatever its rank."""
    pairs = [(token, own.logprob) for token, own in position.items()]
    return sorted(pairs, key=lambda pair: pair[1], reverse=True)[:count]


class Watcher:
    """Keeps the last figures of vLLM's scheduler. It has the methods of vLLM's StatLoggerBase."""

    cache_usage = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if scheduler_stats is not None:
            self.cache_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


def version() -> str:
    import vllm

    return str(vllm.__version__)


def reason(error: Exception) -> str:
    """Return the error's first sentence; vLLM's own lists of what it supports fill pages."""
    errors = getattr(error, "errors", None)  # pydantic's ValidationError adds lines about itself to its text
    text = errors()[0]["msg"].removeprefix("Value error, ") if callable(errors) else str(error)
    return " ".join(text.split()).split(". ")[0].rstrip(".")[:MAX_REASON] or type(error).__name__
