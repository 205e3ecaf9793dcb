"""Prepare causal language models: one Triton model that generates text, and one that streams from its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from triton_transformers.kinds import TOKENIZED
from triton_transformers.models.catalogue import SYSTEMS, Job, Outcome
from triton_transformers.models.exporters import openvino_export
from triton_transformers.models.exporters.config_writer import Config, tensor, write_config
from triton_transformers.models.exporters.generation_limits import Limits, write_chat_template
from triton_transformers.models.exporters.quantized import readable_weights
from triton_transformers.models.exporters.vllm_settings import write_vllm_settings
from triton_transformers.models.refusals import check_weights, quantization, read_parts
from triton_transformers.models.tasks import task_of_architecture
from triton_transformers.settings import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The files beside the weights that transformers reads: configurations and tokenizers.
SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja")


def assemble(job: Job) -> Outcome:
    with readable_weights(job, other_files(job)) as (readable, outcome):
        return assemble_readable(readable).join(outcome)


def assemble_readable(job: Job) -> Outcome:
    weights = check_weights(str(job.weights), job.weights)
    tokenizer = load_tokenizer(job)
    served, streamed = job.folder / job.system, job.folder / f"{job.system}_stream"
    version = served / "1"
    for folder in (version, streamed / "1"):
        folder.mkdir(parents=True)
    outcome = Outcome(f"{streamed.name} streams from the same files")
    if job.format == "python":
        outcome = copy_checkpoint(job, weights, tokenizer, version).join(outcome)
    else:
        limits = Limits.from_job(job, tokenizer)
        if job.format == "vllm":
            outcome = copy_checkpoint(job, weights, tokenizer, version).join(outcome)
            write_vllm_settings(version, outcome.facts["dtype"], job.trust_remote_code)
        else:
            outcome = openvino_export.export(job, tokenizer, limits.context, version).join(outcome)
            facts = outcome.facts
            limits = replace(limits, weights=facts["weights"], context=facts.pop("context"))
        limits.write(version)
        write_chat_template(tokenizer, version)
        # The checkpoint's own file may lack what transformers adds, such as the token that begins a text.
        tokenizer.backend_tokenizer.save(str(version / "tokenizer.json"))
    if job.system not in SYSTEMS:
        write_configs(job, served, streamed)
    return outcome


def copy_checkpoint(job: Job, weights: list[Path], tokenizer: PreTrainedTokenizerBase, version: Path) -> Outcome:
    for file in [*weights, *other_files(job)]:
        job.take(file, version)
    if tokenizer.is_fast and not (version / "tokenizer.json").exists():
        # The weights have only a tokenizer.model. Reading it takes sentencepiece, which the server lacks.
        tokenizer.save_pretrained(version)
    size = sum(file.stat().st_size for file in version.glob("*.safetensors"))
    config = json.loads((version / "config.json").read_text())
    dtype = config.get("dtype") or config.get("torch_dtype") or ("bfloat16" if quantization(config) else "float32")
    return Outcome(f"{size / 1e9:.2g} GB of weights", {"dtype": dtype})


def other_files(job: Job) -> list[Path]:
    suffixes = (*SUFFIXES, ".py") if job.trust_remote_code else SUFFIXES
    return sorted(file for file in job.weights.iterdir() if file.suffix in suffixes and file.is_file())


def load_tokenizer(job: Job) -> PreTrainedTokenizerBase:
    """Check that transformers can generate with the model, and return its tokenizer.

    Load its configuration but not its weights, which would take minutes and all the memory of the server.
    """
    import transformers

    config, tokenizer = read_parts(str(job.weights), job.weights, "tokenizer", job.trust_remote_code)
    architectures = config.architectures or []
    if architectures and all(task_of_architecture(name) != job.task for name in architectures):
        raise UserError(
            f"{job.weights} is a {architectures[0]}, which has no language-model head: choose a decoder such as Llama"
        )
    has_own_code = job.trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if not has_own_code and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{job.weights} is a {config.model_type}, which does not generate text: choose a decoder such as Llama"
        )
    return tokenizer


def write_configs(job: Job, served: Path, streamed: Path) -> None:
    """Write the same configurations as those of falcon7b and falcon7b_stream in git, which have comments."""
    config: Config = {
        "backend": "generation",
        "input": [
            tensor("prompt", "STRING", [-1], optional=True),
            tensor("text_input", "STRING", [-1], optional=True),
            tensor("messages", "STRING", [1], optional=True),
            tensor("max_new_tokens", "INT32", [1], optional=True),
            tensor("temperature", "FP32", [1], optional=True),
            tensor("top_p", "FP32", [1], optional=True),
            tensor("seed", "INT64", [1], optional=True),
            tensor("stop", "STRING", [-1], optional=True),
            tensor("cancel", "STRING", [1], optional=True),
            tensor("stream", "BOOL", [1], optional=True),
            tensor("exclude_input_in_output", "BOOL", [1], optional=True),
            tensor("sampling_parameters", "STRING", [1], optional=True),
        ],
        "output": [
            tensor("text", "STRING", [-1]),
            tensor("text_output", "STRING", [-1]),
            tensor("finish_reason", "STRING", [-1]),
            tensor("num_input_tokens", "UINT32", [-1]),
            tensor("num_output_tokens", "UINT32", [-1]),
            tensor(TOKENIZED, "STRING", [-1]),
        ],
        "instance_group": [{"count": 1, "kind": "KIND_AUTO"}],
    }
    parameters = {"max_new_tokens": 64, "max_batch": 32, "dtype": "auto", "device": "auto"}
    if job.trust_remote_code:
        parameters["trust_remote_code"] = 1
    write_config(served, "Continues a prompt: docs/generation.md.", config, parameters)
    config["model_transaction_policy"] = {"decoupled": True}
    parameters["weights"] = job.system
    write_config(streamed, f"Continues a prompt like {job.system}, in pieces: docs/generation.md.", config, parameters)
