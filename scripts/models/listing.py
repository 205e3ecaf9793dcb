"""List every system with its tensors, and whether it is in place (make models LIST=1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from scripts.common.cli import out
from scripts.common.model_config import Tensor, load_config, with_steps
from scripts.common.settings import Settings
from scripts.models.catalogue import SYSTEMS, System
from scripts.models.record import Record, read_records
from scripts.models.sources import Hub

WIDTH = 100


@dataclass(frozen=True)
class Row:
    name: str
    about: str
    weights: tuple[str, ...] = ()
    in_place: bool = True


def print_list(settings: Settings) -> None:
    repository = settings.path("MODEL_REPOSITORY")
    table = Table(box=None, padding=(0, 2, 1, 0))
    table.add_column("")
    table.add_column("system", width=22)
    table.add_column("weights", width=33, overflow="fold")
    table.add_column("inputs (optional), → outputs", overflow="fold")
    for row in rows(repository):
        table.add_row(
            "●" if row.in_place else "○",
            f"[bold]{row.name}[/]\n{row.about}",
            "\n".join(row.weights),
            escape("\n".join(interface(row.name, repository))),
        )
    page = out if out.is_terminal else Console(width=WIDTH, highlight=False)
    page.print(table, width=WIDTH, soft_wrap=False)
    out.print(f"● in place in {repository}  ○ to assemble it: `make models SYSTEMS=name`")
    out.print("Any other model: make models SYSTEMS=name HF_MODEL=organisation/model (docs/models.md)")


def rows(repository: Path) -> Iterator[Row]:
    """Yield the catalogue, then the systems made from HF_MODEL or SOURCE, then the user's own models."""
    records = {record.system: record for record in read_records(repository)}
    for system in SYSTEMS.values():
        record = records.get(system.name)
        weights = (*source_lines(system), f"{system.gigabytes:g} GB, {system.licence}")
        if record and record.source != str(system.source):
            weights = (record.source,)  # the user's own weights, whose licence we do not know
        about = "\n".join([system.about, *(f"with {name}" for name in system.companions)])
        yield Row(system.name, about, weights, in_place=bool(record and record.is_current(repository)))
    for record in records.values():
        if record.system not in SYSTEMS:
            files = [repository / file for file in record.files]
            size = decimal(sum(file.stat().st_size for file in files if file.exists()))
            yield Row(record.system, f"{record.task}\n{record.format}", (record.source, size))
    for model in own_models(repository, list(records.values())):
        yield Row(model, "your own")


def source_lines(system: System) -> tuple[str, ...]:
    source = system.source
    if not isinstance(source, Hub):
        return (str(source),)
    return (source.repository, f"@{source.revision[:12]}") if source.revision else (source.repository,)


def own_models(repository: Path, records: list[Record]) -> Iterator[str]:
    known = {model for record in records for model in record.models}
    for system in SYSTEMS.values():
        for name in system.names:
            known.update(with_steps(name, repository))
    for config in sorted(repository.glob("*/config.pbtxt")):
        if config.parent.name not in known:
            yield config.parent.name


def interface(model: str, repository: Path) -> Iterator[str]:
    """Yield the model's tensors in the notation of clients: input_text BYTES [N,1]."""
    config = load_config(model, repository)

    def spelled(tensor: Tensor) -> str:
        shape = [*(["N"] if config.max_batch_size else []), *map(str, tensor.dims)]
        return f"{tensor.name} {tensor.data_type.replace('STRING', 'BYTES')} [{','.join(shape)}]"

    for tensor in config.inputs:
        yield f"({spelled(tensor)})" if tensor.optional else spelled(tensor)
    for tensor in config.outputs:
        yield f"→ {spelled(tensor)}"
