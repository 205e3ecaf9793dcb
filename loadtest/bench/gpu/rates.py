"""Tokens per second of text encoders on PyTorch, without a server, beside other ways to run the same weights.

Each figure is also a share of the rate that the same machine reaches in the matrix products of the model alone. Without
a GPU, the same code runs models of one layer on the CPU, so that it is tested there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from export.check import served
from loadtest.bench.comparisons import fetch_embedding
from loadtest.bench.gpu.ways import OWN, TOKEN_BUDGET, WAYS, Checkpoint, Load, Missing, Way, this_device
from loadtest.bench.tables import in_turns, spread
from loadtest.server.own_stack import folder
from triton_transformers.answers import LIMITS, smallest_cosine
from triton_transformers.cli import err, out, print_table, run
from triton_transformers.corpus import MIXED

LENGTHS = (20, 50, 128, 512)
WORD = "the"  # one token
ROUNDS = 5
# The tokens of a load: about a second of the largest model on an H100, or of one layer on a core.
GPU_TOKENS, CPU_TOKENS = 1 << 18, 1 << 9


def bert(**sizes: Any) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes))


def qwen3(**sizes: Any) -> Any:
    """Return a model of the size of Qwen3-Embedding-0.6B."""
    from transformers import Qwen3Config, Qwen3Model

    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    # The tokenizer is that of MiniLM: the rest of Qwen3's vocabulary costs memory and no time.
    return Qwen3Model(Qwen3Config(**shape | heads | {"vocab_size": 30522} | sizes))


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
# The model -> its network with random weights (None: the catalogue's weights), and its pooling.
MODELS: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "MiniLM": (None, "mean"),
    "BERT-base": (bert, "mean"),
    "BERT-large": (lambda **sizes: bert(**LARGE | sizes), "mean"),
    "Qwen3-0.6B": (qwen3, "lasttoken"),
}


def main(reports: Path) -> None:
    """Measure each model whose figures this folder lacks, and print the figures of all."""
    reports.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        path = reports / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(measure(name), indent=2) + "\n")
        show(json.loads(path.read_text()))


def measure(name: str) -> dict[str, Any]:
    """Return the figures of a model: for each load and way, the tokens per second of each round."""
    device = this_device()
    rounds = ROUNDS if device == "cuda" else 1
    with folder() as work:
        with err.status(f"{name}: weights"):
            checkpoint = save(name, work / name / "1", device)
            loads = all_loads(checkpoint.folder, GPU_TOKENS if device == "cuda" else CPU_TOKENS)
            seconds = matmul_seconds(checkpoint)
        figures: dict[str, dict[str, list[float]]] = {load.name: {} for load in loads}
        with served.python_backend(measures_costs=True), contextlib.ExitStack() as stack:
            ways, cosines, missing = start(stack, checkpoint, loads)
            for load in loads:
                for way in in_turns(ways, rounds, f"{name}, {load.name}"):
                    begun = time.perf_counter()
                    ways[way](load)
                    figures[load.name].setdefault(way, []).append(load.tokens / (time.perf_counter() - begun))
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "dtype": checkpoint.dtype,
        "torch": torch.__version__,
        "matmul_tokens_per_second": 1 / seconds,
        "mean_length": {load.name: load.tokens / len(load.ids) for load in loads},
        "tokens_per_second": figures,
        "cosine": cosines,
        "missing": missing,
    }


def start(
    stack: contextlib.ExitStack, checkpoint: Checkpoint, loads: list[Load]
) -> tuple[dict[str, Way], dict[str, float], dict[str, str]]:
    """Start each way and let it run each load once.

    Return those that answer alike, the smallest cosine of each with `padded, sorted`, and why the others do not run.
    """
    ways: dict[str, Way] = {}
    cosines: dict[str, float] = {}
    missing: dict[str, str] = {}
    expected: dict[str, Any] = {}
    for name in WAYS:
        try:
            with err.status(f"starting {name}"):
                way = stack.enter_context(WAYS[name](checkpoint))
                vectors = {load.name: way(load) for load in loads}
        except Missing as error:
            missing[name] = str(error)
            continue
        except Exception as error:  # another library's
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        expected = expected or vectors
        cosine = min(smallest_cosine(expected[load.name], vectors[load.name]) for load in loads)
        if not LIMITS["gpu", ""].allow(cosine, 0):
            missing[name] = f"its vectors differ: cosine {cosine:.4f}"
        else:
            ways[name], cosines[name] = way, cosine
    return ways, cosines, missing


# --- what is run ------------------------------------------------------------------------------------------------------


def save(name: str, weights: Path, device: str) -> Checkpoint:
    """Save a model with the tokenizer of MiniLM, as sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoModel, AutoTokenizer, logging

    logging.disable_progress_bar()
    source, (make, pooling) = fetch_embedding(), MODELS[name]
    torch.manual_seed(1)
    sizes = {} if device == "cuda" else {"num_hidden_layers": 1}
    network = make(**sizes) if make else AutoModel.from_pretrained(source, local_files_only=True)
    dtype = "bfloat16" if device == "cuda" else "float32"
    plain = weights / "plain"
    network.to(getattr(torch, dtype)).save_pretrained(plain)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(plain)
    transformer = modules.Transformer(str(plain), max_seq_length=max(LENGTHS))
    width = transformer.get_embedding_dimension()
    layers = [transformer, modules.Pooling(width, pooling_mode=pooling)]
    SentenceTransformer(modules=layers, device="cpu").save(str(weights))
    return Checkpoint(weights, pooling, width, device, dtype)


