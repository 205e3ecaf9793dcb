"""make generate: PROMPT, and how a served language model goes on."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.common.cli import err, run
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton, TritonError

USUAL = "gpt2_ensemble"
DEFAULT = "embedding"  # SYSTEM's, which is about comparisons
TIMEOUT_S = 600  # a large model on a CPU


def main() -> None:
    settings = Settings.load()
    if not settings["PROMPT"]:
        raise UserError('nothing to continue: make generate PROMPT="My dog is cute, but"')
    tokens = settings.integer("TOKENS", minimum=1)
    triton = Triton(settings.url("TRITON_HTTP_PORT"))
    if not triton.live():
        raise UserError(f'no server at {triton.url}: make up SYSTEMS="{USUAL}"')
    model, inputs = chosen(triton, settings["SYSTEM"])
    err.print(f"[dim]{model}[/]")
    show(settings["PROMPT"], pieces(triton, model, inputs, settings["PROMPT"], tokens))


def show(prompt: str, continuation: Iterator[str]) -> None:
    """As it comes. The line ends however that ends, so that what is said of an interrupt has one of its own."""
    try:
        print(prompt, end="", flush=True)
        for piece in continuation:
            print(piece, end="", flush=True)
    finally:
        print()


def chosen(triton: Triton, system: str) -> tuple[str, set[str]]:
    """The model that is asked, and its inputs: SYSTEM, or the usual one where it says none that is for generating."""
    model = USUAL if system == DEFAULT else system
    try:
        config = triton.config(model)
    except TritonError as error:
        if error.status is None:  # it did not answer at all
            raise
        raise UserError(f'{model} is not loaded: make up SYSTEMS="{model}", or say another with SYSTEM=') from None
    inputs = {tensor["name"] for tensor in config["input"]}
    if not inputs & {"TEXT", "prompt"} or "TYPE_STRING" not in {tensor["data_type"] for tensor in config["output"]}:
        raise UserError(f"SYSTEM={model} continues no text")
    return model, inputs


def pieces(triton: Triton, model: str, inputs: set[str], prompt: str, tokens: int) -> Iterator[str]:
    if "prompt" in inputs:
        yield ask(triton, model, "prompt", prompt, tokens).removeprefix(prompt)
    elif "max_new_tokens" in inputs:
        yield ask(triton, model, "TEXT", prompt, tokens)
    else:
        yield from one_by_one(triton, model, prompt, tokens)


def one_by_one(triton: Triton, model: str, text: str, tokens: int) -> Iterator[str]:
    """A token a call, each with all the text before it, until the model ends the text: with a token of no text."""
    for _ in range(tokens):
        piece = ask(triton, model, "TEXT", text)
        if not piece:
            return
        text += piece
        yield piece


def ask(triton: Triton, model: str, name: str, text: str, tokens: int | None = None) -> str:
    inputs = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}]
    if tokens is not None:
        inputs.append({"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [tokens]})
    return triton.infer(model, {"inputs": inputs}, TIMEOUT_S)["outputs"][0]["data"][0]


if __name__ == "__main__":
    run(main)
