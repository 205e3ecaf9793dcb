"""Write a checkpoint's chat templates, and find the form of calls and of reasoning that they ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Text of a template -> the family of its calls (gateway/text/tool_calls.py). The first that a template has counts.
FAMILIES = {
    "<|channel|>": "harmony",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
    "<|tool_call>": "gemma4",
    "```json": "deepseek",
    "<｜tool▁call▁begin｜>": "deepseek_v31",
    "[ARGS]": "mistral_args",
    "[TOOL_CALLS]": "mistral",
    "<|tool|>": "phi",
    "functools": "phi",
    "<|tool_call|>": "granite",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    '"parameters": dictionary of argument': "llama3",
}
REASONING = {"<|channel|>": "harmony", "<|channel>": "gemma4", "[THINK]": "mistral", "</think>": "think"}
QUESTION = [{"role": "user", "content": "Which battery fits?"}]


def write_chat_templates(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the templates that transformers would use, under its names. A checkpoint may have one more for tools."""
    for name, source in templates(tokenizer).items():
        file = folder / {"default": "chat_template", "tool_use": "additional_chat_templates/tool_use"}[name]
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".jinja").write_text(source)


def templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    own = tokenizer.chat_template or {}
    own = own if isinstance(own, dict) else {"default": own}
    return {name: own[name] for name in ("default", "tool_use") if name in own}


def chat_parameters(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the parameters of config.pbtxt from which the gateway knows how to read answers."""
    own = templates(tokenizer)
    with_tools, plain = own.get("tool_use", own.get("default", "")), own.get("default", "")
    family = first(FAMILIES, with_tools) if re.search(r"\btools\b", with_tools) else ""
    reasoning = first(REASONING, plain)
    if reasoning == "think" and opens_reasoning(tokenizer):
        reasoning = "think_opened"
    return {name: value for name, value in (("tool_parser", family), ("reasoning", reasoning)) if value}


def chat_summary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a line for the terminal about what chats with the model can have."""
    if not templates(tokenizer):
        return "no chat template, so chats are refused"
    names = {"tool_parser": "tools", "reasoning": "reasoning"}
    found = [f"{names[name]} ({form})" for name, form in chat_parameters(tokenizer).items()]
    return f"chats with {' and '.join(found)}" if found else "chats without tools or reasoning"


def first(markers: dict[str, str], text: str) -> str:
    return next((value for marker, value in markers.items() if marker in text), "")


def opens_reasoning(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the prompt of a chat ends with the beginning of the model's reasoning."""
    try:
        prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template raises anything
        return False
    return str(prompt).rstrip().endswith("<think>")
