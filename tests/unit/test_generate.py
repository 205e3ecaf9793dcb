"""make generate, before it asks a server anything, and what it makes of a model's configuration."""

from __future__ import annotations

import pytest

from scripts.common.ports import free_ports
from scripts.common.settings import UserError
from scripts.common.triton import Triton, TritonError
from scripts.stack.generate import chosen, main, pieces, show

GPT2 = {"gpt2_ensemble": ("TEXT",), "gpt2_generate": ("TEXT", "max_new_tokens")}
FALCON = {"falcon7b": ("prompt", "max_new_tokens", "temperature")}


class StandIn(Triton):
    """Stands in for models of seven billion parameters: their inputs, and an answer of as many tokens as asked for."""

    def __init__(self, served: dict[str, tuple[str, ...]]) -> None:
        super().__init__("http://nowhere")
        self.served = served

    def config(self, model: str) -> dict:
        if model not in self.served:
            raise TritonError(f"Request for unknown model: '{model}' is not found", 400)
        answer = "TYPE_INT64" if model == "gpt2_encoder" else "TYPE_STRING"
        return {"input": [{"name": name} for name in self.served[model]], "output": [{"data_type": answer}]}

    def infer(self, model: str, request: dict, version: str = "") -> dict:
        text, *count = [tensor["data"][0] for tensor in request["inputs"]]
        answer = (" on" if len(text) < 12 else "") if not count else " on" * count[0]
        return {"outputs": [{"data": [text + answer if model in FALCON else answer]}]}


@pytest.mark.parametrize(
    ("system", "served", "model"),
    [
        ("falcon7b", GPT2 | FALCON, "falcon7b"),
        ("gpt2_generate", GPT2, "gpt2_generate"),
        ("embedding", GPT2 | {"embedding": ("input_text",)}, "gpt2_ensemble"),
        ("embedding", GPT2, "gpt2_ensemble"),
    ],
)
def test_who_is_asked(system, served, model):
    assert chosen(StandIn(served), system) == (model, set(served[model]))


def test_nobody_to_ask():
    with pytest.raises(UserError, match='gpt2_ensemble is not loaded: make up SYSTEMS="gpt2_ensemble"'):
        chosen(StandIn({"embedding": ("input_text",)}), "embedding")


def test_a_step_that_answers_no_text():
    with pytest.raises(UserError, match="SYSTEM=gpt2_encoder continues no text"):
        chosen(StandIn({"gpt2_encoder": ("TEXT",)}), "gpt2_encoder")


@pytest.mark.parametrize("model", ["gpt2_ensemble", "gpt2_generate", "falcon7b"])
def test_only_what_is_new_is_said(model):
    triton = StandIn(GPT2 | FALCON)
    said = list(pieces(triton, *chosen(triton, model), prompt="go", tokens=3))
    assert "".join(said) == " on on on"
    assert len(said) == (3 if model == "gpt2_ensemble" else 1)


def test_the_loop_ends_where_the_model_ends_the_text():
    triton = StandIn(GPT2)
    assert list(pieces(triton, *chosen(triton, "gpt2_ensemble"), prompt="go", tokens=50)) == [" on"] * 4


def test_an_interrupt_leaves_the_line_ended(capsys):
    def interrupted():
        yield " on"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show("go", interrupted())
    assert capsys.readouterr().out == "go on\n"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"PROMPT": ""}, 'nothing to continue: make generate PROMPT="'),
        ({"PROMPT": "go", "TOKENS": "many"}, "TOKENS=many: must be a whole number"),
        ({"PROMPT": "go", "TOKENS": "0"}, "TOKENS=0: must be at least 1"),
        ({"PROMPT": "go"}, 'no server at http://127.0.0.1:{port}: make up SYSTEMS="gpt2_ensemble"'),
    ],
)
def test_what_is_missing_is_said(monkeypatch, settings, reason):
    (port,) = free_ports(1)
    for name, value in ({"TRITON_HTTP_PORT": str(port), "BIND_ADDRESS": "127.0.0.1"} | settings).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        main()
    assert reason.format(port=port) in str(error.value)
