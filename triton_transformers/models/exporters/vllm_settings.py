"""Write model.json, the arguments of vLLM's engine, beside the weights that vLLM serves (docs/generation.md)."""

from __future__ import annotations

import json
from pathlib import Path

SETTINGS = "model.json"
# The memory for the keys and values of all running texts. With grouped attention, as in Llama 3 8B and Mistral 7B, it
# holds 32 texts of 1,000 tokens.
CACHE_BYTES = 4 * 2**30


def write_vllm_settings(folder: Path, dtype: str, trust_remote_code: bool = False) -> None:
    """Write model.json into a folder with weights of this dtype; NVIDIA's vLLM backend reads the same arguments."""
    settings = {
        "model": ".",  # the backend reads it relative to model.json, so that the repository can move
        "dtype": dtype,
        "max_model_len": -1,  # the model's context, or what fits into the cache
        "kv_cache_memory_bytes": CACHE_BYTES,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "trust_remote_code": trust_remote_code,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
