"""What a model asks for, read from its config.pbtxt: a deployment has no address that would say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.common.model_config import COMMENT, config_of
from scripts.common.settings import UserError
from scripts.models.assemble import CONFIGS

SIDES = {side: re.compile(rf"\b{side}\s*:?\s*(?=[\[{{])") for side in ("input", "output")}
CLOSES = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: str
    dims: int  # how many
    optional: bool


@dataclass(frozen=True)
class Asked:
    inputs: list[Tensor]
    outputs: list[Tensor]
    batched: bool
    decoupled: bool

    @property
    def names(self) -> set[str]:
        return {each.name for each in self.inputs}

    @property
    def continues(self) -> bool:
        """A text."""
        return bool(self.names & {"TEXT", "prompt"}) and any(each.kind == "STRING" for each in self.outputs)

    def text(self, text: str) -> dict | None:
        """A request with one text; None where a model asks for something else."""
        needed = [each for each in self.inputs if not each.optional]
        if [each.kind for each in needed] != ["STRING"]:
            return None
        shape = [1] * (needed[0].dims + self.batched)
        return {"inputs": [{"name": needed[0].name, "shape": shape, "datatype": "BYTES", "data": [text]}]}


def of(model: str, repository: Path) -> Asked:
    path = config_of(model, repository, CONFIGS)
    if not path:
        raise UserError(f"SYSTEM={model}: there is no config.pbtxt of it in {repository}, which says what it asks for")
    return parsed(COMMENT.sub("", path.read_text()))


def parsed(config: str) -> Asked:
    batch = re.search(r"\bmax_batch_size\s*:\s*(\d+)", config)
    return Asked(
        inputs=[tensor(block) for block in blocks(config, SIDES["input"])],
        outputs=[tensor(block) for block in blocks(config, SIDES["output"])],
        batched=bool(batch and int(batch[1])),
        decoupled=bool(re.search(r"\bdecoupled\s*:\s*true", config, re.IGNORECASE)),
    )


def blocks(config: str, side: re.Pattern) -> Iterator[str]:
    """Each tensor's { ... }, whether they are in one list or said one by one."""
    for found in side.finditer(config):
        whole = enclosed(config, found.end())
        if whole.startswith("{"):
            yield whole
            continue
        at = whole.find("{")
        while at >= 0:
            yield (block := enclosed(whole, at))
            at = whole.find("{", at + len(block))


def enclosed(text: str, start: int) -> str:
    """From a bracket to the one that closes it."""
    opens, depth = text[start], 0
    for at in range(start, len(text)):
        depth += (text[at] == opens) - (text[at] == CLOSES[opens])
        if not depth:
            return text[start : at + 1]
    return text[start:]


def tensor(block: str) -> Tensor:
    name = re.search(r"""\bname\s*:\s*["']([^"']+)""", block)
    kind = re.search(r"\bdata_type\s*:\s*TYPE_(\w+)", block)
    dims = re.search(r"\bdims\s*:\s*\[([^\]]*)\]", block)
    return Tensor(
        name=name[1] if name else "",
        kind=kind[1] if kind else "",
        dims=len(re.findall(r"-?\d+", dims[1])) if dims else len(re.findall(r"\bdims\s*:", block)),
        optional=bool(re.search(r"\boptional\s*:\s*true", block, re.IGNORECASE)),
    )
