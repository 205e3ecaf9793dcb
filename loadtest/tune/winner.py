"""The files of a winner: configs/<profile>.pbtxt of each model that differs, which Triton prefers to config.pbtxt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from triton_transformers.model_config import CONFIGS, digest_line, find_config, tuned_configs
from triton_transformers.settings import UserError
from triton_transformers.triton import Config

HEAD = "# `make tune` wrote this file. Triton uses it instead of config.pbtxt: to return to that, delete this file.\n"
# On a model whose profile has a file already, as embedding's encoder on AWS Neuron.
HEAD_OF_OWN = "# `make tune` wrote this file in place of another one.\n"


def winner_files(
    changes: Mapping[str, Config], originals: Mapping[str, Config], repository: Path, profile: str
) -> tuple[dict[str, str], str]:
    """Return the text of each file, by its path in the model repository, and the difference to the files in force."""
    files, diff = {}, ""
    for model, fields in changes.items():
        path = find_config(model, repository, profile)
        name = f"{model}/configs/{profile}.pbtxt"
        try:
            before = text_format.Parse(path.read_text(encoding="utf-8") if path else "", ModelConfig())
            text = printed(changed(before, fields, originals[model]))
        except (text_format.ParseError, json_format.ParseError, UnicodeDecodeError) as error:
            raise UserError(f"{path or model}: this configuration cannot be written anew ({error})") from None
        is_own = path and path.parent.name == "configs" and path not in tuned_configs(repository / model)
        files[name] = (HEAD_OF_OWN if is_own else HEAD + digest_line(repository / model)) + text
        shown = path.relative_to(repository if path.is_relative_to(repository) else CONFIGS) if path else "/dev/null"
        lines, new_lines = printed(before).splitlines(keepends=True), text.splitlines(keepends=True)
        diff += "".join(difflib.unified_diff(lines, new_lines, str(shown), name))
    return files, diff


def changed(before: Any, fields: Config, original: Config) -> Any:
    """Return the configuration with these fields, and without those that are None. `original` is the server's.

    Triton completes what a file leaves out. Leave it out here too, because it follows from the model's weights.
    """
    written = json_format.MessageToDict(before, preserving_proto_field_name=True)
    required = [] if written else ["name", "platform", "backend", "max_batch_size"]
    # Triton completes a configuration without inputs or outputs, and then turns dynamic batching on.
    if fields.get("dynamic_batching", ...) is None and not (written.get("input") and written.get("output")):
        required += ["max_batch_size", "input", "output"]
    parameters = written.get("parameters", {}) | fields.get("parameters", {})
    merged = written | {key: original[key] for key in required if original.get(key)} | fields
    merged |= {"parameters": parameters} if parameters else {}
    return json_format.ParseDict({key: value for key, value in merged.items() if value is not None}, ModelConfig())


def printed(config: ModelConfig) -> str:
    text: str = text_format.MessageToString(config, as_utf8=True, use_short_repeated_primitives=True)
    return text
