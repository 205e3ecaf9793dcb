"""Decide from the settings which systems to assemble, and from what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from export.added_adapters import adapter_changes
from export.catalogue import CATALOGUE, FORMATS, RECIPES, SYSTEMS, System, find_system, runs_on
from export.decision import check_format
from export.drafts import is_recorded, requested_draft
from export.neuron.target import Target
from export.record import DEFAULT, FORMAT_OF, MIN_QUALITY, Record, find_record, read_record, read_records
from export.sources.source import Folder, Hub, Source, identity, source_of
from triton_transformers.cli import out
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.kinds import NAME
from triton_transformers.tasks.table import TASKS
from triton_transformers.tasks.task import PIPELINE

# These settings choose what a system is made of. Without any of them, a system that is in place stays as it is.
CHOICES = ("HF_MODEL", "HF_REVISION", "SOURCE", "TASK", "FORMAT", "MIN_QUALITY", "DRAFT")
# Names of tasks on the Hub that transformers 5 has under another name.
OLD_TASKS = {"text-to-speech": "text-to-audio"}


def all_in_place(settings: Settings, systems: list[str]) -> bool:
    """Return whether no system has to be assembled, and print that only then."""
    missing, others = missing_systems(settings, systems)
    if settings.adapters and adapter_changes(systems[0], settings, settings.model_repository):
        return False
    if not missing:
        out.print("\n".join(others), markup=False)
    return not missing


def missing_systems(settings: Settings, names: list[str]) -> tuple[list[System], list[str]]:
    """Return the systems that have to be assembled, and a line about each of the others."""
    repository = settings.model_repository
    # With FORMATS, MIN_QUALITY is for the format int8. The system itself stays as it is.
    plain = settings.replace(MIN_QUALITY="") if settings.formats else settings
    chosen = [name for name in (*CHOICES, "ADAPTERS") if plain[name]]
    if chosen and len(names) != 1:
        raise UserError(
            f"{', '.join(chosen)} can apply to one system only, and SYSTEMS has {len(names)}: name exactly one"
        )
    missing: dict[str, System] = {}
    others = []
    for name in names:
        own = settings if name in settings.variants() else plain
        system = requested_system(name, own, repository)
        if system and not is_in_place(system, own, repository):
            check_recorded_source(system, repository)
            missing[system.name] = system
        else:
            others.append(f"{name}: in place" if system else f"{name}: your own, left as it is")
    return list(missing.values()), others


def requested_system(name: str, settings: Settings, repository: Path) -> System | None:
    """Return the system of this name as the settings define it, or None for a model of the user's own."""
    if not NAME.fullmatch(name):
        raise UserError(f"SYSTEMS: '{name}' is not a valid name; use letters, digits, '_', '-' and '.'")
    if form := settings.variants().get(name):
        base = requested_system(settings.system, settings, repository)
        quality = recorded_quality(settings.system, form, repository)
        if form == "int8":
            quality = settings.min_quality or quality
        return base and replace(base, name=name, format=form, companions=(), min_quality=quality)
    source = chosen_source(settings)
    # A record comes first: the user may have assembled a system of the catalogue from other weights.
    system = assembled_system(name, repository, settings.profile) or find_system(name)
    if any(settings[choice] for choice in CHOICES if choice not in ("MIN_QUALITY", "DRAFT")):
        system = find_system(name) or system
        if system and system.name != name:
            raise UserError(
                f"{name} is a part of {system.name}: name that in SYSTEMS, or choose another name for yours"
            )
        if name in SYSTEMS and settings.task not in ("", SYSTEMS[name].task):
            raise UserError(f"{name} is for TASK={SYSTEMS[name].task}: choose another name for TASK={settings.task}")
    if system is None:
        if source is None and (repository / name / "config.pbtxt").exists():
            return None
        if source is None:
            names = (system.name for system in CATALOGUE)
            known = dict.fromkeys([*names, *(record.system for record in read_records(repository))])
            raise UserError(
                f"no system '{name}'; there are {', '.join(known)}, and one for each task of transformers' pipelines "
                "(`make models LIST=1`). To add yours, name its weights: "
                f"make add SYSTEM={name} HF_MODEL=organisation/model, or SOURCE=folder"
            )
        system = System(name, "", source)
    if settings.task in OLD_TASKS:
        raise UserError(f"TASK={settings.task} is TASK={OLD_TASKS[settings.task]} in transformers 5: set that")
    form = chosen_format(settings) or system.format
    task = "" if source and name not in SYSTEMS else system.task  # other weights may be for another task
    task = settings.choice("TASK", tuple(TASKS)) if settings.task else task
    if task and settings.format:
        check_format(name, task, form)
    return replace(
        system,
        source=source or system.source,
        task=task,
        format=form,
        draft=requested_draft(settings, read_record(system.name, repository)),
        min_quality=settings.min_quality or recorded_quality(system.name, form, repository),
    )


def recorded_quality(name: str, form: str, repository: Path) -> float | None:
    """Return the MIN_QUALITY that the system was assembled with, if the format has one."""
    record = read_record(name, repository)
    return record.facts.get(MIN_QUALITY) if record and form == "int8" else None


