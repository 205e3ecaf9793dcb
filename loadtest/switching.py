"""Switching dynamic batching on the running server, and putting everything back, whatever happens in between.

The switch is Triton's model control: each composing model is loaded with its own configuration, with or without
`dynamic_batching`. What was there before is written down first, so that even a killed comparison is undone by the next.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.common.files import write_atomically
from scripts.common.settings import UserError
from scripts.common.triton import Triton, TritonError

MODES = ("none", "dynamic")
# How long a server that died gets to come back and be put right.
RESTART_S = 60.0


@dataclass(frozen=True)
class Switched:
    """One model of the system: its configuration as found, and in each mode."""

    name: str
    original: dict
    modes: dict[str, dict]
    batches: bool  # False for the ensemble itself, which only has its largest batch changed


def composing(triton: Triton, system: str) -> dict[str, dict]:
    try:
        return triton.composing(system)
    except TritonError as error:
        if error.status is None:
            raise UserError(f"{error}: `make up` starts the stack") from None
        raise UserError(f"'{system}' is not served by {triton.url}: {error}") from None


def plan(configs: dict[str, dict], max_batch: int | None) -> list[Switched]:
    """What each mode posts, model by model; the ensemble first, for it may not batch more than its steps do."""
    switched = []
    for name, original in configs.items():
        ensemble = "ensemble_scheduling" in original
        base = copy.deepcopy(original)
        if max_batch and base["max_batch_size"] > 0:
            if max_batch > base["max_batch_size"]:
                raise UserError(
                    f"MAX_BATCH={max_batch}: '{name}' takes {base['max_batch_size']}; raise that in its config.pbtxt"
                )
            base["max_batch_size"] = max_batch
        if ensemble:
            if base != original:
                switched.append(Switched(name, original, dict.fromkeys(MODES, base), batches=False))
            continue
        if base["max_batch_size"] < 1 or "sequence_batching" in base:
            continue
        dynamic = copy.deepcopy(base)
        batcher = dynamic.setdefault("dynamic_batching", {})
        # Triton fills the largest batch in as the preferred one, and refuses one above max_batch_size.
        preferred = [size for size in batcher.get("preferred_batch_size", []) if size <= base["max_batch_size"]]
        batcher["preferred_batch_size"] = preferred
        none = {key: value for key, value in base.items() if key != "dynamic_batching"}
        switched.append(Switched(name, original, {"none": none, "dynamic": dynamic}, batches=True))
    if not any(model.batches and model.modes["dynamic"]["max_batch_size"] > 1 for model in switched):
        sizes = ", ".join(f"{name} {config['max_batch_size']}" for name, config in configs.items())
        raise UserError(f"nothing here can batch: no model has a max_batch_size above 1 ({sizes})")
    return switched


class Switch:
    """The server's batching mode. Use as a context: leaving it restores the original configurations."""

    def __init__(
        self, triton: Triton, models: list[Switched], folder: Path, on_restore: Callable[[], None] = lambda: None
    ) -> None:
        self.triton = triton
        self.on_restore = on_restore
        self.models = models
        self.journal = _journal(triton, folder)
        self.mode: str | None = None

    def __enter__(self) -> Switch:
        write_atomically(
            self.journal,
            json.dumps(
                [{"model": m.name, "original": m.original, "ours": list(m.modes.values())} for m in self.models]
            ),
        )
        return self

    def to(self, mode: str) -> None:
        if mode == self.mode:
            return
        self.mode = None
        for model in self.models:
            self._load(model.name, model.modes[mode])
        for model in self.models:
            found = "dynamic_batching" in self.triton.config(model.name)
            if model.batches and found != (mode == "dynamic"):
                raise UserError(
                    f"Triton took the configuration of '{model.name}', but batching stays {'on' if found else 'off'}"
                )
        self.mode = mode

    def in_force(self) -> bool:
        """Is the server still in the mode it was switched to? A restart would have undone it."""
        return all(_same(self.triton.config(model.name), model.modes[self.mode]) for model in self.models)

    def __exit__(self, *exception) -> None:
        self.on_restore()
        failed = []
        deadline = time.monotonic() + RESTART_S
        # Steps before the ensemble: growing again, it may not batch more than they do.
        for model in reversed(self.models):
            try:
                self._load(model.name, model.original, deadline)
            except UserError as error:
                failed.append(str(error))
        if failed:
            raise UserError("; ".join(failed) + ". The next comparison tries again")
        self.journal.unlink(missing_ok=True)

    def _load(self, model: str, config: dict, deadline: float = 0) -> None:
        try:
            while True:
                try:
                    return self.triton.load(model, config)
                except TritonError as error:
                    # No status: the server is gone, and is perhaps being started again.
                    if error.status or time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)
        except TritonError as error:
            if error.status == 403:
                raise UserError(
                    "Triton refuses model control: TRITON_ADMIN_KEY is not the one the server was started with"
                ) from None
            raise UserError(f"switching '{model}' failed: {error}") from None


def restore_after_kill(triton: Triton, folder: Path) -> list[str]:
    """Undo what a killed comparison left on this server; the names of the models put back.

    A model whose configuration is no longer the one the comparison posted was reloaded by somebody since: it stays.
    """
    journal = _journal(triton, folder)
    if not journal.exists():
        return []
    restored = []
    for entry in reversed(json.loads(journal.read_text())):
        try:
            current = triton.config(entry["model"])
        except TritonError as error:
            if error.status is None:
                raise
            continue  # no longer served
        if any(_same(current, ours) for ours in entry["ours"]) and not _same(current, entry["original"]):
            triton.load(entry["model"], entry["original"])
            restored.append(entry["model"])
    journal.unlink()
    return restored


def _journal(triton: Triton, folder: Path) -> Path:
    return folder / f".restore-{triton.name}.json"


def _same(current: dict, posted: dict) -> bool:
    """As posted, but for what Triton fills in by itself, and revive.py's count."""
    current, posted = _uncounted(current), _uncounted(posted)
    ours = {key: value for key, value in posted.items() if key != "dynamic_batching"}
    return all(current.get(key) == value for key, value in ours.items()) and (
        ("dynamic_batching" in current) == ("dynamic_batching" in posted)
    )


def _uncounted(config: dict) -> dict:
    return config | {"parameters": {k: v for k, v in config.get("parameters", {}).items() if k != "revived"}}
