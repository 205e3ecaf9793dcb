"""Ways to make vectors of the same texts with the same weights, each called without a server.

A way of another library is missing where the library is not installed, and its row names the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from export.check import served
from export.checkpoint.silence import quiet

# Texts of a request, and requests of an execution, as with many clients.
TEXTS, REQUESTS = 8, 64
# The largest run of TEI: its default --max-batch-tokens.
TOKEN_BUDGET = 16384
BATCHES = (32, 128, 512)
VECTOR = "sentence_embedding"
Array = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """Texts and their tokens, in the order in which they arrive."""

    name: str
    texts: list[str]
    ids: list[list[int]]

    @cached_property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @cached_property
    def by_length(self) -> list[int]:
        return sorted(range(len(self.ids)), key=lambda i: -len(self.ids[i]))


@dataclass(frozen=True)
class Checkpoint:
    """A folder that sentence-transformers saved, and how to compute its vectors."""

    folder: Path
    pooling: str
    width: int
    device: str
    dtype: str  # as torch names it

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def network(self) -> Any:
        from transformers import AutoModel

        return AutoModel.from_pretrained(self.folder, dtype=self.torch_dtype).to(self.device).eval()


Way = Callable[[Load], Array]  # returns the vectors [texts, width]


class Missing(Exception):
    """Raised with the reason why a way cannot run here."""


def padded(ids: Sequence[list[int]]) -> dict[str, Array]:
    """Return input_ids and attention_mask [texts, length] of the longest text."""
    mask = np.arange(max(map(len, ids))) < np.array(list(map(len, ids)))[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = np.concatenate(ids)
    return {"input_ids": tokens, "attention_mask": mask.astype(np.int64)}


# --- this project -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def encoder(checkpoint: Checkpoint, engine: str) -> Iterator[Any]:
    """Load the checkpoint into the backend that serves it in Triton. Call this inside `served.python_backend`."""
    values = {"engine": engine, "dtype": checkpoint.dtype, "pooling": checkpoint.pooling}
    config = {
        "max_batch_size": REQUESTS,
        "input": [{"name": name, "data_type": "TYPE_INT64", "dims": [-1]} for name in ("input_ids", "attention_mask")],
        "output": [{"name": VECTOR, "data_type": "TYPE_FP32", "dims": [checkpoint.width]}],
        "parameters": {name: {"string_value": value} for name, value in values.items()},
    }
    backend = importlib.import_module("serving.encoders.on_torch").TextEncoder()
    backend.initialize(served.instance_args(checkpoint.folder.parent, config, "GPU" if is_cuda(checkpoint) else "CPU"))
    try:
        yield backend
    finally:
        backend.finalize()


@contextlib.contextmanager
def own(checkpoint: Checkpoint, engine: str) -> Iterator[Way]:
    """Answer requests as Triton passes them, with all that the backend does: packing, the model, scattering."""
    with encoder(checkpoint, engine) as backend:

        def way(load: Load) -> Array:
            requests = [served.InferenceRequest(padded(ids), [VECTOR]) for ids in in_chunks(load.ids, TEXTS)]
            responses = [
                response for group in in_chunks(requests, REQUESTS) for response in served.answers(backend, group)
            ]
            return np.concatenate([response.tensors[VECTOR] for response in responses])

        yield way


@contextlib.contextmanager
def token_budget(checkpoint: Checkpoint) -> Iterator[Way]:
    """Run texts without padding in the order of arrival, as many as fit into a budget, and wait for each run.

    That is the policy of Hugging Face's text-embeddings-inference, on this project's kernels.
    """
    with encoder(checkpoint, "torch-flat") as backend:

        def way(load: Load) -> Array:
            vectors, first, tokens = [], 0, 0
            for number, ids in enumerate([*load.ids, [0] * (TOKEN_BUDGET + 1)]):
                if number > first and tokens + len(ids) > TOKEN_BUDGET:
                    vectors += backend.encoder.run([VECTOR], padded(load.ids[first:number]))
                    first, tokens = number, 0
                tokens += len(ids)
            return np.concatenate(vectors)

        yield way


# --- others -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def padded_sorted(checkpoint: Checkpoint) -> Iterator[Way]:
    """Run texts sorted by length in padded batches, as sentence-transformers does, without its tokenizer."""
    graph = Graph(checkpoint.network(), checkpoint.pooling)

    def run(feed: dict[str, Array]) -> torch.Tensor:
        vectors: torch.Tensor = graph(
            **{name: torch.from_numpy(array).to(checkpoint.device) for name, array in feed.items()}
        )
        return vectors

    @torch.inference_mode()
    def way(load: Load, batch: int) -> Array:
        chunks = in_chunks(load.by_length, batch)
        vectors = torch.cat([run(padded([load.ids[i] for i in chunk])) for chunk in chunks]).float().cpu().numpy()
        return in_order(vectors, load)

    yield best_batch(way)


@contextlib.contextmanager
def sentence_transformers(checkpoint: Checkpoint) -> Iterator[Way]:
    """Let sentence-transformers encode the texts, its tokenizer included."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise Missing(f"sentence-transformers cannot be imported: {error}") from None
    options = {"dtype": checkpoint.torch_dtype}
    model = SentenceTransformer(str(checkpoint.folder), device=checkpoint.device, model_kwargs=options)
    yield best_batch(lambda load, batch: model.encode(load.texts, batch_size=batch, show_progress_bar=False))


