"""Send each of SYSTEMS a request made from its configuration, because ready alone proves little: make smoke."""

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
    failures = 0
    for name in settings.words("SYSTEMS"):
        error = attempt(triton, name)
        out.print(f"[red]failed[/]  {name}: {escape(error)}" if error else f"[green]ok[/]      {name}")
        failures += bool(error)
    if failures:
        raise UserError(f"{failures} request(s) failed against {triton.url}; is the stack up? (`make status`)")
    return 0


def attempt(triton: Triton, name: str) -> str:
    """Send the system a request, and return the error of its response, or nothing."""
    try:
        configs = triton.composing(name)
        inputs = request(configs[name], configs)
        if configs[name].get("model_transaction_policy", {}).get("decoupled"):
            pieces = triton.stream(name, {tensor["name"]: tensor["data"][0] for tensor in inputs})
            return "" if pieces else "the response has no piece"
        return check(triton.infer(name, {"inputs": inputs})["outputs"])
    except TritonError as error:
        return str(error)


def request(config: dict, composing: dict[str, dict]) -> list[dict]:
    """Return its required inputs, or the first one if all are optional, with two rows if the model batches."""
    inputs = config["input"]
    required = [tensor for tensor in inputs if not tensor.get("optional")] or inputs[:1]
    required += [tensor for tensor in inputs if tensor["name"] == "max_new_tokens"]
    return [example(tensor, config["max_batch_size"] > 0, text(composing)) for tensor in required]


def text(composing: dict[str, dict]) -> str:
    """Return the example text, with the mask token that a fill-mask model requires."""
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
    """Return the first error of the outputs, or nothing."""
    for output in outputs:
        if len(output["data"]) != math.prod(output["shape"]):
            return f"{output['name']} has {len(output['data'])} elements, but the shape {output['shape']}"
        if any(isinstance(value, float) and not math.isfinite(value) for value in output["data"]):
            return f"{output['name']} has values that are not finite"
    return "" if outputs else "the response has no outputs"


if __name__ == "__main__":
    run(main)