def chosen_format(settings: Settings) -> str:
    """Return FORMAT. Raise UserError if a server of the profile could not run it."""
    if not settings.format:
        return ""
    form, profile = settings.choice("FORMAT", FORMATS), settings.profile
    if not runs_on(form, profile):
        raise UserError(
            f"FORMAT={form} does not run with PROFILE={profile}: leave FORMAT empty for what suits the profile"
        )
    return form


def chosen_source(settings: Settings) -> Source | None:
    if settings.source:
        if settings.hf_model:
            raise UserError("SOURCE and HF_MODEL both name weights: set one of them")
        return Folder(settings.source.resolve())
    return Hub(settings.hf_model, settings.hf_revision) if settings.hf_model else None


def assembled_system(name: str, repository: Path, profile: str) -> System | None:
    """Return the system that an earlier run assembled from HF_MODEL or SOURCE.

    Leave its format open if it was a default, or if a server of the profile could not run it.
    """
    record = find_record(name, repository)
    source = source_of(record.identity) if record else None
    if record is None or source is None:
        return None
    keeps = record.format != "neuron" and DEFAULT not in record.facts and runs_on(record.format, profile)
    return System(record.system, record.task, source, record.format if keeps else "")


def suits(record: Record, profile: str) -> bool:
    """Return whether a server of the profile runs the format, and no other default format would replace it."""
    recipe = RECIPES[record.task]
    default_on = record.facts.get(DEFAULT, profile)
    return runs_on(record.format, profile) and recipe.default_format(default_on) == recipe.default_format(profile)


def is_in_place(system: System, settings: Settings, repository: Path) -> bool:
    """Return whether the system is assembled as the settings define it."""
    record = read_record(system.name, repository)
    if not record or not record.is_current(repository):
        return False
    target = Target.from_settings(settings) if RECIPES[record.task].neuron else None
    if target and not target.matches(record.neuron):
        return False
    if not target and record.format == "neuron" and not settings.format:
        raise UserError(
            f"{system.name} is compiled for AWS Neuron: set PROFILE=neuron (in .env, to keep it), or set FORMAT=onnx "
            "to assemble it again for this profile"
        )
    if not settings.format and record.format != "neuron" and not suits(record, settings.profile):
        return False
    form = settings.format if target else system.format
    is_chosen = system.name in settings.variants() or any(settings[name] for name in CHOICES)
    return not is_chosen or (
        record.identity == identity(system.source, record.identity)
        and record.task == (system.task or record.task)
        and record.format == (form or record.format)
        and system.min_quality == record.facts.get(MIN_QUALITY)
        and is_recorded(system.draft, record)
    )


def check_recorded_source(system: System, repository: Path) -> None:
    """Raise UserError if a system must be assembled again, and the folder that it was made from is gone."""
    record, source = read_record(system.name, repository), system.source
    if record and isinstance(source, Folder) and source_of(record.identity) == source and not source.path.is_dir():
        raise UserError(
            f"{system.name} is incomplete, or of another release, and must be assembled again, but its weights are no "
            f"longer in {source}: put them back, name their new place (make add SYSTEM={system.name} SOURCE=folder), "
            f"or delete the system (make remove SYSTEM={system.name})"
        )


# --- the formats of one system, which `make loadtest FORMATS` compares -----------------------------------------------


def check_formats(settings: Settings) -> None:
    """Raise UserError unless SYSTEM can be assembled in each of FORMATS, and compared."""
    name, repository, where = settings.system, settings.model_repository, f"FORMATS={settings['FORMATS']}"
    others = [own for own in (*CHOICES, "ADAPTERS", "OVERLOAD", "MAX_BATCH") if settings[own]]
    if "int8" in settings.formats and settings.min_quality:
        others.remove("MIN_QUALITY")
    others += ["WORKLOAD"] * (settings.workload == "published")  # which has a maximum batch size
    if others:
        raise UserError(f"{where} compares formats of a system as it is served: leave {', '.join(others)} empty")
    system = requested_system(name, settings, repository)
    if system is None:
        raise UserError(f"{where}: {name} is your own model, and only what `make add` assembled has other formats")
    recipe = RECIPES[system.task]
    if recipe.module in ("language.recipe", "gpt2"):
        raise UserError(f"{where}: {name} generates text, and FORMATS compares systems that embed, rank or classify")
    if TASKS[system.task].is_incomparable:
        raise UserError(f"{where}: no measure compares the answers of {name} ({system.task})")
    if settings.profile == "neuron":
        raise UserError(f"{where}: PROFILE=neuron compiles {name}, and has no formats to compare")
    formats = [form for form in recipe.formats if form != PIPELINE and runs_on(form, settings.profile)]
    if unknown := [form for form in settings.formats if form not in formats]:
        available = ", ".join(formats) or "no other"
        raise UserError(f"{where}: {name} ({system.task}) has no format {unknown[0]}; it has {available}")
    if isinstance(system.source, Folder):
        system.source.verify()
    for variant in settings.variants():
        record = read_record(variant, repository)
        if (repository / variant).exists() and (record is None or FORMAT_OF not in record.facts):
            raise UserError(f"{where} assembles a system {variant}, and you have your own: rename or remove it")
