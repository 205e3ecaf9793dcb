"""List every system with its tensors, its size on disk, and whether it is loaded (make models LIST=1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from export.added_adapters import FACT
from export.catalogue import CATALOGUE, SMALL_MODELS, SYSTEMS, find_system
from export.drafts import FACT as DRAFT
from export.record import Record, read_records
from export.sources.source import source_of
from triton_transformers.cli import out
from triton_transformers.model_config import CONFIGS, ModelConfig, Tensor, load_config, with_steps
from triton_transformers.settings import Settings
from triton_transformers.tasks.table import ENCODERS, TASKS
from triton_transformers.tasks.task import Encoder

WIDTH = 80
SMALL_WIDTH = 140  # of the table with one line for each task


class Row(NamedTuple):
    name: str
    about: str
    weights: str = ""
    size: int | None = None  # in bytes on disk; None: not assembled


def print_list(settings: Settings, loaded: Collection[str] = ()) -> None:
    """Print each system: its state, weights and tensors. `loaded` has the models that the server answers for."""
    repository = settings.model_repository
    page = out if out.is_terminal else Console(width=WIDTH, highlight=False, emoji=False)
    for row in rows(repository):
        title = Table.grid(expand=True)
        title.add_column()
        title.add_column(justify="right")
        title.add_row(f"[bold]{row.name}[/]", state(row, loaded))
        lines = filter(None, (row.about, row.weights, interface(row.name, repository)))
        details = Padding(escape("\n".join(lines)), (0, 0, 1, 2))
        page.print(title, details, width=min(WIDTH, page.width), soft_wrap=False)
    page.print("One small model for each task of transformers' pipelines, named for it (docs/pipelines.md):\n")
    page.print(small_models(repository, loaded), width=min(SMALL_WIDTH, page.width))
    out.print(f"\nModels are in {repository}. Inputs in parentheses are optional.")
    out.print("Assemble and serve one: make add SYSTEM=name")
    out.print("Any other model: make add SYSTEM=name HF_MODEL=organisation/model")
    out.print("Delete one: make remove SYSTEM=name")


def state(row: Row, loaded: Collection[str]) -> str:
    if row.size is None:
        return "[dim]not assembled[/]"
    size = f"on disk, {decimal(row.size)}"
    return f"[green]loaded[/], {size}" if row.name in loaded else size


def small_models(repository: Path, loaded: Collection[str]) -> Table:
    """Return a line for each task: its model, the size and licence, and its state if it is assembled."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for is_source in (False, False, False, True, False):
        table.add_column(no_wrap=not is_source)  # only sources get less room than they need
    records = {record.system: record for record in read_records(repository)}
    for system in SMALL_MODELS:
        record = records.get(system.name)
        in_place = record and record.is_current(repository)
        shown = "loaded" if system.name in loaded else "on disk" if in_place else ""
        source = Text(record.source if record else str(system.source), no_wrap=True, overflow="ellipsis")
        table.add_row(f"[bold]{system.name}[/]", f"{system.gigabytes:g} GB", system.licence, source, shown)
    return table


def rows(repository: Path) -> Iterator[Row]:
    """Yield the catalogue, then the systems made from HF_MODEL or SOURCE, then the user's own models."""
    records = {record.system: record for record in read_records(repository)}
    for system in CATALOGUE:
        record = records.get(system.name)
        weights = f"{system.source}, {system.gigabytes:g} GB, {system.licence}"
        if record and record.source != str(system.source):
            weights = record.source  # the user's own weights, whose licence we do not know
        about = "; ".join([system.about, *(f"with {name}" for name in system.companions)])
        size = record.size(repository) if record and record.is_current(repository) else None
        yield Row(system.name, about, weights, size)
    for record in records.values():
        if record.system not in SYSTEMS:
            parts = [record.task, record.format, *(f"adapter {name}" for name in record.facts.get(FACT, ()))]
            if draft := record.facts.get(DRAFT):
                parts.append(f"draft {source_of(draft)}")
            about = ", ".join(parts)
            yield Row(record.system, about, record.source, record.size(repository))
    for model in own_models(repository, list(records.values())):
        files = (path for path in (repository / model).rglob("*") if path.is_file())
        yield Row(model, "your own", size=sum(path.stat().st_size for path in files))


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


def interface(model: str, repository: Path) -> str:
    """Return the model's tensors in the notation of clients: input_text BYTES [N,1] → output__0 FP32 [N,384]."""
    config = load_config(model, repository)
    system = find_system(model)
    if system and not config.inputs:
        if encoder := ENCODERS.get(system.task):
            config = expected_config(TASKS[system.task].inputs, encoder)
        elif TASKS[system.task].kind == "generation":
            config = load_config("falcon7b", CONFIGS)  # the recipe writes the same one

    def spelled(tensor: Tensor) -> str:
        shape = [*(["N"] if config.max_batch_size else []), *map(str, tensor.dims)]
        text = f"{tensor.name} {tensor.data_type.replace('STRING', 'BYTES')} [{','.join(shape)}]"
        return f"({text})" if tensor.optional else text

    return " → ".join(", ".join(map(spelled, tensors)) for tensors in (config.inputs, config.outputs) if tensors)
