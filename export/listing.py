"""List every system, small ones first, or show some with their weights and tensors (make models LIST=1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from export.added_adapters import FACT
from export.catalogue import CATALOGUE, SMALL_MODELS, SYSTEMS, System, find_system
from export.drafts import FACT as DRAFT
from export.record import Record, read_records
from export.sources.source import Package, source_of
from triton_transformers.cli import out
from triton_transformers.model_config import CONFIGS, ModelConfig, Tensor, load_config, with_steps
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.table import ENCODERS, TASKS
from triton_transformers.tasks.task import Encoder

LARGE = 1.0  # GB of weights
WITHOUT_HUB = "Their weights come with the packages that `make` installs"
SMALL = "From the Hugging Face Hub, most named for their task"
BIG = "From the Hugging Face Hub, with more than 1 GB of weights"
YOURS = "Your own"
HINTS = (
    ("make models LIST=1 SYSTEM=name", "show its weights, licence and tensors"),
    ("make add SYSTEM=name", "assemble it and serve it"),
    ("make add SYSTEM=name HF_MODEL=organisation/model", "the same for any other model of the Hub"),
    ("make remove SYSTEM=name", "delete it"),
)


class Row(NamedTuple):
    name: str
    about: str
    group: str
    weights: str = ""
    download: str = ""  # the size of the weights
    size: int | None = None  # in bytes on disk; None: not assembled
    also: tuple[str, ...] = ()  # other models that clients may call


def print_list(settings: Settings, names: Collection[str] = (), loaded: Collection[str] = ()) -> None:
    """Print a line for each system, or all about those of some names. `loaded` has the models of the server."""
    repository = settings.model_repository
    listed = [*rows(repository)]
    if names:
        for name in names:
            row = next((row for row in listed if name in (row.name, *row.also)), None)
            if row is None:
                raise UserError(f"there is no system {name}: `make models LIST=1` lists them")
            print_details(row, repository, loaded)
        return
    width = max(len(row.name) for row in listed)
    out.print(f"[dim]{'system':<{width}}  {'download':<8}  what it does[/]")
    for group in (WITHOUT_HUB, SMALL, BIG, YOURS):
        rows_of_group = [row for row in listed if row.group == group]
        if rows_of_group:
            out.print(f"\n{group}:")
        for row in rows_of_group:
            state = "loaded" if row.name in loaded else row.download if row.size is None else "on disk"
            out.print(f"{row.name:<{width}}  {state:<8}  {row.about}", markup=False)
    out.print()
    for command, purpose in HINTS:
        out.print(f"{command:<{max(len(command) for command, _ in HINTS)}}  {purpose}")


def print_details(row: Row, repository: Path, loaded: Collection[str]) -> None:
    """Print a system's weights and state, its other models, and its tensors."""
    state = f"on disk, {decimal(row.size)}" if row.size is not None else "not assembled"
    lines = {
        "does": [row.about],
        "weights": [row.weights],
        "state": [f"loaded, {state}" if row.name in loaded else state],
        "models": [row.name, *row.also],
        **tensors(row.name, repository),
    }
    out.print(f"[bold]{row.name}[/]")
    for label, texts in lines.items():
        for number, text in enumerate(filter(None, texts)):
            out.print(f"  {'' if number else label:<8}  {text}", markup=False)
    out.print()


def rows(repository: Path) -> Iterator[Row]:
    """Yield the catalogue, then the systems made from HF_MODEL or SOURCE, then the user's own models."""
    records = {record.system: record for record in read_records(repository)}
    for system in (*CATALOGUE, *SMALL_MODELS):
        record = records.get(system.name)
        weights = f"{system.source}, {system.gigabytes:g} GB, {system.licence}"
        if record and record.source != str(system.source):
            weights = record.source  # the user's own weights, whose licence we do not know
        size = record.size(repository) if record and record.is_current(repository) else None
        about = system.about or TASKS[system.task].purpose
        yield Row(system.name, about, group(system), weights, f"{system.gigabytes:g} GB", size, system.companions)
    for record in records.values():
        if record.system not in SYSTEMS:
            parts = [record.task, record.format, *(f"adapter {name}" for name in record.facts.get(FACT, ()))]
            if draft := record.facts.get(DRAFT):
                parts.append(f"draft {source_of(draft)}")
            yield Row(record.system, ", ".join(parts), YOURS, record.source, size=record.size(repository))
    for model in own_models(repository, list(records.values())):
        files = (path for path in (repository / model).rglob("*") if path.is_file())
        yield Row(model, "your own configuration", YOURS, size=sum(path.stat().st_size for path in files))


def group(system: System) -> str:
    """Return the heading under which a system of the catalogue is listed."""
    if isinstance(system.source, Package):
        return WITHOUT_HUB
    return BIG if system.gigabytes > LARGE else SMALL


def own_models(repository: Path, records: list[Record]) -> Iterator[str]:
    known = {model for record in records for model in record.models}
    for system in SYSTEMS.values():
        for name in system.names:
            known.update(with_steps(name, repository))
    for config in sorted(repository.glob("*/config.pbtxt")):
        if config.parent.name not in known:
            yield config.parent.name


def expected_config(inputs: Iterable[str], encoder: Encoder) -> ModelConfig:
    """Return the tensors of a text system that is not assembled and has no config.pbtxt in git."""
    texts = [
        Tensor(name, "STRING", (1,), optional=encoder.second_is_optional and n == 1) for n, name in enumerate(inputs)
    ]
    outputs = [
        Tensor(name, data_type, tuple(axis if isinstance(axis, int) else -1 for axis in axes))
        for name, (data_type, axes) in encoder.ensemble_outputs.items()
    ]
    return ModelConfig(max_batch_size=1, inputs=tuple(texts), outputs=tuple(outputs))


def tensors(model: str, repository: Path) -> dict[str, list[str]]:
    """Return the model's inputs and outputs in the notation of clients, such as `output__0 FP32 [N,384]`."""
    config = load_config(model, repository)
    system = find_system(model)
    if system and not config.inputs:
        if encoder := ENCODERS.get(system.task):
            config = expected_config(TASKS[system.task].inputs, encoder)
        elif TASKS[system.task].kind == "generation":
            config = load_config("falcon7b", CONFIGS)  # the recipe writes the same one

    def spelled(tensor: Tensor) -> str:
        shape = [*(["N"] if config.max_batch_size else []), *map(str, tensor.dims)]
        optional = ", optional" if tensor.optional else ""
        return f"{tensor.name} {tensor.data_type.replace('STRING', 'BYTES')} [{','.join(shape)}]{optional}"

    return {"inputs": [*map(spelled, config.inputs)], "outputs": [*map(spelled, config.outputs)]}
