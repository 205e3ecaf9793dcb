"""A language model takes chats if its checkpoint has a chat template, and Triton's configuration shows that."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CHAT = {"name": "messages", "data_type": "TYPE_STRING", "dims": [1], "optional": True}
PROMPT = {"name": "prompt", "data_type": "TYPE_STRING", "dims": [-1], "optional": True}


@pytest.mark.parametrize(
    ("model", "files", "declared", "added"),
    [
        ("mine", ["mine/1/chat_template.jinja"], [PROMPT], [CHAT]),
        ("mine", ["mine_stream/1/chat_template.jinja"], [PROMPT], []),
        ("mine", ["mine/1/additional_chat_templates/tool_use.jinja"], [PROMPT], []),
        ("mine_stream", ["mine/1/chat_template.jinja"], [PROMPT], [CHAT]),
        # A model that an earlier release assembled, or that a comparison reloads.
        ("mine", ["mine/1/chat_template.jinja"], [PROMPT, CHAT | {"dims": ["1"]}], []),
    ],
)
def test_model_with_a_chat_template_has_the_input_for_chats(
    pb_utils: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    model: str,
    files: list[str],
    declared: list[dict[str, Any]],
    added: list[dict[str, Any]],
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("{{ messages }}")
    backend = importlib.import_module("serving.backends.generation").TritonPythonModel
    monkeypatch.setattr(pb_utils, "get_model_dir", lambda: str(tmp_path / model / "1"), raising=False)
    parameters = {"weights": {"string_value": "mine"}} if model == "mine_stream" else {}
    inputs: list[dict[str, Any]] = []
    config = {"name": model, "input": declared, "parameters": parameters}
    backend.auto_complete_config(SimpleNamespace(as_dict=lambda: config, add_input=inputs.append))
    assert inputs == added
