"""Prompts of sentence-transformers: the text that a model expects before every text, or a chat around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.text.chat_template import ChatTemplate
from serving.triton.types import BadRequest

# Optional inputs, with a value for each text: the name of one of the model's prompts, or a prompt of the client's own.
NAME, OWN = "prompt_name", "prompt"


class Prompts:
    """A model's prompts, in a file with the fields of config_sentence_transformers.json, and its chat template."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.by_name: dict[str, str] = content.get("prompts", {})
        default = content.get("default_prompt_name") or ""
        self.default = self.by_name.get(default, "")
        numbers: dict[str, int] = content.get("adapters", {})
        self.adapter_numbers = numbers | {"": numbers.get(default, 0)}
        self.chat = Chat(**content["chat"]) if "chat" in content else None

    def named(self, names: list[str]) -> list[str]:
        """Return the prompts of these names; an empty name stands for the default."""
        prompts = self.by_name | {"": self.default}
        return [prompts[name] for name in self.known(names)]

    def adapters(self, names: list[str]) -> list[int]:
        """Return the number of the adapter that each name chooses, or 0."""
        return [self.adapter_numbers.get(name, 0) for name in self.known(names)]

    def known(self, names: list[str]) -> list[str]:
        """Return the alternative of each row that counts. Raise BadRequest if the model has none of them."""
        known = []
        for row, name in enumerate(names):
            own = next((choice for choice in alternatives(name) if not choice or choice in self.by_name), None)
            if own is None:
                all_names = ", ".join(sorted(self.by_name)) or "none"
                raise BadRequest(
                    f"input '{NAME}': row {row} has an unknown name; this model's prompts: {all_names}", NAME
                )
            known.append(own)
        return known


def alternatives(name: str) -> list[str]:
    """Return the names that | separates. The first one that the model has counts."""
    return name.split("|")


class Chat:
    """The chat that a model expects instead of texts: a message for each, after its prompt as the system's message."""

    def __init__(
        self, template: str, special_tokens: dict[str, Any], roles: list[str], parts: bool, variables: dict[str, Any]
    ) -> None:
        """Take the template and its variables. `parts`: it expects the content of a message as a list of parts."""
        self.template = ChatTemplate(template, special_tokens)
        self.roles, self.parts, self.variables = roles, parts, variables

    def text(self, name: str, prompt: str, *texts: str) -> str:
        """Return the chat as one text. Raise BadRequest that names this input if the template fails."""
        contents = [*([("system", prompt)] if prompt else []), *zip(self.roles, texts, strict=True)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.parts else text}
            for role, text in contents
        ]
        return self.template.rendered(name, messages, self.variables)
