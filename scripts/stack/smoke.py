"""make smoke: an example request to each of SYSTEMS, made of its own configuration. Ready alone proves little."""

from __future__ import annotations

import math

from rich.markup import escape

from scripts.common.cli import out, run
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton, TritonError

TEXT = "Dynamic batching in one sentence, 안녕하세요"


def main() -> int:
    settings = Settings.load()
    triton = Triton(settings.url("TRITON_HTTP_PORT"))
    failed = 0
    for name in settings.words("SYSTEMS"):
        wrong = attempt(triton, name)
        out.print(f"[red]failed[/]  {name}: {escape(wrong)}" if wrong else f"[green]ok[/]      {name}")
        failed += bool(wrong)
    if failed:
        raise UserError(f"{failed} request(s) failed against {triton.url}; is the stack up? (`make status`)")
    return 0


def attempt(triton: Triton, name: str) -> str:
    """What is wrong, or nothing."""
    try:
        configs = triton.composing(name)
        inputs = request(configs[name], configs)
        if configs[name].get("model_transaction_policy", {}).get("decoupled"):
            pieces = triton.stream(name, {each["name"]: each["data"][0] for each in inputs})
            return "" if pieces else "an answer without a piece"
        return check(triton.infer(name, {"inputs": inputs})["outputs"])
    except TritonError as error:
        return str(error)


def request(config: dict, composing: dict[str, dict]) -> list[dict]:
    """Its inputs, of two rows where it takes several. Of those that may be left out, one if there are no others."""
    inputs = config["input"]
    needed = [each for each in inputs if not each.get("optional")] or inputs[:1]
    needed += [each for each in inputs if each["name"] == "max_new_tokens"]
    return [example(each, config["max_batch_size"] > 0, text(composing)) for each in needed]


def text(composing: dict[str, dict]) -> str:
    """With the word to be filled in, where there is one."""
    masks = (config.get("parameters", {}).get("exactly_one") for config in composing.values())
    return " ".join([TEXT, *(mask["string_value"] for mask in masks if mask)])


def example(tensor: dict, batched: bool, text: str) -> dict:
    dims = [int(size) if int(size) > 0 else 8 for size in tensor["dims"]]
    shape = [2, *dims] if batched else dims
    kind = tensor["data_type"].removeprefix("TYPE_")
    value = text if kind == "STRING" else 1
    data = [value] * math.prod(shape)
    return {"name": tensor["name"], "shape": shape, "datatype": kind.replace("STRING", "BYTES"), "data": data}


def check(outputs: list[dict]) -> str:
    for output in outputs:
        if len(output["data"]) != math.prod(output["shape"]):
            return f"{output['name']} has {len(output['data'])} elements, but the shape {output['shape']}"
        if any(isinstance(value, float) and not math.isfinite(value) for value in output["data"]):
            return f"{output['name']} is not all numbers"
    return "" if outputs else "an answer without outputs"


if __name__ == "__main__":
    run(main)
