"""Prompts of sentence-transformers: the text that a model expects before every text."""

from __future__ import annotations

import json
from pathlib import Path

from shared.errors import BadRequest

# Optional inputs, with a value for each text: the name of one of the model's prompts, or a prompt of the client's own.
NAME, OWN = "prompt_name", "prompt"


class Prompts:
    """A model's prompts, in a file with the fields of config_sentence_transformers.json."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.by_name: dict[str, str] = content.get("prompts", {})
        self.default = self.by_name.get(content.get("default_prompt_name") or "", "")

    def named(self, names: list[str]) -> list[str]:
        """Return the prompts of these names; an empty name stands for the default."""
        for row, name in enumerate(names):
            if name and name not in self.by_name:
                known = ", ".join(sorted(self.by_name)) or "none"
                raise BadRequest(f"input '{NAME}': row {row} has an unknown name; this model's prompts: {known}")
        return [self.by_name[name] if name else self.default for name in names]