@contextlib.contextmanager
def onnx_runtime(checkpoint: Checkpoint) -> Iterator[Way]:
    """Run a graph of the same weights on ONNX Runtime: in half precision on CUDA."""
    import onnxruntime as ort

    provider = "CUDAExecutionProvider" if is_cuda(checkpoint) else "CPUExecutionProvider"
    if provider not in ort.get_available_providers():
        raise Missing(f"onnxruntime {ort.__version__} has no {provider}: install onnxruntime-gpu")
    path = checkpoint.folder / "model.onnx"
    network = checkpoint.network().to(torch.float16 if is_cuda(checkpoint) else torch.float32)
    example = {
        name: torch.from_numpy(array).to(checkpoint.device) for name, array in padded([[1, 2, 3], [4, 5]]).items()
    }
    axes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in example}
    graph = Graph(network, checkpoint.pooling).eval()
    with quiet():
        torch.onnx.export(graph, (), path, kwargs=example, dynamic_shapes=axes, verbose=False)
    session = ort.InferenceSession(path, providers=[provider])

    def way(load: Load, batch: int) -> Array:
        chunks = in_chunks(load.by_length, batch)
        runs = [session.run(None, padded([load.ids[i] for i in chunk]))[0] for chunk in chunks]
        return in_order(np.concatenate(runs).astype(np.float32), load)

    yield best_batch(way)


class Graph(torch.nn.Module):
    """A network with the pooling: the vectors of padded texts."""

    def __init__(self, network: Any, pooling: str) -> None:
        super().__init__()
        self.network, self.pooling = network, pooling

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        counts = attention_mask.sum(1, keepdim=True)
        if self.pooling == "lasttoken":
            return tokens.gather(1, (counts - 1)[..., None].expand(-1, 1, tokens.shape[-1]))[:, 0]
        return (tokens * attention_mask[..., None]).sum(1) / counts


@contextlib.contextmanager
def vllm(checkpoint: Checkpoint) -> Iterator[Way]:
    """Let vLLM's pooling runner make vectors of tokens."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise Missing(f"vLLM cannot be imported: {error}") from None
    model = LLM(
        str(checkpoint.folder),
        runner="pooling",
        dtype=checkpoint.dtype,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
    )

    def way(load: Load) -> Array:
        answers = model.embed([{"prompt_token_ids": ids} for ids in load.ids], use_tqdm=False)
        return np.array([answer.outputs.embedding for answer in answers], np.float32)

    try:
        yield way
    finally:
        model.llm_engine.engine_core.shutdown()  # ends its process, which holds a third of the GPU


@contextlib.contextmanager
def infinity(checkpoint: Checkpoint) -> Iterator[Way]:
    """Let infinity's engine for PyTorch make vectors of texts, its tokenizer included."""
    try:
        from infinity_emb import EngineArgs
        from infinity_emb.sync_engine import SyncEngineArray
    except ImportError as error:
        raise Missing(f"infinity cannot be imported: {error}") from None
    options = {"engine": "torch", "dtype": checkpoint.dtype, "device": checkpoint.device, "batch_size": 512}
    engines = SyncEngineArray(
        [EngineArgs(str(checkpoint.folder), served_model_name="m", model_warmup=False, **options)]
    )
    try:
        yield lambda load: np.array(engines.embed(model="m", sentences=load.texts).result()[0], np.float32)
    finally:
        engines.stop()


OWN = ("torch-flat", "torch-padded")
# The first one's vectors are the measure of the others'.
WAYS: dict[str, Callable[[Checkpoint], contextlib.AbstractContextManager[Way]]] = {
    "padded, sorted": padded_sorted,
    **{engine: partial(own, engine=engine) for engine in OWN},
    "token budget": token_budget,
    "sentence-transformers": sentence_transformers,
    "ONNX Runtime": onnx_runtime,
    "vLLM": vllm,
    "infinity": infinity,
}


# --- shared -----------------------------------------------------------------------------------------------------------


def this_device() -> str:
    """Return the device on which this machine measures."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_cuda(checkpoint: Checkpoint) -> bool:
    return checkpoint.device == "cuda"


def in_chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def in_order(vectors: Array, load: Load) -> Array:
    """Return the vectors of texts sorted by length in the order of arrival."""
    answer = np.empty_like(vectors)
    answer[load.by_length] = vectors
    return answer


def best_batch(way: Callable[[Load, int], Array]) -> Way:
    """Give a way the size of a batch that is the fastest for each load."""
    chosen: dict[str, int] = {}

    def best(load: Load) -> Array:
        if load.name not in chosen:
            seconds = {}
            for batch in sorted({min(batch, len(load.ids)) for batch in BATCHES}) * 2:  # the first is slow
                start = time.perf_counter()
                way(load, batch)
                seconds[batch] = time.perf_counter() - start
            chosen[load.name] = min(seconds, key=seconds.__getitem__)
        return way(load, chosen[load.name])

    return best
