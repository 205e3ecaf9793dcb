"""`make generate`: the model that it queries, and how it reads the model's configuration."""

from __future__ import annotations

import pytest

from scripts.stack import generate
from scripts.stack.generate import main, pieces, prompt_inputs, show
from triton_transformers.ports import free_ports
from triton_transformers.settings import UserError
from triton_transformers.triton import Triton, TritonError

GPT2 = {"gpt2_ensemble": ("TEXT",), "gpt2_generate": ("TEXT", "max_new_tokens")}
FALCON = {"falcon7b": ("prompt", "max_new_tokens", "temperature")}
EMBEDDING = {"embedding": ("input_text",)}


class TritonStandIn(Triton):
    """Stands in for a Triton with large models: their inputs, and answers of the requested number of tokens."""

    def __init__(self, served: dict[str, tuple[str, ...]]) -> None:
        super().__init__("http://nowhere")
        self.served = served

    def live(self) -> bool:
        return True

    def config(self, model: str) -> dict:
        if model not in self.served:
            raise TritonError(f"Request for unknown model: '{model}' is not found", 400)
        answer = "TYPE_INT64" if model == "gpt2_encoder" else "TYPE_STRING"
        return {"input": [{"name": name} for name in self.served[model]], "output": [{"data_type": answer}]}

    def infer(self, model: str, request: dict, version: str = "") -> dict:
        text, *count = [tensor["data"][0] for tensor in request["inputs"]]
        answer = (" on" if len(text) < 12 else "") if not count else " on" * count[0]
        return {"outputs": [{"data": [text + answer if model in FALCON else answer]}]}


@pytest.fixture
def ask(monkeypatch):
    """Run `make generate` against a stand-in."""

    def run(served: dict[str, tuple[str, ...]], **settings: str) -> None:
        monkeypatch.setattr(generate, "Triton", lambda url: TritonStandIn(served))
        for name, value in ({"PROMPT": "go", "TOKENS": "3"} | settings).items():
            monkeypatch.setenv(name, value)
        main()

    return run


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({}, "gpt2_ensemble"),
        ({"SYSTEM": "falcon7b"}, "falcon7b"),
        ({"SYSTEM": "gpt2_generate"}, "gpt2_generate"),
    ],
)
def test_generate_queries_system_or_gpt2_by_default(ask, capsys, settings, model):
    ask(GPT2 | FALCON | EMBEDDING, **settings)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("go on on on\n", f"{model}\n")


def test_model_that_continues_no_text_is_an_error(ask, monkeypatch, tmp_path):
    """SYSTEM=embedding is also the default; here the user sets it, so GPT-2 must not replace it."""
    with pytest.raises(UserError, match='gpt2_ensemble is not loaded: make up SYSTEMS="gpt2_ensemble"'):
        ask(EMBEDDING)
    with pytest.raises(UserError, match="SYSTEM=embedding continues no text: set a system that generates"):
        ask(GPT2 | EMBEDDING, SYSTEM="embedding")
    with pytest.raises(UserError, match="SYSTEM=gpt2_encoder continues no text"):
        ask({"gpt2_encoder": ("TEXT",)}, SYSTEM="gpt2_encoder")
    monkeypatch.delenv("SYSTEM")
    (tmp_path / ".env").write_text("SYSTEM=embedding\n")
    monkeypatch.setattr("triton_transformers.settings.DOTENV", tmp_path / ".env")
    with pytest.raises(UserError, match="SYSTEM=embedding continues no text"):
        ask(GPT2 | EMBEDDING)


@pytest.mark.parametrize("model", ["gpt2_ensemble", "gpt2_generate", "falcon7b"])
def test_pieces_hold_only_the_continuation(model):
    triton = TritonStandIn(GPT2 | FALCON)
    continuation = list(pieces(triton, model, prompt_inputs(triton, model), prompt="go", tokens=3))
    assert "".join(continuation) == " on on on"
    assert len(continuation) == (3 if model == "gpt2_ensemble" else 1)
    if model == "gpt2_ensemble":  # an empty token ends the loop
        assert list(pieces(triton, model, {"TEXT"}, prompt="go", tokens=50)) == [" on"] * 4


def test_interrupt_ends_the_line(capsys):
    def interrupted():
        yield " on"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show("go", interrupted())
    assert capsys.readouterr().out == "go on\n"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"PROMPT": ""}, 'PROMPT is empty: make generate PROMPT="'),
        ({"PROMPT": "go", "TOKENS": "many"}, "TOKENS=many: must be a whole number"),
        ({"PROMPT": "go", "TOKENS": "0"}, "TOKENS=0: must be at least 1"),
        ({"PROMPT": "go"}, 'no server answers at http://127.0.0.1:{port}: make up SYSTEMS="gpt2_ensemble"'),
    ],
)
def test_missing_or_wrong_setting_is_an_error(monkeypatch, settings, reason):
    (port,) = free_ports(1)
    for name, value in ({"TRITON_HTTP_PORT": str(port), "BIND_ADDRESS": "127.0.0.1"} | settings).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        main()
    assert reason.format(port=port) in str(error.value)
