"""Read quantized language models: vLLM serves them as they are stored, the other engines in 16 bits."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from export.catalogue import Job, Outcome
from export.checkpoint.checkpoint import INDEX
from export.checkpoint.silence import quiet, silent
from export.recipes.language.openvino import free_memory
from export.sources.source import Weights, gguf_files
from triton_transformers.cli import err
from triton_transformers.engines import VLLM
from triton_transformers.settings import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

# The methods that transformers dequantizes on a CPU -> its class for their settings.
READABLE = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
MEMORY = 2.5  # bytes for each weight while a model is dequantized


@contextlib.contextmanager
def readable_weights(job: Job, others: list[Path]) -> Iterator[tuple[Job, Outcome]]:
    """Yield the job with weights that its format reads, and a line that reports a conversion.

    `others` are the files beside the weights.
    """
    method = job.checkpoint.quantization
    if not method or job.format in VLLM.formats:
        yield job, Outcome()
        return
    if method not in READABLE:
        raise UserError(
            f"{job.weights} is quantized ({method}), which only vLLM reads: set PROFILE=cuda or FORMAT=vllm, or name "
            "the model that it was made from"
        )
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        dequantize(job.weights, method, Path(folder))
        for file in others:
            if not (Path(folder) / file.name).exists() and file.name != INDEX:
                shutil.copyfile(file, Path(folder) / file.name)
        yield (
            replace(job, weights=Path(folder), movable=True),
            Outcome(f"weights in 16 bits, dequantized from {method}"),
        )


def dequantize(weights: Path, method: str, folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(weights, local_files_only=True)
    settings: Any = getattr(transformers, READABLE[method])(dequantize=True)
    instead = "PROFILE=cuda serves it as it is"
    model = load_in_16_bits(weights, method, instead, config, quantization_config=settings)
    with quiet():
        model.save_pretrained(folder)


def load_in_16_bits(weights: Path, method: str, instead: str, config: PreTrainedConfig, **options: Any) -> Any:
    """Load with transformers' from_pretrained and these options. Raise if the memory is too small."""
    import torch
    import transformers

    with quiet(), torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    needed, free = MEMORY * size, free_memory()
    if needed > free:
        raise UserError(
            f"{weights} is quantized ({method}), and in 16 bits it takes about {needed / 1e9:.1f} GB of memory, of "
            f"which {free / 1e9:.1f} GB are free: {instead}"
        )
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            weights, config=config, dtype=torch.bfloat16, local_files_only=True, **options
        )


# --- GGUF, the format of llama.cpp: a checkpoint in 16 bits, which every engine reads ---------------------------------

INSTEAD = "answers would be wrong without notice: name the model that it was converted from"
# Keys of llama.cpp whose last part is not the name of the key in config.json -> that name.
CONFIG_NAMES = {"rope.freq_base": "rope_theta", "rope.scaling.type": "rope_type"}
# Keys that transformers need not read: sizes, which the tensors have too, and how their rows were ordered.
UNUSED = ("_length", "vocab_size", "tensor_data_layout")
# Names of llama.cpp for the ways to split texts that transformers does not know. It chooses rightly for the first ones.
PLAIN = ("gpt-2", "phi-2", "mpt", "olmo")
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r")  # like the first ones, and each digit is a token
VOCABULARY = 1000  # a longer list of metadata is that of the tokens, or of their merges
# Llama 3.1 to 3.3 stretch their positions by these; GGUF has the result, and not the settings.
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@contextlib.contextmanager
def as_checkpoint(weights: Weights, folder: Path) -> Iterator[tuple[Weights, Outcome]]:
    """Yield the weights as save_pretrained writes them, beside the folder, and a line about a conversion from GGUF."""
    if not (files := gguf_files(weights.folder)):
        yield weights, Outcome()
        return
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as checkpoint:
        types = convert(files[0], Path(checkpoint))
        line = f"weights in 16 bits, dequantized from GGUF ({', '.join(types)})"
        yield replace(weights, folder=Path(checkpoint), movable=True), Outcome(line)


