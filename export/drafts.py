"""Find what proposes the tokens of a language model, which then checks several at once: DRAFT."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from export.record import Record
from export.sources.source import Source, Weights, identity, named_source, open_weights, source_of
from triton_transformers.engines import TEXT_ENGINES, engine_of_format, titles
from triton_transformers.settings import Settings, UserError

# The fact of a record: the identity of the smaller model, or LOOKUP, with which the text itself proposes its tokens.
FACT = "draft"
LOOKUP, NONE = "lookup", "none"
TASK = "text-generation"
Draft = Source | str  # a smaller model, LOOKUP, or "" for none


def requested_draft(settings: Settings, record: Record | None) -> Draft:
    """Return what DRAFT names, or what the system has."""
    if settings.draft in (LOOKUP, NONE):
        return settings.draft.removeprefix(NONE)
    if settings.draft:
        return named_source(settings.draft)
    recorded: str = record.facts.get(FACT, "") if record else ""
    return recorded if recorded in ("", LOOKUP) else source_of(recorded) or ""


def is_recorded(draft: Draft, record: Record) -> bool:
    recorded = record.facts.get(FACT, "")
    return recorded == (draft if isinstance(draft, str) else identity(draft, recorded))


def check_draft(system: str, task: str, form: str) -> None:
    engine = engine_of_format(form)
    if task != TASK or not engine or not engine.has_drafts:
        able = titles([own for own in TEXT_ENGINES if own.has_drafts])
        raise UserError(f"DRAFT: {system} is {task} ({form}), and only {TASK} with {able} has drafts: set DRAFT=none")


@contextlib.contextmanager
def open_draft(draft: Draft, settings: Settings, repository: Path) -> Iterator[Weights | None]:
    if isinstance(draft, str):
        yield Weights(Path(), draft, draft) if draft else None
    else:
        with open_weights(draft, settings, repository) as weights:
            yield weights
