"""Putting an assembled system in place: all of it or nothing, once, whoever else is at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from scripts.common.cli import err, out
from scripts.common.files import exclusive, write_atomically
from scripts.common.model_config import CONFIGS, with_steps
from scripts.common.settings import Settings, UserError
from scripts.models.catalogue import FORMATS, RECIPES, SYSTEMS, Order, Recipe, System, named
from scripts.models.hub import DOWNLOADS
from scripts.models.sources import Folder, Hub, Source, identity, of_identity, opened
from scripts.models.tasks import task_of
from scripts.neuron.target import Target

# `gpt2` is of the published names alone.
TASKS = tuple(task for task in RECIPES if task != "gpt2")
WORK = ".assembling-"
# It becomes folders, words of a command line, and parts of an address.
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
UNFINISHED = "unfinished"
# What says which system is meant: without any of them, what is in place will do.
CHOICES = ("HF_MODEL", "HF_REVISION", "SOURCE", "TASK", "FORMAT")


def assemble_all(settings: Settings) -> None:
    repository = settings.path("MODEL_REPOSITORY")
    if all_in_place(settings):
        return
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with exclusive(repository, "another `make models` is at work here"):
            sweep(repository)
            for system in missing(settings):
                assemble(system, settings, repository)
    except OSError as error:
        raise UserError(f"{repository} could not be written, what was there stays: {error}") from None


def all_in_place(settings: Settings) -> bool:
    """Said only if it is so: else it is said under the lock, by when another run may have done it."""
    return not missing(settings, quietly=True) and not missing(settings)


def missing(settings: Settings, quietly: bool = False) -> list[System]:
    """What SYSTEMS names and is not in place as it is asked for; a word about what is."""
    repository = settings.path("MODEL_REPOSITORY")
    names = settings.words("SYSTEMS")
    chosen = [name for name in CHOICES if settings[name]]
    if chosen and len(names) != 1:
        raise UserError(f"{', '.join(chosen)} say which one system is meant: name only that one in SYSTEMS")
    found: dict[str, System] = {}
    for name in names:
        system = asked_for(name, settings, repository)
        if system and not is_assembled(system, settings, repository):
            found[system.name] = system
        elif not quietly:
            out.print(f"{name}: in place" if system else f"{name}: your own, left as it is")
    return list(found.values())


def asked_for(name: str, settings: Settings, repository: Path) -> System | None:
    """The system of that name, with what the settings say otherwise; None for a model of the user's own."""
    if not NAME.fullmatch(name):
        raise UserError(f"SYSTEMS: '{name}' is no name; letters, digits, '_', '-' and '.' make one")
    source = chosen_source(settings)
    # What was made before is what is meant, also of a catalogue's system made of the user's weights.
    system = recorded(name, repository) or named(name)
    if any(settings[choice] for choice in CHOICES):
        system = named(name) or system
        if system and system.name != name:
            raise UserError(f"{name} is a part of {system.name}: name that, or choose another name for yours")
        if name in SYSTEMS and settings["TASK"] not in ("", SYSTEMS[name].task):
            raise UserError(f"{name} is for {SYSTEMS[name].task}: TASK={settings['TASK']} takes another name")
    if system is None and source is None:
        if (repository / name / "config.pbtxt").exists():
            return None
        raise UserError(
            f"no system '{name}'; there are {', '.join(known(repository))}. To make one, say where its weights are: "
            f"make models SYSTEMS={name} HF_MODEL=organisation/model, or SOURCE=folder"
        )
    if system is None:
        system = System(name, "", source)
    task = "" if source and name not in SYSTEMS else system.task  # other weights may be for another task
    return replace(
        system,
        source=source or system.source,
        task=settings.choice("TASK", TASKS) if settings["TASK"] else task,
        format=(settings.choice("FORMAT", FORMATS) if settings["FORMAT"] else "") or system.format,
    )


def known(repository: Path) -> list[str]:
    return list(dict.fromkeys([*SYSTEMS, *(record["system"] for record in records(repository))]))


