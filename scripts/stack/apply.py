"""Run `make tune`, and with APPLY=1 put what it found into the model repository and load it."""

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

# The content of tune.json: docs/sizing.md.
Result = dict[str, Any]
# Model -> the text of the file that configures it.
Texts = dict[str, bytes]


def tune(stack: Stack) -> int:
    """Search on the running server, and return the exit code. With APPLY=1 apply a winner that is proven."""
    settings = stack.settings
    models = with_steps(settings.system, settings.model_repository, settings.profile)
    texts = configurations(models, settings)
    if settings.apply:
        check_writable(settings.model_repository, models)
    link = settings.reports / LATEST
    earlier = link.resolve()
    code = stack.run("tune")
    if code or not settings.apply:
        if settings.apply:
            out.print("APPLY=1: nothing is applied, because the search proved no winner")
        return code
    folder = link.resolve()
    if folder == earlier:
        raise UserError(f"{link} has no new result, so nothing is applied")
    result = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
    if not result["files"]:
        raise UserError("APPLY=1: the configuration cannot be written, see above, so nothing is applied")
    if configurations(models, settings) != texts:
        raise UserError("a config.pbtxt changed during the search, so nothing is applied: run `make tune` again")
    apply(stack, result, folder / "before")
    return 0


def configurations(models: Iterable[str], settings: Settings) -> Texts:
    """Return the texts of the files that configure the models, of those that have one."""
    repository, profile = settings.model_repository, settings.profile
    paths = {model: find_config(model, repository, profile) for model in models}
    return {model: path.read_bytes() for model, path in paths.items() if path}


def check_writable(repository: Path, models: Iterable[str]) -> None:
    """Raise UserError if the search would end in files that nobody may write."""
    for model in models:
        folder = next(
            path for path in (repository / model / "configs", repository / model, repository) if path.exists()
        )
        if not os.access(folder, os.W_OK):
            raise UserError(
                f"APPLY=1: {folder} is not writable. Change that, or leave APPLY out and copy the files later"
            )


def apply(stack: Stack, result: Result, copies: Path) -> None:
    """Write the files of a result, load them and check the answers; after an error, restore what was there.

    Files that exist already are copied to the new folder `copies` first.
    """
    repository = stack.settings.model_repository
    before: dict[Path, bytes | None] = {}
    for name in result["files"]:
        path = repository / name
        before[path] = path.read_bytes() if path.exists() else None
        if path.exists():
            (copies / name).parent.mkdir(parents=True)
            (copies / name).write_bytes(path.read_bytes())
    with stack.no_comparison(ANOTHER_COMPARISON), one_interrupt():
        models = {name.partition("/")[0] for name in result["files"]}
        systems = [name for name in stack.served_now() if models & stack.triton.composing(name).keys()]
        try:
            write({repository / name: text.encode() for name, text in result["files"].items()})
            load(stack, systems, result["configs"])
        except BaseException as error:
            cause = str(error) or "interrupted"  # KeyboardInterrupt has no text
            err.print("[red]not applied:[/] the configurations from before are restored, and loaded")
            try:
                write(before)
                reload(stack, systems)
            except OSError as obstacle:
                raise UserError(
                    f"{cause}. The files cannot be restored: {obstacle}. Delete {', '.join(map(str, before))}, copy "
                    f"back what {copies} has, and run `make up`"
                ) from None
            except (UserError, TritonError) as obstacle:
                raise UserError(
                    f"{cause}. The files are as before, but do not load: {obstacle}. Run `make up`"
                ) from None
            raise
    for path, text in before.items():
        kept = f"the one from before is {shown(copies / path.relative_to(repository))}"
        out.print(f"{shown(path)}: written; " + (kept if text else "to return to config.pbtxt, delete it"))


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


def in_force(config: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return whether the server's configuration has these fields. Ignore what Triton completes."""
    others = {key: value for key, value in fields.items() if key not in ("parameters", "dynamic_batching")}
    batches = fields.get("dynamic_batching", config.get("dynamic_batching")) is not None
    return (
        all(config.get(key) == value for key, value in others.items())
        and fields.get("parameters", {}).items() <= config.get("parameters", {}).items()
        and ("dynamic_batching" in config) == batches
    )


def write(texts: Mapping[Path, bytes | None]) -> None:
    """Write the files, each as a whole; delete one without a text, and the folder that this empties."""
    for path, text in texts.items():
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path.resolve(), text)  # a link stays a link
            continue
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            path.parent.rmdir()


def shown(path: Path) -> str:
    return escape(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path))
