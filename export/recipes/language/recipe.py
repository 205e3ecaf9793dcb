"""Prepare causal language models: one Triton model that generates and streams text, and one that answers once."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.catalogue import FormatUnavailable, Job, Outcome
from export.check.served import backend_config, served_system
from export.checkpoint.checkpoint import INDEX, Checkpoint
from export.checkpoint.silence import quiet
from export.checkpoint.tasks import IMAGE_TEXT, task_of_architecture
from export.checkpoint.unsupported import read_parts
from export.drafts import LOOKUP
from export.recipes.config_writer import tensor, write_config
from export.recipes.language import openvino
from export.recipes.language.chat_templates import chat_parameters, chat_summary, write_chat_templates
from export.recipes.language.quantized import readable_weights
from export.record import is_in_git
from export.sources.source import Weights
from triton_transformers.corpus import MIXED
from triton_transformers.engines import OPENVINO, TRANSFORMERS, VLLM
from triton_transformers.model_config import CONFIGS
from triton_transformers.protocol import ENGINE
from triton_transformers.settings import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Option that a checkpoint's generation_config.json may set -> its maximum, of its type. Zero asks for nothing.
SAMPLING = {"temperature": 2.0, "top_p": 1.0, "top_k": 2**31 - 1, "min_p": 1.0}
PENALTY = "repetition_penalty"  # also changes which token is the most probable
# The settings of generation_config.json that only transformers follows -> the values with which they do nothing.
MISSING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "typical_p", "encoder_repetition_penalty", "guidance_scale"), (1, None)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0, None)
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), (0, None)),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), (None, [])),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
}
# Decoder.shares -> the texts that run at once.
SHARES = {
    "all": "",
    "equally long": "padding changes its texts, so only prompts of one length run together",
    "none": "a batch changes its texts, so each runs alone",
}
# The files beside the weights that transformers reads: configurations and tokenizers.
SUFFIXES = (".json", ".txt", ".model", ".spm", ".tiktoken", ".jinja")


def assemble(job: Job) -> Outcome:
    with readable_weights(job, other_files(job)) as (readable, outcome):
        return assemble_readable(readable).join(outcome)


def assemble_readable(job: Job) -> Outcome:
    tokenizer = load_tokenizer(job)
    served, streamed = job.folder / job.system, job.folder / f"{job.system}_stream"
    version = served / "1"
    for folder in (version, streamed / "1"):
        folder.mkdir(parents=True)
    outcome = Outcome(f"{streamed.name} streams the same texts; {chat_summary(tokenizer)}")
    asked = job.checkpoint.read("generation_config.json")
    sampling = read_sampling(asked)
    missing = {name: asked[name] for name, neutral in MISSING.items() if asked.get(name) not in neutral}
    if job.task == IMAGE_TEXT and job.format in OPENVINO.formats and PENALTY in sampling:
        missing[PENALTY] = sampling.pop(PENALTY)  # GenAI does not have it beside images
    if sampling:
        outcome = outcome.join(Outcome(f"clients of the gateway get {spelled(sampling)} by default"))
    if missing:
        outcome = outcome.join(Outcome(f"generation_config.json asks for {spelled(missing)}, which has no effect here"))
    outcome = write_model(job, tokenizer, version).join(outcome)
    write_chat_templates(tokenizer, version)
    if not is_in_git(job.system):
        parameters = {"sampling": json.dumps(sampling)} if sampling else {}
        write_configs(job, served, streamed, chat_parameters(tokenizer) | parameters)
    if job.format in TRANSFORMERS.formats and job.profile == "cpu":
        outcome = outcome.join(try_system(streamed))
    return outcome


def write_model(job: Job, tokenizer: PreTrainedTokenizerBase, version: Path) -> Outcome:
    """Fill the folder with what the engine of the format reads."""
    weights = job.checkpoint.weights()
    if job.format in TRANSFORMERS.formats:
        return copy_checkpoint(job, weights, tokenizer, version)
    limits = read_limits(job, tokenizer)
    if job.format in VLLM.formats:
        outcome = copy_checkpoint(job, weights, tokenizer, version)
        own: dict[str, Any] = {}
        if job.task == IMAGE_TEXT:
            own["skip_tokenizer_init"] = False  # vLLM's processors require the tokenizer
        if job.draft:
            own["speculative_config"] = add_draft(job, job.draft, tokenizer, limits, version)
        write_vllm_settings(version, outcome.facts["dtype"], job.trust_remote_code, **own)
    else:
        if job.task == IMAGE_TEXT:  # the server's processor reads them
            for file in other_files(job):
                if not file.name.endswith(INDEX):
                    shutil.copyfile(file, version / file.name)
        outcome = openvino.export(job, tokenizer, limits["context"], version)
        limits |= {name: outcome.facts[name] for name in ("weights", "dtype")}
        limits["context"] = outcome.facts.pop("context")
        if job.draft:
            add_draft(job, job.draft, tokenizer, limits, version)
            limits["draft"] = LOOKUP if job.draft.name == LOOKUP else "draft"
    (version / "limits.json").write_text(json.dumps(limits) + "\n")
    # The checkpoint's own file may lack what transformers adds, such as the token that begins a text.
    tokenizer.backend_tokenizer.save(str(version / "tokenizer.json"))
    return outcome


def try_system(model: Path) -> Outcome:
    """Load the model as the server does, which continues texts alone and together. Return what a client may notice.

    A machine that only assembles may have less memory than the server.
    """
    from serving.triton.memory import HEADROOM

    size = sum(
        file.stat().st_size for file in (model.parent / model.name.removesuffix("_stream")).rglob("*.safetensors")
    )
    if HEADROOM * size > openvino.free_memory():
        return Outcome("not tried, because it takes more memory than is free here")
    with quiet(), served_system(model.name, model.parent) as served:
        shares = served.models[model.name].backend.decoder.shares
    return Outcome(SHARES[shares])


def add_draft(
    job: Job, draft: Weights, tokenizer: PreTrainedTokenizerBase, limits: dict[str, Any], version: Path
) -> dict[str, Any]:
    """Put a draft model into place, and return vLLM's arguments. Raise UserError if it has other tokens."""
    if draft.name == LOOKUP:
        return {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 4}
    folder = version / "draft"
    folder.mkdir()
    own = replace(job, weights=draft.folder, movable=draft.movable, folder=folder, draft=None)
    with readable_weights(own, other_files(own)) as (own, _):
        weights, other = own.checkpoint.weights(), load_tokenizer(own)
        theirs = read_limits(own, other)
        # vLLM requires equal sizes. Sizes may exceed the number of tokens.
        fits = theirs["vocabulary"] == limits["vocabulary"] if job.format in VLLM.formats else True
        if other.get_vocab() != tokenizer.get_vocab() or not fits or theirs["vocabulary"] < len(tokenizer):
            raise UserError(
                f"DRAFT: {draft.name} has other tokens than {job.system}: name a smaller model of the same family"
            )
        if job.format in VLLM.formats:  # which proposes nothing beyond the draft's context
            copy_checkpoint(own, weights, other, folder)
        elif (theirs["context"] or math.inf) < (limits["context"] or math.inf):
            raise UserError(
                f"DRAFT: {draft.name} reads {theirs['context']:,} tokens and {job.system} more: name another model, or "
                "set DRAFT=lookup"
            )
        else:
            try:
                openvino.export_draft(own, other, theirs["context"], limits["vocabulary"], folder)
            except FormatUnavailable as error:
                raise UserError(f"DRAFT: {draft.name}: {error}") from error
    return {"method": "draft_model", "model": folder.name, "num_speculative_tokens": 4}


