"""make smoke: each system's published request against the running server. It infers: ready alone proves little."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.markup import escape

from scripts.cli import out, run
from scripts.models.catalogue import system
from scripts.settings import Settings, UserError
from scripts.triton import Triton, TritonError


@dataclass(frozen=True)
class Probe:
    """One request and what is right about its answer; check() returns what is wrong, or nothing."""

    model: str
    request: dict
    check: Callable[[dict[str, dict]], str]


def texts(*values: str) -> dict:
    data = [[value] for value in values]
    return {"inputs": [{"name": "input_text", "shape": [len(values), 1], "datatype": "BYTES", "data": data}]}


def check_embedding(outputs: dict[str, dict]) -> str:
    output = outputs["output__0"]
    rows, width = output["shape"]
    if rows != 2:
        return f"{rows} rows for 2 texts"
    norms = [math.sqrt(sum(x * x for x in output["data"][row * width : (row + 1) * width])) for row in range(rows)]
    return "" if all(abs(norm - 1) < 1e-3 for norm in norms) else f"rows are not normalised: {norms}"


def check_tokens(outputs: dict[str, dict]) -> str:
    ids, mask = outputs["input_ids"], outputs["attention_mask"]
    if ids["shape"] != mask["shape"] or ids["shape"][0] != 2:
        return f"input_ids {ids['shape']}, attention_mask {mask['shape']} for 2 texts"
    return "" if sum(mask["data"]) > 2 else "no tokens"


PROBES = {
    "embedding": (
        Probe("embedding", texts("Dynamic batching in one sentence.", "안녕하세요"), check_embedding),
        Probe("tokenizer", texts("Dynamic batching in one sentence.", "안녕하세요"), check_tokens),
    )
}


def main() -> int:
    settings = Settings.load()
    triton = Triton(settings.url("TRITON_HTTP_PORT"))
    failed = 0
    for name in settings.words("SYSTEMS"):
        for probe in PROBES[system(name).name]:
            wrong = attempt(triton, probe)
            said = f"[red]failed[/]  {probe.model}: {escape(wrong)}" if wrong else f"[green]ok[/]      {probe.model}"
            out.print(said)
            failed += bool(wrong)
    if failed:
        raise UserError(f"{failed} request(s) failed against {triton.url}; is the stack up? (`make status`)")
    return 0


def attempt(triton: Triton, probe: Probe) -> str:
    try:
        answer = triton.infer(probe.model, probe.request, version="1")
    except TritonError as error:
        return str(error)
    return probe.check({output["name"]: output for output in answer["outputs"]})


if __name__ == "__main__":
    run(main)
