"""Run `make tune`, and with APPLY=1 write what it found into the models' config.pbtxt and load them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from loadtest.tune.goal import LATEST
from scripts.stack.base import Stack
from scripts.stack.smoke import check_system
from triton_transformers.cli import err, one_interrupt, out
from triton_transformers.files import ANOTHER_COMPARISON, write_atomically
from triton_transformers.model_config import find_config, with_steps
from triton_transformers.settings import ROOT, Settings, UserError
from triton_transformers.triton import TritonError

# The content of tune.json: docs/tuning.md.
Result = dict[str, Any]
# File -> its text, None if there is no such file.
Texts = dict[Path, str | None]


def tune(stack: Stack) -> int:
    """Search on the running server, and return the exit code. With APPLY=1 apply a configuration that is better."""
    settings = stack.settings
    models = with_steps(settings.system, settings.model_repository, settings.profile)
    texts = {model: configuration(model, settings) for model in models}
    if settings.apply:
        check_writable(settings.model_repository, models)
    link = settings.reports / LATEST
    earlier = link.resolve()
    code = stack.tune()
    if code or not settings.apply:
        return code
    folder = link.resolve()
    if folder == earlier:
        raise UserError(f"{link} has no new result, so nothing is applied")
    result = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
    if result["outcome"] != "better":
        out.print("APPLY=1: there is nothing to apply")
        return 0
    if not result["edits"]:
        raise UserError("APPLY=1: the files cannot be changed, see above, so nothing is applied")
    apply(stack, result, texts, folder / "before")
    return 0


def apply(stack: Stack, result: Result, texts: Mapping[str, str], copies: Path) -> None:
    """Write the edits of a result, load them and check the answers; after an error, restore what was there.

    `texts` are the configurations when the search began, and `copies` is a new folder for those that change.
    """
    settings, edits = stack.settings, result["edits"]
    for edit in edits:
        model = edit["model"]
        if not configuration(model, settings) == edit["before"] == texts.get(model):
            path = find_config(model, settings.model_repository, settings.profile)
            raise UserError(f"{path or model} changed during the search, so nothing is applied: run `make tune` again")
    with stack.no_comparison(ANOTHER_COMPARISON):
        changed = {edit["model"] for edit in edits}
        systems = [name for name in stack.served_now() if changed & stack.triton.composing(name).keys()]
        for edit in edits:
            copy = copies / edit["model"] / "config.pbtxt"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(edit["before"].encode())
        # A repository elsewhere gets its own copy of a configuration in git.
        repository = settings.model_repository
        after: Texts = {repository / edit["model"] / edit["name"]: edit["after"] for edit in edits}
        before: Texts = {path: read(path) if path.exists() else None for path in after}
        with one_interrupt():
            try:
                write(after)
                load(stack, systems, result["configs"])
            except BaseException as error:
                cause = str(error) or "interrupted"  # KeyboardInterrupt has no text
                try:
                    write(before)
                except OSError as obstacle:
                    raise UserError(
                        f"{cause}. The files cannot be restored: {obstacle}. Copy them from {copies}, and run `make up`"
                    ) from None
                restore(stack, systems, cause)
                raise
    for path in after:
        out.print(f"{shown(path)}: changed")
    out.print(f"The texts from before are in {shown(copies)}.")


def check_writable(repository: Path, models: Iterable[str]) -> None:
    """Raise UserError if the search would end in files that nobody may write."""
    for model in models:
        folder = (repository / model / "config.pbtxt").resolve().parent
        if folder.exists() and not os.access(folder, os.W_OK):
            raise UserError(
                f"APPLY=1: {folder} is not writable. Change that, or leave APPLY out and apply the diff later"
            )


def load(stack: Stack, systems: list[str], configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the systems with the written configurations. Raise UserError if one is not in force or answers wrongly."""
    reload(stack, systems)
    for model, fields in configs.items():
        if not in_force(stack.triton.config(model), fields):
            raise UserError(f"the server does not use the new configuration of '{model}'")
    for system in systems:
        if error := check_system(stack.settings, system):
            raise UserError(f"`make smoke` fails with the new configuration: {system}: {error}")
        out.print(f"[green]ok[/]      {system}")


def reload(stack: Stack, systems: list[str]) -> None:
    """Load the systems from their files. Raise UserError with the reason if a model does not load."""
    with err.status(f"loading {', '.join(systems)}"):
        for system in systems:
            # Load an ensemble together with its steps: Triton stops one whose batches may exceed a step's.
            # This load does not report when a step fails; the one below does.
            with contextlib.suppress(TritonError):
                stack.triton.load(system)
        stack.control.serve(systems, systems)


def restore(stack: Stack, systems: list[str], cause: str) -> None:
    """Load the systems with the configurations from before, and report the outcome."""
    err.print("[red]not applied:[/] the configurations from before are written again, and loaded")
    try:
        reload(stack, systems)
    except (UserError, TritonError) as error:
        raise UserError(f"{cause}. The files are as before, but do not load: {error}. Run `make up`") from None


def in_force(config: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether the server's configuration has these fields. Ignore what Triton completes."""
    others = {key: value for key, value in fields.items() if key not in ("parameters", "dynamic_batching")}
    batches = fields.get("dynamic_batching", config.get("dynamic_batching")) is not None
    return (
        all(config.get(key) == value for key, value in others.items())
        and fields.get("parameters", {}).items() <= config.get("parameters", {}).items()
        and ("dynamic_batching" in config) == batches
    )


def configuration(model: str, settings: Settings) -> str:
    """Return the text of the model's config.pbtxt; nothing if it has none."""
    path = find_config(model, settings.model_repository, settings.profile)
    return read(path) if path else ""


def read(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")  # read_text() would translate newlines


def write(texts: Texts) -> None:
    """Write the files, each as a whole; delete one without a text."""
    for path, text in texts.items():
        if text is None:
            path.unlink(missing_ok=True)
            continue
        target = path.resolve()  # a link stays a link
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode if target.exists() else None
        write_atomically(target, text)
        if mode is not None:
            target.chmod(mode)


def shown(path: Path) -> str:
    return escape(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))