def copy_checkpoint(job: Job, weights: list[Path], tokenizer: PreTrainedTokenizerBase, version: Path) -> Outcome:
    for file in [*weights, *other_files(job)]:
        job.take(file, version)
    if tokenizer.is_fast and not (version / "tokenizer.json").exists():
        # The weights have only a tokenizer.model. Reading it takes sentencepiece, which the server lacks.
        tokenizer.save_pretrained(version)
    size = sum(file.stat().st_size for file in version.glob("*.safetensors"))
    copied = Checkpoint(job.system, version)
    usual = "bfloat16" if copied.quantization else "float32"
    dtype = copied.config.get("dtype") or copied.config.get("torch_dtype") or usual
    return Outcome(f"{size / 1e9:.2g} GB of weights", {"dtype": dtype})


def other_files(job: Job) -> list[Path]:
    suffixes = (*SUFFIXES, ".py") if job.trust_remote_code else SUFFIXES
    return sorted(file for file in job.weights.iterdir() if file.suffix in suffixes and file.is_file())


def load_tokenizer(job: Job) -> PreTrainedTokenizerBase:
    """Check that transformers can generate with the model, and return its tokenizer.

    Load its configuration but not its weights, which would take minutes and all the memory of the server.
    """
    import transformers

    config, tokenizer = read_parts(job.checkpoint, "tokenizer")
    if job.task == IMAGE_TEXT:
        return processor_tokenizer(job)
    architectures = config.architectures or []
    has_own_code = job.trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    reason = ""
    if architectures and all(task_of_architecture(name) != job.task for name in architectures):
        reason = f"{architectures[0]}, which has no language-model head"
    elif not has_own_code and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"{config.model_type}, which does not generate text"
    if reason:
        raise UserError(f"{job.weights} is a {reason}: choose a decoder such as Llama")
    return tokenizer


