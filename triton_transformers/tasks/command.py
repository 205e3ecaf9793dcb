"""Write the shell commands that send a system its first requests through the gateway.

This is the one place that knows the route and the body of each kind of system: `make add` and the page print them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_transformers.model_config import ModelConfig, Tensor, load_config, with_steps
from triton_transformers.protocol import IMAGE
from triton_transformers.tasks.examples import TRAITS
from triton_transformers.tasks.generation import QUESTION
from triton_transformers.tasks.kinds import abilities
from triton_transformers.tasks.table import TASKS, task_of_tensors
from triton_transformers.tasks.task import PIPELINE, Task
from triton_transformers.tasks.vectors import CAPTIONS, QUERY, TEXTS

# The kinds of fields that are files -> the name of a file in the command.
FILES = {"image": "image.jpg", "images": "image.jpg", "audio": "speech.wav", "video": "clip.mp4"}
ONE_FILE = ("image", "audio", "video")  # the kinds of fields that are one file
# A text of a body that stands for the file in base64.
PLACE = re.compile(r'"@(\w+\.\w+)"')
# The values of other fields of pipelines, by their names.
SAMPLES: dict[str, Any] = {
    "question": "What is the total?",
    "query": "How old is Ada?",
    "table": {"name": ["Ada", "Grace"], "age": ["36", "85"]},
    "word_boxes": [["Total", [10, 10, 90, 30]], ["12.50", [100, 10, 190, 30]]],
    "state": "I was charged twice and want a refund.",
    "questions": {"refund": {"type": "noul", "instructions": "Is a refund requested?"}},
}
# Ability of a system -> the route that most clients know, and the body of an example. The best of a system's is first.
REQUESTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    # Like the page's box. At OpenAI's default temperature, 1, a small model answers nonsense.
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0},
    ),
    "generation": ("/v1/completions", {"prompt": "The three laws of robotics are", "max_tokens": 64}),
    "embedding": ("/v1/embeddings", {"input": [QUERY, TEXTS[0]]}),
    # A system without one vector for each text has another type of vectors.
    "sparse": ("/v1/embeddings", {"input": [QUERY, TEXTS[0]], "embedding_type": "sparse"}),
    "multi": ("/v1/embeddings", {"input": [QUERY, TEXTS[0]], "embedding_type": "multi"}),
    "rerank": ("/v1/rerank", {"query": QUERY, "documents": TEXTS[:2]}),
    "classify": ("/v1/classify", {"input": "I love this film."}),
}


def commands(name: str, config: ModelConfig, mask: str, chats: bool, url: str, needs_key: bool) -> list[str]:
    """Return commands that send a system its first requests, the best one first; none if a shell cannot write any.

    `mask` is the model's mask token, "" if it has none. A command with a file expects it in the current folder.
    """
    key = ' \\\n  -H "Authorization: Bearer $API_KEY"' if needs_key else ""

    def command(route: str, body: Mapping[str, Any], output: str = "") -> str:
        curl = f"curl {shlex.quote(url + route)}{output} \\\n  -H 'Content-Type: application/json'{key}"
        return with_body(curl, body)

    if config.backend == PIPELINE:
        task = TASKS.get(config.parameters["task"], Task(""))
        # A terminal must not get the sound.
        output = " --output speech.wav" if task.hub.file else ""
        return [command(f"/models/{name}", pipeline_body(config, task), output)]
    inputs, able = [tensor.name for tensor in config.inputs], abilities_of(config, chats)
    if able[:1] == ["embedding"] and IMAGE in inputs:
        return [command("/v1/embeddings", {"model": name, "input": [CAPTIONS[0], {"image": "@image.jpg"}]})]
    if requests := [request for ability, request in REQUESTS.items() if ability in able]:
        return [command(route, {"model": name, **body}) for route, body in requests]
    values = {} if config.decoupled else examples(config, mask)
    if not values:
        return []
    sent = {own: "@image.jpg" if own == IMAGE else text for own, text in values.items()}
    if task_of(config):
        return [command(f"/models/{name}", {"inputs": sent if len(sent) > 1 else next(iter(sent.values()))})]
    return [command(f"/try/{name}", {"inputs": sent})]


def first_command(system: str, repository: Path, profile: str, url: str, needs_key: bool) -> str:
    """Return the best command for a system of the model repository, "" if there is none."""
    configs = {model: load_config(model, repository, profile) for model in with_steps(system, repository, profile)}
    mask = next(filter(None, (config.parameters.get("exactly_one", "") for config in configs.values())), "")
    chats = (repository / system / "1/chat_template.jinja").is_file()
    return next(iter(commands(system, configs[system], mask, chats, url, needs_key)), "")


def abilities_of(config: ModelConfig, chats: bool) -> list[str]:
    """Return the abilities of a system that is no pipeline, with `chat` if its chat template is known to exist."""
    shapes = {tensor.name: tensor.dims for tensor in config.outputs}
    own = abilities([tensor.name for tensor in config.inputs], shapes, config.max_batch_size)
    return [*own, *(["chat"] if chats else [])]


def task_of(config: ModelConfig) -> str:
    """Return the task that the tensors of a system name, or ""."""
    return task_of_tensors(*(frozenset(tensor.name for tensor in side) for side in (config.inputs, config.outputs)))


def pipeline_body(config: ModelConfig, task: Task) -> dict[str, Any]:
    """Return a row of a pipeline, with the parameters that each request needs."""
    kinds = dict(field.split("=") for field in config.parameters["fields"].split(","))
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        if kind not in FILES:
            values[name] = SAMPLES.get(name, task.example)
        elif name != "assets" and "chat" not in kinds.values():  # otherwise a text is enough
            values[name] = [f"@{FILES[kind]}"] * 2 if kind == "images" else f"@{FILES[kind]}"
    parameters = {**task.required, **json.loads(config.parameters.get(TRAITS, "{}")).get("parameters", {})}
    body = {"inputs": values if len(values) > 1 else next(iter(values.values()))}
    return body | ({"parameters": parameters} if parameters else {})


def with_body(curl: str, body: Mapping[str, Any]) -> str:
    """Return a command that sends the body as JSON. A text that is @ and the name of a file stands for the file."""
    sent = json.dumps(body, ensure_ascii=False)
    files = PLACE.findall(sent)
    if not files:
        return f"{curl} \\\n  -d {shlex.quote(sent)}"
    # printf reads backslashes and percent signs.
    form = PLACE.sub('"%s"', sent.replace("\\", "\\\\").replace("%", "%%"))
    return "printf {} {} |\n  {} -d @-".format(
        shlex.quote(form), " ".join(f'"$(base64 -w0 {file})"' for file in files), curl
    )


# --- the inputs that a text or an image can fill ----------------------------------------------------------------------


def examples(config: ModelConfig, mask: str) -> dict[str, str]:
    """Return a text for each input that a system requires, "" for an image; none if it requires other tensors, too."""
    task = TASKS.get(task_of(config))
    known = task.inputs if task else {}
    default = f"{mask} {QUERY}".strip()
    return {
        tensor.name: "" if tensor.name == IMAGE else (known.get(tensor.name) or default).replace("{mask}", mask)
        for tensor in text_inputs(config)
    }


def text_inputs(config: ModelConfig) -> list[Tensor]:
    """Return the inputs that texts can fill: the required ones, or the first of texts if all are optional.

    There are none if the system requires other tensors, too.
    """
    required = [tensor for tensor in config.inputs if not tensor.optional]
    inputs = required or [tensor for tensor in config.inputs if tensor.is_text][:1]
    return inputs if all(tensor.is_text for tensor in inputs) else []