def chosen_source(settings: Settings) -> Source | None:
    if settings["SOURCE"]:
        if settings["HF_MODEL"]:
            raise UserError("SOURCE and HF_MODEL both say where the weights are: say one")
        return Folder(settings.path("SOURCE").resolve())
    return Hub(settings["HF_MODEL"], settings["HF_REVISION"]) if settings["HF_MODEL"] else None


def assemble(system: System, settings: Settings, repository: Path) -> None:
    start = time.monotonic()
    with (
        opened(system.source, settings, repository) as weights,
        tempfile.TemporaryDirectory(dir=repository, prefix=WORK) as folder,
    ):
        task = system.task or task_of(weights.folder)
        recipe = RECIPES[task]
        target = Target.of(settings) if recipe.neuron else None
        if target and settings["FORMAT"]:
            raise UserError(f"PROFILE=neuron compiles {system.name} ({task}) for Neuron: leave FORMAT empty")
        if system.format and system.format not in recipe.formats:
            raise UserError(f"{system.name} ({task}) can be had as {', '.join(recipe.formats)} only")
        order = Order(
            system=system.name,
            task=task,
            format="neuron" if target else system.format or recipe.formats[0],
            weights=weights.folder,
            movable=weights.movable,
            folder=Path(folder),
            trust_remote_code=settings.flag("TRUST_REMOTE_CODE"),
            neuron=target,
        )
        if target:  # before torch is imported, which may wake Neuron's runtime: of all cores, that takes what it sees
            os.environ["NEURON_RT_VISIBLE_CORES"] = f"{target.cores[0]}-{target.cores[-1]}"
        with err.status(f"{system.name}: assembling {weights.name}"):
            facts = made(recipe, order, weights.name)
        said = facts.pop("said", "")
        put_in_place(system, order, recipe, repository, {"source": weights.name, "identity": weights.identity} | facts)
    took = f"assembled in {time.monotonic() - start:.0f} s"
    out.print(f"{system.name}: {task} ({order.format}) of {weights.name}, {took}{said and '; '}{said}")


def made(recipe: Recipe, order: Order, name: str) -> dict:
    if not any(order.weights.rglob("*.safetensors")):
        raise UserError(
            f"{name} has no *.safetensors, and other formats can run code when they are read. To convert a model that "
            "you trust: load it with from_pretrained(folder), and save_pretrained(another)"
        )
    try:
        return recipe.assemble(order)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # the disk's; transformers' have no number
            raise
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = " (TRANSFORMERS= takes another release)" if "Transformers does not recognize" in said else ""
        raise UserError(f"{name} cannot be served as {order.task}, FORMAT={order.format}{hint}: {said}") from error


# --- what is there ----------------------------------------------------------------------------------------------------


def is_assembled(system: System, settings: Settings, repository: Path) -> bool:
    """As the settings ask for it."""
    record = read_record(repository / system.name)
    if not record or not is_current(record, repository):
        return False
    target = Target.of(settings) if RECIPES[record["task"]].neuron else None
    if target and not target.made(record.get("neuron")):
        return False
    if not target and record["format"] == "neuron" and not settings["FORMAT"]:
        raise UserError(
            f"{system.name} is compiled for AWS Neuron: say PROFILE=neuron (in .env, say it once), or FORMAT=onnx to "
            "make it anew for this profile"
        )
    wanted = settings["FORMAT"] if target else system.format
    return not any(settings[name] for name in CHOICES) or (
        record["identity"] == identity(system.source, record["identity"])
        and record["task"] == (system.task or record["task"])
        and record["format"] == (wanted or record["format"])
    )


def recorded(name: str, repository: Path) -> System | None:
    """One that was made before, of its own HF_MODEL or SOURCE."""
    record = record_of(name, repository)
    source = record and of_identity(record["identity"])
    if not source:
        return None
    chosen = "" if record["format"] == "neuron" else record["format"]
    return System(record["system"], record["task"], source, chosen)


def record_of(name: str, repository: Path) -> dict | None:
    """Of the system that the name is one of the models of."""
    return next((record for record in records(repository) if name in models(record)), None)


def models(record: dict) -> tuple[str, ...]:
    return record["system"], *record["also"]