def processor_tokenizer(job: Job) -> PreTrainedTokenizerBase:
    """Check that the server can load the processor of images and texts, and return its tokenizer, with its template."""
    from serving.vision.chat import load_processor

    try:
        processor = load_processor(job.weights)
    except Exception as error:  # a broken checkpoint makes transformers raise anything
        raise UserError(f"{job.weights} has no processor of images and texts that loads: {error}") from error
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    return tokenizer


def write_configs(job: Job, served: Path, streamed: Path, chat: dict[str, str]) -> None:
    """Write the configurations of falcon7b and falcon7b_stream, which are in git, for this system."""
    about = f"Continues prompts, also those of {job.system}, and streams the pieces: docs/generation.md."
    own = {"trust_remote_code": 1} if job.trust_remote_code else {}
    for model, original, comment, parameters in (
        (served, "falcon7b", f"Sends its requests to {streamed.name}: docs/generation.md.", {ENGINE: streamed.name}),
        (streamed, "falcon7b_stream", about, own | {"weights": job.system}),
    ):
        config = backend_config(CONFIGS / original / "config.pbtxt") | {"name": model.name}
        if job.task == IMAGE_TEXT:
            config["input"].append(tensor("images", "STRING", [-1], optional=True))
        write_config(model, comment, config, {**parameters, **chat})


def read_sampling(asked: dict[str, Any]) -> dict[str, float]:
    """Return how generation_config.json asks to choose tokens, as vLLM reads it; how to sample only if it asks to."""
    sampling = {"temperature": 1.0} | asked if asked.get("do_sample") else {}
    options = {name: sampling[name] for name, most in SAMPLING.items() if is_number(sampling.get(name), most)}
    if is_number(asked.get(PENALTY), 100.0) and asked[PENALTY] != 1:
        options[PENALTY] = asked[PENALTY]
    return options


def is_number(value: Any, most: float) -> bool:
    """Return whether a value is a number above 0, whole if `most` is."""
    return type(value) in (int, type(most)) and 0 < value <= most


def spelled(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" if isinstance(value, int | float) else name for name, value in options.items())


# --- the files that a server without transformers reads beside tokenizer.json -----------------------------------------


def read_limits(job: Job, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    import transformers

    check_tokenizer(tokenizer)
    options = {"local_files_only": True, "trust_remote_code": job.trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(job.weights, **options)
    text_config = config.get_text_config(decoder=True)
    has_own = (job.weights / "generation_config.json").is_file()
    generation = transformers.GenerationConfig.from_pretrained(job.weights) if has_own else text_config
    ends = generation.eos_token_id
    context = getattr(text_config, "max_position_embeddings", None) or 0
    starts = (tokenizer.bos_token_id, generation.bos_token_id, tokenizer.eos_token_id)
    return {
        "vocabulary": text_config.vocab_size,
        "context": context if context > 0 else None,  # XLNet's is -1
        "end_tokens": sorted(set(ends if isinstance(ends, list) else [ends]) - {None}),
        # The tokens of an empty prompt.
        "start": tokenizer("").input_ids or [token for token in starts if token is not None][:1],
        # Chat templates use these names, such as bos_token.
        "special_tokens": dict(tokenizer.special_tokens_map),
        "weights": "",  # the precision in which the weights are stored, if the export chose it
    }


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise FormatUnavailable if tokenizer.json alone gives other tokens than transformers."""
    if not tokenizer.is_fast:
        raise FormatUnavailable(f"its tokenizer, {type(tokenizer).__name__}, has no tokenizer.json")
    for text in MIXED.texts:
        if tokenizer.backend_tokenizer.encode(text).ids != tokenizer(text).input_ids:
            raise FormatUnavailable("its tokenizer.json alone gives other tokens than transformers")


# --- the arguments of vLLM's engine (docs/generation.md) --------------------------------------------------------------

(SETTINGS,) = VLLM.files
# The memory for the keys and values of all running texts. With grouped attention, as in Llama 3 8B and Mistral 7B, it
# holds 32 texts of 1,000 tokens.
CACHE_BYTES = 4 * 2**30


def write_vllm_settings(folder: Path, dtype: str, trust_remote_code: bool = False, **own: Any) -> None:
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
        **own,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
