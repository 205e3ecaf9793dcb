"""Read Triton's model configurations: where a model has one, what it sets, and which models it calls."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from triton_transformers.protocol import called_models
from triton_transformers.settings import ROOT, UserError

# The configurations in git. A model repository elsewhere starts without them.
CONFIGS = ROOT / "model_repository"
# Begins a line of a configs/<profile>.pbtxt that `make tune` made from config.pbtxt.
DIGEST = "# SHA-256 of config.pbtxt: "
# The error message for an unreadable file contains this.
NO_CONFIGURATION = "is not a model configuration"

# The part of Triton's model_config.proto that we read. tritonclient has the whole schema, but a Docker host has no
# tritonclient; a test compares the two.
SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "backend": (17, "string"),
        "default_model_filename": (8, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "repeated ModelInput"),
        "output": (6, "repeated ModelOutput"),
        "ensemble_scheduling": (15, "ModelEnsembling"),
        "parameters": (14, "repeated ParametersEntry"),  # in Triton's schema a map, which reads the same
        "model_transaction_policy": (19, "ModelTransactionPolicy"),
    },
    "ModelInput": {
        "name": (1, "string"),
        "data_type": (2, "DataType"),
        "dims": (4, "repeated int64"),
        "optional": (8, "bool"),
    },
    "ModelOutput": {"name": (1, "string"), "data_type": (2, "DataType"), "dims": (3, "repeated int64")},
    "ModelEnsembling": {"step": (1, "repeated Step")},
    "Step": {"model_name": (1, "string")},
    "ParametersEntry": {"key": (1, "string"), "value": (2, "ModelParameter")},
    "ModelParameter": {"string_value": (1, "string")},
    "ModelTransactionPolicy": {"decoupled": (1, "bool")},
}
# The names of DataType, each at the index that is its number in the schema.
DATA_TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)
# `field [ {...} ]`, which needs no colon. protobuf for Python demands one if it does not know the field. Strings and
# comments are matched first, so that the brackets in them stay as they are.
LIST = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#[^\n]*)|(?<=\w)(\s*\[)""")


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model."""

    name: str
    data_type: str = ""  # STRING, FP32, ...; empty if the configuration has none
    dims: tuple[int, ...] = ()
    optional: bool = False

    @property
    def is_text(self) -> bool:
        return self.data_type == "STRING"


@dataclass(frozen=True)
class ModelConfig:
    """The fields of a config.pbtxt; those that it leaves out are empty."""

    name: str = ""
    platform: str = ""
    backend: str = ""
    default_model_filename: str = ""
    max_batch_size: int = 0
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    steps: tuple[str, ...] = ()  # the models that it calls, each once
    parameters: dict[str, str] = field(default_factory=dict)
    decoupled: bool = False


def find_config(model: str, repository: Path, profile: str = "") -> Path | None:
    """Return the file that configures a model, if there is one: in the repository, else in git.

    Like Triton with --model-config-name, prefer configs/<profile>.pbtxt to config.pbtxt.
    """
    names = [f"configs/{profile}.pbtxt"] if profile else []
    paths = (folder / model / name for folder in (repository, CONFIGS) for name in (*names, "config.pbtxt"))
    return next((path for path in paths if path.is_file()), None)


def digest_line(folder: Path) -> str:
    """Return the line that `make tune` adds to a file that it makes from this model's config.pbtxt."""
    path = folder / "config.pbtxt"
    return f"{DIGEST}{hashlib.sha256(path.read_bytes() if path.exists() else b'').hexdigest()}\n"


def tuned_configs(folder: Path) -> list[Path]:
    """Return the files of a model's folder that `make tune` made from its config.pbtxt."""
    return [path for path in folder.glob("configs/*.pbtxt") if DIGEST.encode() in path.read_bytes()]


def is_outdated(tuned: Path) -> bool:
    """Return whether config.pbtxt was changed after `make tune` made this file from it."""
    return digest_line(tuned.parents[1]).encode() not in tuned.read_bytes()


def check_edits(model: str, repository: Path, profile: str) -> None:
    """Raise UserError if a person edited a config.pbtxt that Triton ignores, because the model was tuned."""
    path = find_config(model, repository, profile)
    if path in tuned_configs(repository / model) and is_outdated(path):
        raise UserError(
            f"{path.parents[1] / 'config.pbtxt'} was changed after `make tune` wrote {path}, which Triton uses "
            f"instead. To use config.pbtxt, delete {path}. To keep both, make the change there, too, and delete the "
            "line with the SHA-256"
        )


def load_config(model: str, repository: Path, profile: str = "") -> ModelConfig:
    """Return a model's configuration, an empty one if it has none."""
    path = find_config(model, repository, profile)
    return read_config(path) if path else ModelConfig()


def with_steps(model: str, repository: Path, profile: str = "") -> list[str]:
    """Return the model and the models that it calls, directly or through another one."""
    models = [model]
    for name in models:  # grows while we iterate
        models += [step for step in load_config(name, repository, profile).steps if step not in models]
    return models


def read_config(path: Path) -> ModelConfig:
    try:
        return parse_config(path.read_text(encoding="utf-8"))
    except text_format.ParseError as error:
        reason = str(error).partition(" : ")[2] or str(error)
        raise UserError(f"{path}, line {error.GetLine() or 1}, {NO_CONFIGURATION}: {reason}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} {NO_CONFIGURATION}: it is not text in UTF-8") from None


@functools.cache
def parse_config(text: str) -> ModelConfig:
    text = LIST.sub(lambda match: match[1] or f":{match[2]}", text)
    message = text_format.Parse(text, _message_class()(), allow_unknown_field=True)
    return from_message(message, {entry.key: entry.value.string_value for entry in message.parameters})


def from_message(message: Any, parameters: Mapping[str, str]) -> ModelConfig:
    """Return the configuration in a message of this schema or of Triton's, whose parameters are of another type."""
    return ModelConfig(
        name=message.name,
        platform=message.platform,
        backend=message.backend,
        default_model_filename=message.default_model_filename,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_tensor(entry, entry.optional) for entry in message.input),
        outputs=tuple(_tensor(entry) for entry in message.output),
        steps=tuple(called_models((step.model_name for step in message.ensemble_scheduling.step), parameters)),
        parameters={**parameters},
        decoupled=message.model_transaction_policy.decoupled,
    )


def _tensor(message: Any, optional: bool = False) -> Tensor:
    data_type = DATA_TYPES[message.data_type] if message.data_type else ""
    return Tensor(message.name, data_type, tuple(message.dims), optional)


@functools.cache
def _message_class() -> Any:
    """Build protobuf's class for SCHEMA, in a pool of its own: tritonclient registers the same names."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    data_type = file.enum_type.add(name="DataType")
    for number, name in enumerate(DATA_TYPES):
        data_type.value.add(name=f"TYPE_{name}", number=number)
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in SCHEMA.items():
        descriptor = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            label = kinds.LABEL_REPEATED if kind.startswith("repeated ") else kinds.LABEL_OPTIONAL
            kind = kind.removeprefix("repeated ")
            entry = descriptor.field.add(name=name, number=number, label=label)
            if kind == "DataType" or kind in SCHEMA:
                entry.type_name = f".inference.{kind}"
                entry.type = kinds.TYPE_ENUM if kind == "DataType" else kinds.TYPE_MESSAGE
            else:
                entry.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