def is_current(record: dict, repository: Path) -> bool:
    """Made by the recipe of today, and all there."""
    return record["recipe"] == RECIPES[record["task"]].version and is_whole(record, repository)


def is_whole(record: dict, repository: Path) -> bool:
    return all((repository / file).exists() for file in record["files"])


def records(repository: Path) -> list[dict]:
    found = (read_record(path.parents[1]) for path in sorted(repository.glob("*/1/assembled.json")))
    return [record for record in found if record]


def models_of(name: str, repository: Path) -> list[str]:
    """Triton's models that make up a system: by its record, or by the configs."""
    record = record_of(name, repository)
    return list(models(record)) if record else with_steps(name, repository)


def read_record(model: Path) -> dict | None:
    try:
        record = json.loads((model / "1/assembled.json").read_text())
    except (OSError, ValueError):
        return None
    return record if "identity" in record else None  # one of an older release


# --- putting it there -------------------------------------------------------------------------------------------------


def put_in_place(system: System, order: Order, recipe: Recipe, repository: Path, facts: dict) -> None:
    made = sorted(path for path in order.folder.iterdir() if path.is_dir())
    check_free(system, made, repository)
    files = [str(path.relative_to(order.folder)) for path in sorted(order.folder.rglob("*")) if path.is_file()]
    record = repository / system.name / "1/assembled.json"
    before = read_record(repository / system.name)
    old = before["files"] if before else []
    content = {
        "system": system.name,
        "also": [model.name for model in made if model.name != system.name],
        "task": order.task,
        "format": order.format,
        **facts,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    # Killed from here on, the next run makes it again, and knows what to clear away.
    unfinished = {"recipe": UNFINISHED, "files": sorted({*old, *files})}
    write_atomically(record, json.dumps(content | unfinished, indent=2) + "\n")
    for model in made:
        copy_config(model, repository)
        for version in model.iterdir():
            if version.is_dir():  # Triton wants one, also of a model that has nothing to put into it
                (repository / model.name / version.name).mkdir(parents=True, exist_ok=True)
    mask = os.umask(0)
    os.umask(mask)
    for file in files:
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        # safetensors and ONNX's external data come readable by their owner only, and containers have another user.
        (order.folder / file).chmod(0o666 & ~mask)
        os.replace(order.folder / file, repository / file)
    for file in set(old) - set(files):
        (repository / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            (repository / file).parent.rmdir()
    write_atomically(record, json.dumps(content | {"recipe": recipe.version, "files": files}, indent=2) + "\n")


def check_free(system: System, made: list[Path], repository: Path) -> None:
    """A folder of the same name may be another system's, or the user's own."""
    owners = {model: record["system"] for record in records(repository) for model in models(record)}
    for other in SYSTEMS.values():
        for name in (other.name, *other.also):
            owners |= dict.fromkeys(with_steps(name, CONFIGS), other.name)
    for model in made:
        owner = owners.get(model.name)
        if owner is None and (repository / model.name / "config.pbtxt").exists():
            owner = "you"
        if owner not in (None, system.name):
            raise UserError(
                f"{system.name} would need a model '{model.name}', which belongs to {owner}: choose another name"
            )


def copy_config(made: Path, repository: Path) -> None:
    """A repository elsewhere starts with our configs; one that has its own keeps it."""
    if (made / "config.pbtxt").exists():
        return
    for ours in (CONFIGS / made.name).glob("**/*.pbtxt"):
        target = repository / made.name / ours.relative_to(CONFIGS / made.name)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ours, target)


def remove_all(settings: Settings) -> None:
    """The files that were assembled, by their records; a user's own models beside them stay."""
    repository = settings.path("MODEL_REPOSITORY")
    shutil.rmtree(repository / DOWNLOADS, ignore_errors=True)
    for record in records(repository):
        for file in (*record["files"], f"{record['system']}/1/assembled.json"):
            (repository / file).unlink(missing_ok=True)
            for folder in (repository / file).parents[:2]:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def sweep(repository: Path) -> None:
    """What a killed run left. Only under the lock, for a running one's work looks the same."""
    for leftover in repository.glob(f"{WORK}*"):
        shutil.rmtree(leftover)
