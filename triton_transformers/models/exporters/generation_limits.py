"""Write what a server without transformers reads beside a language model's tokenizer.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_transformers.corpus import MIXED
from triton_transformers.models.catalogue import FormatUnavailable, Job

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Limits:
    vocabulary: int
    context: int | None
    end_tokens: list[int]
    start: list[int]  # the tokens of an empty prompt
    special_tokens: dict[str, str | list[str]]  # by the names that chat templates use, such as bos_token
    weights: str = ""  # the precision in which the weights are stored, if the export chose it

    @classmethod
    def from_job(cls, job: Job, tokenizer: PreTrainedTokenizerBase) -> Limits:
        import transformers

        check_tokenizer(tokenizer)
        options = {"local_files_only": True, "trust_remote_code": job.trust_remote_code}
        config = transformers.AutoConfig.from_pretrained(job.weights, **options)
        text_config = config.get_text_config(decoder=True)
        has_own = (job.weights / "generation_config.json").is_file()
        generation = transformers.GenerationConfig.from_pretrained(job.weights) if has_own else text_config
        ends = generation.eos_token_id
        starts = (tokenizer.bos_token_id, generation.bos_token_id, tokenizer.eos_token_id)
        return cls(
            vocabulary=text_config.vocab_size,
            context=getattr(text_config, "max_position_embeddings", None),
            end_tokens=sorted(set(ends if isinstance(ends, list) else [ends]) - {None}),
            start=tokenizer("").input_ids or [token for token in starts if token is not None][:1],
            special_tokens=dict(tokenizer.special_tokens_map),
        )

    def write(self, folder: Path) -> None:
        (folder / "limits.json").write_text(json.dumps(asdict(self)) + "\n")


def write_chat_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the template that transformers would use, if there is one. A checkpoint may have several, by name."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return
    (folder / "chat_template.jinja").write_text(template)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise FormatUnavailable if tokenizer.json alone gives other tokens than transformers."""
    if not tokenizer.is_fast:
        raise FormatUnavailable(f"its tokenizer, {type(tokenizer).__name__}, has no tokenizer.json")
    for text in MIXED.texts:
        if tokenizer.backend_tokenizer.encode(text).ids != tokenizer(text).input_ids:
            raise FormatUnavailable("its tokenizer.json alone gives other tokens than transformers")
