"""Have a served language model continue PROMPT: make generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from triton_transformers.cli import err, run
from triton_transformers.settings import Settings, UserError
from triton_transformers.triton import Triton, TritonError

# SYSTEM's own default is for comparisons.
DEFAULT_SYSTEM = "gpt2_ensemble"
TIMEOUT_S = 600  # a large model on a CPU


class Server(Protocol):
    """A Triton, or a deployment in a cloud that passes requests on to one."""

    def infer(self, model: str, request: dict, timeout: float) -> dict: ...


def main() -> None:
    settings = Settings.load()
    if not settings.prompt:
        raise UserError('PROMPT is empty: make generate PROMPT="My dog is cute, but"')
    tokens = settings.tokens
    model = settings.system if settings.chosen("SYSTEM") else DEFAULT_SYSTEM
    triton = Triton(settings.url("TRITON_HTTP_PORT"))
    if not triton.live():
        raise UserError(f'no server answers at {triton.url}: make up SYSTEMS="{model}"')
    inputs = prompt_inputs(triton, model)
    err.print(f"[dim]{model}[/]")
    show(settings.prompt, pieces(triton, model, inputs, settings.prompt, tokens))


def show(prompt: str, continuation: Iterator[str]) -> None:
    """Print each piece as it arrives. Always end the line, so that a message after an interrupt has its own."""
    try:
        print(prompt, end="", flush=True)
        for piece in continuation:
            print(piece, end="", flush=True)
    finally:
        print()


def prompt_inputs(triton: Triton, model: str) -> set[str]:
    """Return the names of the model's inputs; raise if it is not loaded or continues no text."""
    try:
        config = triton.config(model)
    except TritonError as error:
        if error.status is None:  # the server did not answer
            raise
        raise UserError(f'{model} is not loaded: make up SYSTEMS="{model}", or set another SYSTEM') from None
    inputs = {tensor["name"] for tensor in config["input"]}
    if not inputs & {"TEXT", "prompt"} or "TYPE_STRING" not in {tensor["data_type"] for tensor in config["output"]}:
        raise UserError(f"SYSTEM={model} continues no text: set a system that generates, such as {DEFAULT_SYSTEM}")
    return inputs


def pieces(server: Server, model: str, inputs: set[str], prompt: str, tokens: int) -> Iterator[str]:
    if "prompt" in inputs:
        yield ask(server, model, "prompt", prompt, tokens).removeprefix(prompt)
    elif "max_new_tokens" in inputs:
        yield ask(server, model, "TEXT", prompt, tokens)
    else:
        yield from one_by_one(server, model, prompt, tokens)


def one_by_one(server: Server, model: str, text: str, tokens: int) -> Iterator[str]:
    """Yield one token per request, each request with the text so far, until the model answers an empty token."""
    for _ in range(tokens):
        piece = ask(server, model, "TEXT", text)
        if not piece:
            return
        text += piece
        yield piece


def ask(server: Server, model: str, name: str, text: str, tokens: int | None = None) -> str:
    inputs = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}]
    if tokens is not None:
        inputs.append({"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [tokens]})
    return server.infer(model, {"inputs": inputs}, TIMEOUT_S)["outputs"][0]["data"][0]


if __name__ == "__main__":
    run(main)
