"""Write the shell command that sends a system on backend `pipeline` its first request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from triton_transformers.tasks.task import TEXT

# The kinds of fields that are files -> the name of a file in the command.
FILES = {"image": "image.jpg", "images": "image.jpg", "audio": "speech.wav", "video": "clip.mp4"}
ONE_FILE = ("image", "audio", "video")  # the kinds of fields that are one file
# The values of other fields, by their names.
SAMPLES: dict[str, Any] = {
    "question": "What is the total?",
    "query": "How old is Ada?",
    "table": {"name": ["Ada", "Grace"], "age": ["36", "85"]},
    "word_boxes": [["Total", [10, 10, 90, 30]], ["12.50", [100, 10, 190, 30]]],
    "state": "I was charged twice and want a refund.",
    "questions": {"refund": {"type": "noul", "instructions": "Is a refund requested?"}},
}


def example_command(curl: str, fields: Mapping[str, str], parameters: Mapping[str, Any], text: str = TEXT) -> str:
    """Return a command that sends values of these fields, each with its kind, and the parameters with this curl."""
    values, files = {}, []
    for name, kind in fields.items():
        if kind not in FILES:
            values[name] = SAMPLES.get(name, text)
        elif name != "assets" and "chat" not in fields.values():  # otherwise a text is enough
            values[name] = ["%s", "%s"] if kind == "images" else "%s"
            files += [FILES[kind]] * (2 if kind == "images" else 1)
    body = {"inputs": values if len(values) > 1 else next(iter(values.values()))}
    sent = json.dumps(body | ({"parameters": parameters} if parameters else {}), ensure_ascii=False)
    if not files:
        return f"{curl} \\\n  -d {shlex.quote(sent)}"
    # printf would read the backslashes before quotes in a text.
    sent = shlex.quote(sent.replace("\\", "\\\\"))
    return "printf {} {} |\n  {} -d @-".format(sent, " ".join(f'"$(base64 -w0 {file})"' for file in files), curl)
