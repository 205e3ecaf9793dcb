"""Assemble systems and put them into the model repository, each as a whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from export.added_adapters import change_adapters, keep_adapters
from export.catalogue import RECIPES, SYSTEMS, FormatUnavailable, Job, Outcome, Recipe, System
from export.checkpoint.network import check_network
from export.checkpoint.tasks import LIST
from export.decision import decide
from export.drafts import FACT as DRAFT
from export.drafts import open_draft
from export.memory_limit import limited_memory
from export.neuron.target import Target
from export.record import (
    DEFAULT,
    FORMAT_OF,
    IGNORE,
    MIN_QUALITY,
    Record,
    delete_files,
    place_files,
    read_record,
    read_records,
)
from export.selection import missing_systems
from export.sources.pickles import WORK
from export.sources.source import Weights, open_weights
from triton_transformers.cli import err, out
from triton_transformers.files import exclusive
from triton_transformers.model_config import CONFIGS, is_outdated, tuned_configs, with_steps
from triton_transformers.settings import Settings, UserError

# The libraries that read and run a model, as named in messages.
LIBRARIES = ("transformers", "sentence_transformers", "tokenizers", "safetensors", "torch", "onnxruntime")


def assemble_all(settings: Settings) -> None:
    """Assemble the systems of SYSTEMS that are not in place."""
    repository = settings.model_repository
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with exclusive(repository, "another `make models` is at work here"):
            # A killed run left these: while we hold the lock, no other run is at work.
            for leftover in repository.glob(f"{WORK}*"):
                shutil.rmtree(leftover)
            missing, others = missing_systems(settings, settings.systems)
            for line in others:
                out.print(line, markup=False)
            for system in missing:
                with err.status(f"{system.name}: reading {escape(str(system.source))}"):
                    assemble(system, settings, repository)
            if settings.adapters:
                change_adapters(settings.systems[0], settings, repository)
    except OSError as error:
        raise UserError(
            f"{repository} could not be written ({error}): make room or correct its permissions, then run this again"
        ) from None


def assemble(system: System, settings: Settings, repository: Path) -> None:
    start = time.monotonic()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers draws one for each load of weights
    if target := Target.from_settings(settings):
        # Set before torch is imported: that may start Neuron's runtime, which takes all the cores that it sees.
        os.environ["NEURON_RT_VISIBLE_CORES"] = f"{target.cores[0]}-{target.cores[-1]}"
    # Here, because it imports packages that may be absent where all systems are in place already.
    from export.recipes.language.quantized import as_checkpoint
    from export.sources.config_completion import completed

    with (
        open_weights(system.source, settings, repository) as stored,
        tempfile.TemporaryDirectory(dir=repository, prefix=WORK) as folder,
        as_checkpoint(stored, Path(folder)) as (checkpoint, converted),
        completed(checkpoint, Path(folder), system.task) as weights,
        open_draft(system.draft, settings, repository) as draft,
    ):
        job = replace(decide(system, weights, Path(folder), settings), draft=draft)
        recipe = RECIPES[job.task]
        try:
            outcome = run_recipe(recipe, job, weights.name)
        except FormatUnavailable as error:
            fallback = error.instead if error.instead in recipe.formats else ""
            if system.format or draft or not fallback:
                instead = f". FORMAT={fallback} serves it with transformers" if fallback else ""
                raise UserError(
                    f"{weights.name} cannot be served as {job.task}, FORMAT={job.format}: {error}{instead}"
                ) from error
            instead = f"It is served by transformers instead (FORMAT={fallback})"
            err.print(f"{system.name}: {escape(str(error))}. {instead}")
            shutil.rmtree(job.folder)
            job.folder.mkdir()
            job = replace(job, format=fallback)
            outcome = run_recipe(recipe, job, weights.name)
        facts: dict[str, Any] = {} if system.format else {DEFAULT: settings.profile}
        if system.name in settings.variants():
            facts[FORMAT_OF] = settings.system
        if system.min_quality:
            facts[MIN_QUALITY] = system.min_quality
        if draft:
            outcome = outcome.join(Outcome(f"tokens are proposed by {draft.name}", {DRAFT: draft.identity}))
        outcome = outcome.join(Outcome(facts=facts)).join(converted).join(keep_adapters(job, repository))
        err.step("writing")
        put_in_place(job, weights, outcome, repository)
    took = f"assembled in {time.monotonic() - start:.0f} s"
    summary = f"; {outcome.summary}" if outcome.summary else ""
    out.print(f"{system.name}: {job.task} ({job.format}) of {escape(weights.name)}, {took}{summary}")


def run_recipe(recipe: Recipe, job: Job, name: str) -> Outcome:
    try:
        with limited_memory(name, job.weights):
            for part in job.checkpoint.parts:
                check_network(part, job.task)
            return recipe.assemble(job)
    except UserError as error:
        # The folder may be a view of the weights, of which the user knows the name only.
        error.args = (str(error).replace(str(job.weights), name),)
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # from the file system; transformers' own have no number
            raise
        raise UserError(f"{name} cannot be served as {job.task}, FORMAT={job.format}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return why a library failed at a model. Its own words are for programmers, and some advise what does not help."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [(frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_name) for frame in frames]
    library = next((package for package, _ in reversed(calls) if package in LIBRARIES), "its library")
    failure, functions = f"{type(error).__name__} in {library}", {function for _, function in calls}
    if type(error).__module__.startswith("serving."):  # of our backends, with sentences for people
        return str(error)
    if isinstance(error, ImportError):  # whose first sentence names the package
        return f"{' '.join(str(error).split()).partition('. ')[0]}. Choose another model ({LIST})"
    if missing := re.search(r"requires `(\w+)` to be installed", str(error)):
        return f"transformers needs the package {missing[1]} for it, which is not part of this release ({LIST})"
    if "Unrecognized configuration class" in str(error):
        return f"transformers has no model of this architecture for the task. Choose another model ({LIST})"
    if "from_pretrained" in functions:
        return f"it does not load ({failure}): config.json or the weights are damaged, or do not belong together"
    if {"reference", "measure"} & functions and "_call_impl" in functions:  # the network of the original runs
        words = " ".join(str(error).split())[:300]
        return f"the original failed on the example inputs ({failure}: {words}). Choose another model ({LIST})"
    return f"this project failed to prepare it ({failure}). Choose another FORMAT or model ({LIST})"


def put_in_place(job: Job, weights: Weights, outcome: Outcome, repository: Path) -> None:
    from export.check.examples import keep_requests  # needs the packages of an assembly

    models = sorted(path for path in job.folder.iterdir() if path.is_dir())
    check_free(job.system, [model.name for model in models], repository)
    keep_requests(job.system, models)
    facts = dict(outcome.facts)
    record = Record(
        system=job.system,
        also=tuple(model.name for model in models if model.name != job.system),
        task=job.task,
        format=job.format,
        recipe=RECIPES[job.task].version,
        files=tuple(str(path.relative_to(job.folder)) for path in sorted(job.folder.rglob("*")) if path.is_file()),
        source=weights.name,
        identity=weights.identity,
        neuron=facts.pop("neuron", None),
        facts=facts,
    )
    before = read_record(job.system, repository)
    record.unfinished(before).write(repository)
    for model in models:
        if (model / "config.pbtxt").exists():
            (repository / model.name).mkdir(exist_ok=True)
            (repository / model.name / IGNORE).write_text("*\n")
        else:
            copy_configs(model, repository)
    place_files(record.files, job.folder, repository)
    for tuned in (path for model in models for path in tuned_configs(repository / model.name) if is_outdated(path)):
        tuned.unlink()
        out.print(f"{tuned}: deleted, because `make tune` made it for the model from before")
    delete_files(set(before.files if before else ()) - set(record.files), repository)
    for version in (path for model in models for path in model.iterdir() if path.is_dir()):
        # Triton requires a version's folder, even if the model has no files.
        (repository / version.parent.name / version.name).mkdir(parents=True, exist_ok=True)
    record.write(repository)


def check_free(system: str, models: list[str], repository: Path) -> None:
    """Raise if the folder of one of these models belongs to another system, or to the user."""
    owners = {model: record.system for record in read_records(repository) for model in record.models}
    for other in SYSTEMS.values():
        for name in other.names:
            owners |= dict.fromkeys(with_steps(name, CONFIGS), other.name)
    for model in models:
        owner = owners.get(model)
        if owner is None and (repository / model / "config.pbtxt").exists():
            owner = "you"
        if owner not in (None, system):
            raise UserError(f"{system} needs a model '{model}', which belongs to {owner}: choose another name")


def copy_configs(model: Path, repository: Path) -> None:
    """Copy a model's configuration from git to a repository elsewhere, unless it has one."""
    for config in (CONFIGS / model.name).glob("**/*.pbtxt"):
        target = repository / model.name / config.relative_to(CONFIGS / model.name)
        if not target.exists() and config not in tuned_configs(CONFIGS / model.name):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(config, target)
