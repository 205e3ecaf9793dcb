"""Add LoRA adapters to an assembled language model: ADAPTERS="tone=folder legal=organisation/name"."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from export.catalogue import Job, Outcome
from export.checkpoint.adapters import CONFIG, WEIGHTS
from export.record import UNFINISHED, Record, delete_files, place_files, read_record
from export.sources.pickles import WORK
from export.sources.source import Folder, Source, identity, named_source, open_weights
from triton_transformers.cli import err, out
from triton_transformers.engines import OPENVINO, TEXT_ENGINES, VLLM, titles
from triton_transformers.files import write_atomically
from triton_transformers.model_config import find_config
from triton_transformers.protocol import ADAPTERS as PARAMETER
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.kinds import NAME

# The folder of a system's adapters, and the fact of its record: the identity of each one's source.
FOLDER, FACT = "1/adapters", "adapters"
TASK = "text-generation"
# Names become folders.
MAX_NAME = 128
LINE = re.compile(rf'^parameters \{{ key: "{PARAMETER}" .*\n', re.MULTILINE)


def requested_adapters(settings: Settings) -> dict[str, Source | None]:
    """Return the source of each adapter that ADAPTERS names; None if the adapter is to be removed (`tone=`)."""
    adapters: dict[str, Source | None] = {}
    for text in settings.adapters:
        name, equals, place = text.partition("=")
        if not equals or not NAME.fullmatch(name):
            raise UserError(f"ADAPTERS: '{text}' must be a name and its weights: tone=folder or tone=organisation/name")
        if len(name) > MAX_NAME:
            raise UserError(f"ADAPTERS: '{name[:20]}...' has {len(name)} characters; a name has at most {MAX_NAME}")
        if name in adapters:
            raise UserError(f"ADAPTERS names '{name}' twice: give each adapter a name of its own")
        adapters[name] = source = named_source(place) if place else None
        if isinstance(source, Folder):
            source.verify(is_adapter=True)  # before its files are counted: it may be /
    return adapters


def adapter_changes(system: str, settings: Settings, repository: Path) -> dict[str, Source | None]:
    """Return the adapters that ADAPTERS names and that are not in place from this source."""
    record = read_record(system, repository)
    recorded = record.facts.get(FACT, {}) if record else {}
    return {
        name: source
        for name, source in requested_adapters(settings).items()
        if (name in recorded if source is None else recorded.get(name) != identity(source, recorded.get(name, "")))
    }


def change_adapters(system: str, settings: Settings, repository: Path) -> None:
    """Add, replace and remove the adapters of ADAPTERS. The system is in place."""
    changes = adapter_changes(system, settings, repository)
    if not changes:
        return
    record = read_record(system, repository)
    if record is None or record.task != TASK or record.format == "neuron":
        kind = f"{record.task} ({record.format})" if record else "a model of your own"
        able = titles([engine for engine in TEXT_ENGINES if engine.formats])
        raise UserError(f"ADAPTERS: {system} is {kind}; adapters are for {TASK} with {able}")
    from export.recipes.language import adapters as adapter_files

    recorded = {name: own for name, own in record.facts.get(FACT, {}).items() if name not in changes}
    with tempfile.TemporaryDirectory(dir=repository, prefix=WORK) as work, ExitStack() as stack:
        staged, folders = Path(work) / system, [repository / system / FOLDER / name for name in recorded]
        for name, source in changes.items():
            if source is not None:
                weights = stack.enter_context(open_weights(source, settings, repository, is_adapter=True))
                folder = staged / FOLDER / name
                with err.status(f"{system}:{name}: reading {weights.name}"):
                    adapter_files.write(f"{system}:{name}", weights.folder, folder, repository / system / "1")
                recorded[name] = weights.identity
                folders.append(folder)
        ranks = adapter_files.max_rank(repository / system / FOLDER), adapter_files.max_rank(staged / FOLDER)
        if in_graph := record.format in OPENVINO.formats:
            adapter_files.write_graph(system, repository / system / "1", staged / "1", folders)
        if in_graph or (record.format in VLLM.formats and ranks[1] > ranks[0]):
            # Lets Triton load the engine again. It would ignore a newer config.pbtxt with the same content.
            version = Path(work) / f"{system}_stream/1"
            version.mkdir(parents=True)
            (version / "adapters.json").write_text(json.dumps(recorded, indent=2) + "\n")
        put_in_place(record, recorded, Path(work), repository, find_config(system, repository, settings.profile))
    for name in changes:
        out.print(f"{system}:{name}: {f'adapter of {recorded[name]}' if name in recorded else 'removed'}", markup=False)


def put_in_place(record: Record, adapters: dict[str, str], staged: Path, repository: Path, config: Path | None) -> None:
    """Put the staged files in place, name the adapters in the config.pbtxt, delete files of adapters that are gone."""
    new = [str(path.relative_to(staged)) for path in sorted(staged.rglob("*")) if path.is_file()]
    own = f"{record.system}/{FOLDER}/"
    kept = {
        file for file in record.files if not file.startswith(own) or file.removeprefix(own).split("/")[0] in adapters
    }
    facts = {name: value for name, value in record.facts.items() if name != FACT}
    if adapters:
        facts[FACT] = adapters
    after = replace(record, files=tuple(sorted({*kept, *new})), facts=facts)
    # If this is interrupted, the next run keeps the adapters from before, and changes them again.
    replace(after.unfinished(record), facts=record.facts).write(repository)
    place_files(new, staged, repository)
    delete_files(set(record.files) - set(after.files), repository)
    set_parameter(config, adapters)  # before the record is finished: an interrupted run is then repeated
    after.write(repository)


def keep_adapters(job: Job, repository: Path) -> Outcome:
    """Give a system that was assembled anew the adapters that it had. Raise UserError if one does not fit any more."""
    record = read_record(job.system, repository)
    adapters = record.facts.get(FACT, {}) if record else {}
    if record and record.recipe == UNFINISHED:  # a change of adapters was interrupted
        adapters = {name: own for name, own in adapters.items() if is_whole(repository / job.system / FOLDER / name)}
    if not adapters:
        return Outcome()
    names = " and ".join(f"{job.system}:{name}" for name in adapters)
    if job.task != TASK or job.format == "neuron":
        raise UserError(f"{names} would be lost, because {job.task} ({job.format}) has no adapters: remove them first")
    from export.recipes.language import adapters as adapter_files

    version, folders = job.folder / job.system / "1", []
    for name in adapters:
        folders.append(job.folder / job.system / FOLDER / name)
        adapter_files.write(f"{job.system}:{name}", repository / job.system / FOLDER / name, folders[-1], version)
    if job.format in OPENVINO.formats:
        adapter_files.write_graph(job.system, version, version, folders)
    if (config := job.folder / job.system / "config.pbtxt").exists():  # otherwise it is in git, and stays as it is
        set_parameter(config, adapters)
    return Outcome(f"adapters {' '.join(adapters)}", {FACT: adapters})


def is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (CONFIG, WEIGHTS))


def set_parameter(config: Path | None, names: Iterable[str]) -> None:
    """Write the adapters' names into a config.pbtxt, from which the gateway knows them."""
    if config is None:
        return
    text, names = LINE.sub("", config.read_text()), " ".join(sorted(names))
    line = f'parameters {{ key: "{PARAMETER}" value {{ string_value: "{names}" }} }}\n' if names else ""
    write_atomically(config, text + line)