def all_loads(weights: Path, tokens: int) -> list[Load]:
    """Return a load for each length, and the committed texts in random order, each of so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    kinds = {str(length): [" ".join([WORD] * (length - 2))] for length in LENGTHS} | {"mix": MIXED.texts}
    return [load_of(name, texts, tokens, tokenizer) for name, texts in kinds.items()]


def load_of(name: str, texts: Sequence[str], tokens: int, tokenizer: Any) -> Load:
    known = dict(zip(texts, tokenizer(list(texts), truncation=True, max_length=max(LENGTHS)).input_ids, strict=True))
    mean = statistics.mean(map(len, known.values()))
    drawn = random.Random(0).choices(list(texts), k=math.ceil(tokens / mean))
    return Load(name, drawn, [known[text] for text in drawn])


@torch.inference_mode()
def matmul_seconds(checkpoint: Checkpoint) -> float:
    """Return the seconds per token of the model's matrix products alone, each at its own shape."""
    layers = [layer for name, layer in checkpoint.network().named_modules() if "pooler" not in name]
    shapes = Counter(layer.weight.shape for layer in layers if isinstance(layer, torch.nn.Linear))
    rows, total = TOKEN_BUDGET if checkpoint.device == "cuda" else CPU_TOKENS, 0.0
    for (features, width), count in shapes.items():
        options: dict[str, Any] = {"device": checkpoint.device, "dtype": checkpoint.torch_dtype}
        tokens, weight = torch.randn(rows, width, **options), torch.randn(features, width, **options)
        taken = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(count):
                product = torch.nn.functional.linear(tokens, weight)
            product[0, 0].item()  # waits for the GPU
            taken.append(time.perf_counter() - start)
        total += statistics.median(taken)
    return total / rows


# --- the table --------------------------------------------------------------------------------------------------------


def show(report: dict[str, Any]) -> None:
    peak = report["matmul_tokens_per_second"]
    rows = []
    for load, by_way in report["tokens_per_second"].items():
        medians = {way: statistics.median(by_way[way]) for way in WAYS if way in by_way}
        best_other = max(rate for way, rate in medians.items() if way not in OWN)
        for way, rate in medians.items():
            rates = by_way[way]
            texts = rate / report["mean_length"][load]
            ratio = f"{rate / best_other:.2f}" if way in OWN else ""
            figures = [spread([one / 1e3 for one in rates]), f"{texts:.0f}", f"{rate / peak:.2f}", ratio]
            rows.append([load, way, *figures, f"{report['cosine'][way]:.4f}"])
    out.print(f"\n{report['model']}, {report['dtype']}, {report['device']}, PyTorch {report['torch']}")
    columns = ("tokens per text", "way", "1,000 tokens/s", "texts/s", "share", "/ best other", "cosine")
    print_table(columns, rows, text_columns=("tokens per text", "way"))
    for way, reason in report["missing"].items():
        out.print(f"{way}: not measured: {reason}", markup=False)
    out.print(
        f"medians of interleaved rounds (smallest to largest). share: of the {peak:,.0f} tokens per second of "
        "the model's matrix products alone, in the same run"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.rates")
    parser.add_argument("reports", type=Path)
    run(lambda: main(parser.parse_args().reports))
