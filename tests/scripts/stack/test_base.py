"""The engine of each model, as commands read it from Triton's metrics."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from scripts.stack import base
from scripts.stack.local.stack import LocalStack
from triton_transformers import triton
from triton_transformers.files import Measurement, exclusive
from triton_transformers.settings import Settings
from triton_transformers.triton import batching, engines

# "spam" ran on ONNX Runtime before its newer version and another TRITON_ENGINE; "ham" was unloaded.
PAGE = """\
# HELP transformers_engine 1 for the engine and the precision in use
# TYPE transformers_engine gauge
transformers_engine{model="spam",version="10",engine="openvino",precision="bf16"} 1
transformers_engine{model="spam",version="10",engine="onnxruntime",precision="f32"} 0
transformers_engine{model="spam",version="9",engine="onnxruntime",precision="f32"} 1.000000
transformers_engine{engine="onnxruntime",model="sentiment_encoder",precision="int8",version="1"} 1
transformers_engine{model="ham",version="1",engine="openvino",precision="f32"} 0
transformers_max_batch_size{model="spam",version="1"} 1
"""
GENERATING = {"max_batch_size": 0, "input": [{"name": "text_input"}, {"name": "max_new_tokens"}]}
ENGINES = {"spam": "openvino bf16", "sentiment_encoder": "onnxruntime int8"}


def test_engine_in_use_is_that_of_the_newest_version(monkeypatch):
    monkeypatch.setattr(triton, "metrics_page", lambda url: PAGE)
    assert engines("http://127.0.0.1:9") == ENGINES
    monkeypatch.undo()
    assert engines("http://127.0.0.1:9") == {}  # unknown without metrics


class TritonStandIn:
    """Stands in for a server with three models, one of which did not load."""

    def index(self) -> dict:
        missing = "Internal: failed to load 'gpt2' version 1: the file model.onnx is missing"
        return {"spam": ("READY", ""), "sentiment_encoder": ("READY", ""), "gpt2": ("UNAVAILABLE", missing)}

    def config(self, model: str) -> dict:
        if model == "spam":
            return GENERATING
        return {"max_batch_size": 64, "dynamic_batching": {}}


@pytest.fixture
def stack(monkeypatch, tmp_path) -> LocalStack:
    monkeypatch.setattr(triton, "metrics_page", lambda url: PAGE)
    stack = LocalStack(Settings.load().replace(LOCAL_STATE=str(tmp_path), REPORTS=str(tmp_path), RUNTIME="local"))
    stack.__dict__["triton"] = TritonStandIn()
    return stack


def test_status_shows_engines_in_80_columns(stack, monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr(base, "out", Console(file=printed, width=80))
    monkeypatch.setattr(LocalStack, "print_urls", lambda stack: None)
    assert not stack.print_models()
    lines = {line.split()[0]: line.split()[1:] for line in printed.getvalue().splitlines() if line.strip()}
    assert lines["spam"][:4] == ["ready", "openvino", "bf16", "continuous,"]
    assert lines["sentiment_encoder"][:4] == ["ready", "onnxruntime", "int8", "dynamic,"]
    assert lines["gpt2"][:2] == ["unavailable", "Internal:"]


def test_status_names_a_running_comparison(stack, capsys):
    lock = stack.comparison_lock
    with exclusive(lock, "the test"):
        Measurement("comparison", "spam", "round 1 of 6, dynamic").write(lock)
        stack.print_models()
    running = "A comparison of spam is running (round 1 of 6, dynamic)."
    assert running in " ".join(capsys.readouterr().out.split())
    stack.print_models()
    assert "A comparison" not in capsys.readouterr().out


IMAGES = """
max_batch_size: 8
input [ { name: "image_bytes" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "pooler_output" data_type: TYPE_FP32 dims: [ 8 ] } ]
"""
PIXELS = IMAGES.replace("image_bytes", "pixels").replace("TYPE_STRING", "TYPE_FP32")
FILE = "Put a file of yours as image.jpg into this folder first. Set API_KEY to one of the keys first."


@pytest.mark.parametrize(
    ("config", "is_running", "expected"),
    [
        (IMAGES, True, ["spam runs on openvino bf16", FILE, "Try it on the page", '"Authorization: Bearer $API_KEY"']),
        (
            IMAGES,
            False,
            ["`make up` starts it with spam, too", FILE, "Then try it on the page"],
        ),
        (PIXELS, True, ["`make smoke SYSTEMS=spam` sends spam test requests"]),
    ],
)
def test_person_reads_what_to_do_next_with_an_added_system(stack, capsys, monkeypatch, config, is_running, expected):
    monkeypatch.setattr(LocalStack, "running", lambda stack: is_running)
    stack.settings = stack.settings.replace(
        MODEL_REPOSITORY=stack.settings["LOCAL_STATE"], API_KEYS="a-key-of-the-tests"
    )
    folder = stack.settings.model_repository / "spam"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(config)
    stack.print_first_request("spam")
    printed = " ".join(capsys.readouterr().out.split())
    assert [printed.find(part) for part in expected] == sorted(printed.find(part) for part in expected)
    assert all(part in printed for part in expected)
    assert ("curl http://127.0.0.1:8080/models/spam" in printed) == (config is IMAGES)


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"max_batch_size": 8, "ensemble_scheduling": {"step": []}}, "by its steps"),
        (GENERATING, "continuous, up to 32"),
        (GENERATING | {"parameters": {"max_batch": {"string_value": "1"}}}, "one at a time"),
        (GENERATING | {"parameters": {"engine_model": {"string_value": "spam_stream"}}}, "by spam_stream"),
        ({"max_batch_size": 8, "sequence_batching": {}}, "sequences"),
        ({"max_batch_size": 8, "parameters": {"task": {"string_value": "text-generation"}}}, "off"),
    ],
)
def test_batching_is_named(config, shown):
    assert batching(config) == shown


def test_batches_of_transformers_are_static():
    assert batching(GENERATING, "transformers bfloat16") == "static, up to 32"
    assert batching(GENERATING, "openvino-genai int8") == "continuous, up to 32"


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"spam\nlost\n", "lost               not loaded                      `make up` loads it"),
        (b"\xff\0", "is missing or damaged:"),
        (None, "is missing or damaged:"),
    ],
)
def test_status_shows_what_a_server_should_have_loaded(stack, monkeypatch, capsys, content, shown):
    monkeypatch.setattr(TritonStandIn, "index", lambda triton: {"spam": ("READY", "")})
    stack.served.write(["spam"])
    stack.served.request(["spam"])
    assert stack.print_models()
    assert "not loaded" not in (before := capsys.readouterr().out) and "damaged" not in before
    stack.served.requested_path.unlink()
    if content is not None:
        stack.served.requested_path.write_bytes(content)
    assert not stack.print_models()
    assert " ".join(shown.split()) in " ".join(capsys.readouterr().out.split())