def convert(file: Path, folder: Path) -> list[str]:
    """Save a checkpoint of the file's model, and return the types of its weights."""
    import gguf
    import transformers

    err.step(f"reading {file.name}")
    try:
        reader = gguf.GGUFReader(str(file))
        keys = {name: field.contents() for name, field in reader.fields.items() if len(field.data) < VOCABULARY}
        architecture = keys["general.architecture"]
    except Exception as error:  # the package raises anything at a file that is cut
        raise UserError(f"{file} is damaged, or no GGUF: download it again") from error
    try:
        # transformers draws a bar. It would read the file once more for each of the three, 6 s of CPU time each, and
        # list the names of all tensors for each module.
        names = functools.cache(gguf.get_tensor_name_map)
        with silent(), patch.multiple("gguf", GGUFReader=lambda _: reader, get_tensor_name_map=names):
            config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            if keys.get("tokenizer.ggml.pre") in DIGITS_APART:
                tokenizer.backend_tokenizer.pre_tokenizer = digits_apart()
            config.__dict__.pop("_model_name_or_path", None)  # only a name, and no key of config.json
            check_keys(file, keys, config)
            has_read_factors = read_rope_factors(reader, config)
            settings: Any = transformers.GgufConfig(dequantize=True)
            options = {"gguf_file": file.name, "quantization_config": settings, "output_loading_info": True}
            model, report = load_in_16_bits(file.parent, "GGUF", "choose a smaller model", config, **options)
    except UserError:
        raise
    except Exception as error:  # transformers raises anything for a model that it does not know
        raise UserError(
            f"{file} is a {architecture}, and transformers {transformers.__version__} does not read it as a language "
            f"model ({type(error).__name__}): name the model that it was converted from"
        ) from error
    if any(report.values()) or count_stored(reader, config, has_read_factors) != count(model):
        raise UserError(
            f"{file} has other tensors than transformers reads for a {config.model_type}, so that {INSTEAD}"
        )
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return sorted({tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1})


def digits_apart() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def check_keys(file: Path, keys: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise if transformers ignores a setting of the network, or the way in which texts are split."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture = keys["general.architecture"]
    own = {name.removeprefix(f"{architecture}."): name for name in keys if name.startswith(f"{architecture}.")}
    kind = config.model_type.removesuffix("_text")
    read: Any = own if architecture in GGUF_CONFIG_ARCHS else GGUF_CONFIG_MAPPING[kind]
    settings = flat(config.to_dict())
    unread = [
        name
        for key, name in own.items()
        if key not in read
        and not key.endswith(UNUSED)
        and not is_same(settings.get(CONFIG_NAMES.get(key, key.rpartition(".")[2])), keys[name])
    ]
    split = keys.get("tokenizer.ggml.pre")
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *PLAIN, *DIGITS_APART)
    if keys.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        unread.append(f"tokenizer.ggml.pre ({split})")
    if unread:
        raise UserError(f"{file} sets {', '.join(unread)}, which transformers does not read, so that {INSTEAD}")


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with those of nested objects, such as rope_parameters."""
    nested = [flat(value) for value in settings.values() if isinstance(value, dict)]
    return {key: value for group in [settings, *nested] for key, value in group.items()}


def is_same(setting: object, value: object) -> bool:
    if isinstance(setting, int | float) and isinstance(value, int | float):
        return math.isclose(setting, value, rel_tol=1e-6)  # GGUF has floats of 32 bits
    return setting == value


def read_rope_factors(reader: GGUFReader, config: PreTrainedConfig) -> bool:
    """Return whether the file has the factors of Llama 3.1 to 3.3, and set that RoPE in the configuration."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = next((torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is None or config.model_type != "llama":
        return False
    before = config.rope_parameters
    angles = before["rope_theta"] ** (-torch.arange(len(factors)) / len(factors))
    config.rope_parameters = before | LLAMA3 | {"rope_type": "llama3", "factor": factors.max().item()}
    if torch.allclose(ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0], angles / factors, rtol=1e-4, atol=0):
        return True
    config.rope_parameters = before
    return False


def count_stored(reader: GGUFReader, config: PreTrainedConfig, has_read_factors: bool) -> int:
    """Return how many numbers of the file a model has to have."""
    ignored = {
        ROPE_FACTORS: has_read_factors,
        "output.weight": config.tie_word_embeddings,  # Falcon's file has a copy
    }
    # Layers beyond the last one predict several tokens at once, which is not served.
    return sum(
        int(tensor.n_elements)
        for tensor in reader.tensors
        if not ignored.get(tensor.name)
        and not (tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) >= config.num_hidden_layers)
    )


def count(model: PreTrainedModel) -> int:
    """Return how many numbers the model has. Tied weights count once."""
    return sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
