"""Read deployment.toml, which describes a deployment, and report everything that is wrong with it at once."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from triton_transformers.settings import UserError

# A registry has two addresses in each region.
REGISTRY = r"([a-z0-9-]+\.ocir\.io|ocir\.[a-z0-9-]+\.oci\.[a-z0-9.-]+)"
IMAGE = rf"^{REGISTRY}/[a-z0-9_-]+(/[a-z0-9._-]+)+:[A-Za-z0-9_][A-Za-z0-9_.-]*(@sha256:[0-9a-f]{{64}})?$"
# The keys that a command needs begin with one of these. Other keys may be empty or out of range.
TO_ASK = ("account.",)
TO_FIND = ("account.", "deployment.name", "deployment.compartment_id", "models.systems", "wait.")


def matching(pattern: str, rule: str) -> Any:
    return Field("", pattern=pattern, description=f"must be {rule}")


def ocid(kind: str, optional: bool = True) -> Any:
    """Return a field that holds the identifier of an Oracle Cloud resource."""
    pattern = rf"^ocid1\.({kind})\.\S+$"
    example = f"ocid1.{kind.partition('|')[0]}..."
    return matching(f"^$|{pattern}" if optional else pattern, f"an identifier like {example}")


# A missing section. Pydantic checks it, so that its required keys are reported.
EMPTY: Any = {}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class Account(Section):
    auth: Literal["config", "resource_principal"] = "config"
    config_file: str = "~/.oci/config"
    profile: str = "DEFAULT"
    region: str = ""
    endpoint: str = ""


class Place(Section):
    # Plain enough for a path, a tag and a line on the terminal.
    name: str = matching(
        r"^[A-Za-z0-9_][A-Za-z0-9_ .-]{0,254}$",
        "1 to 255 letters, digits, blanks, '_', '-' and '.', the first a letter, a digit or '_'",
    )
    compartment_id: str = ocid("compartment|tenancy", optional=False)
    project_id: str = ocid("datascienceproject", optional=False)
    description: str = ""


class Models(Section):
    systems: list[str] = Field(
        [], min_length=1, description="must be a list of systems, as in SYSTEMS (docs/models.md)"
    )
    bucket: str = ""

    @field_validator("systems")
    @classmethod
    def check_names(cls, systems: list[str]) -> list[str]:
        if wrong := [name for name in systems if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII)]:
            raise ValueError(f"{', '.join(map(repr, wrong))} cannot be the name of a system")
        if len(set(systems)) < len(systems):
            raise ValueError("must name each system once")
        return systems


class Container(Section):
    image: str = matching(IMAGE, "<region>.ocir.io/<namespace>/<repository>:<tag>")
    profile: Literal["cpu", "cuda"] = "cpu"
    entrypoint: list[str] = []
    cmd: list[str] = []
    environment: dict[str, str] = {}


class Instances(Section):
    shape: str = Field(
        "", min_length=1, description="must be one that `oci data-science model-deployment-shape list` lists"
    )
    ocpus: float = Field(0, allow_inf_nan=False)
    memory_gb: float = Field(0, allow_inf_nan=False)
    count: int = Field(1, ge=1)
    bandwidth_mbps: int = Field(10, ge=10)
    subnet_id: str = ocid("subnet")

    @property
    def flexible(self) -> bool:
        return self.shape.endswith(".Flex")

    @field_validator("shape")
    @classmethod
    def check_gpu(cls, shape: str, info: ValidationInfo) -> str:
        """Raise for a shape without a GPU that is to run PROFILE=cuda. The context is the whole table."""
        container = (info.context or {}).get("container")
        if isinstance(container, dict) and container.get("profile") == "cuda" and "GPU" not in shape:
            raise ValueError("has no GPU, which container.profile = 'cuda' requires")
        return shape

    @field_validator("ocpus", "memory_gb")
    @classmethod
    def check_size(cls, size: float, info: ValidationInfo) -> float:
        """Raise if a shape without a size of its own gets none."""
        if info.data.get("shape", "").endswith(".Flex") and size < 1:
            raise ValueError("must be at least 1")
        return size


class Logs(Section):
    access_id: str = ocid("log")
    predict_id: str = ocid("log")
    group_id: str = ocid("loggroup")

    @field_validator("group_id")
    @classmethod
    def check_group(cls, group_id: str, info: ValidationInfo) -> str:
        has_log = any(info.data.get(name, True) for name in ("access_id", "predict_id"))
        if has_log and not group_id:
            raise ValueError("set it to the group of logs.access_id and logs.predict_id, ocid1.loggroup...")
        if group_id and not has_log:
            raise ValueError("set logs.access_id or logs.predict_id too, or leave all empty")
        return group_id


class Wait(Section):
    minutes: float = Field(60, ge=1, allow_inf_nan=False)
    poll_seconds: float = Field(10, ge=0.1, allow_inf_nan=False)


class Deployment(Section):
    account: Account = EMPTY
    deployment: Place = EMPTY
    models: Models = EMPTY
    container: Container = EMPTY
    instances: Instances = EMPTY
    logs: Logs = EMPTY
    tags: dict[str, str] = {}
    wait: Wait = EMPTY

    @property
    def name(self) -> str:
        return self.deployment.name


def read(path: Path, needed: tuple[str, ...] = ("",)) -> Deployment:
    """Return the deployment that a file describes, checked as far as a command needs it."""
    table = parse(path)
    try:
        return Deployment.model_validate(table, context=table)
    except ValidationError as error:
        lines = list(problems(error, table, needed))
    if lines:
        raise UserError(f"{path} cannot be used as it is:\n" + "\n".join(f"  {line}" for line in lines))
    sections: dict[str, Any] = {
        name: getattr(field.annotation, "model_construct", dict)(**table.get(name, {}))
        for name, field in Deployment.model_fields.items()
    }
    return Deployment.model_construct(**sections)


def parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"DEPLOYMENT={path}: no such file. Copy deploy/oci/deployment.toml to it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def problems(error: ValidationError, table: dict[str, Any], needed: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each unknown key and wrong type, and for each wrong value of a key that the command needs."""
    errors = error.errors()
    close = {e["loc"]: close_key(e["loc"], table) for e in errors if e["type"] == "extra_forbidden"}
    for problem in errors:
        location, kind = problem["loc"], problem["type"]
        key = ".".join(map(str, location)) if len(location) > 1 else f"[{location[0]}]"
        if kind == "extra_forbidden":
            yield f"{key} is unknown: " + (f"did you mean {close[location]}?" if close[location] else "remove it")
        elif key not in close.values() and (kind.endswith("_type") or key.startswith(needed)):
            yield key + wrong_value(problem)


def close_key(location: tuple[int | str, ...], table: dict[str, Any]) -> str:
    """Return the unset key that an unknown one resembles, or an empty text."""
    section, *names = map(str, location)
    unset = fields_of(section).keys() - table[section].keys() if names else ()
    return next((f"{section}.{close}" for name in names for close in difflib.get_close_matches(name, unset, n=1)), "")


def fields_of(section: str) -> dict[str, FieldInfo]:
    return getattr(Deployment.model_fields[section].annotation, "model_fields", {})


def wrong_value(problem: ErrorDetails) -> str:
    (section, *names), kind, value = problem["loc"], problem["type"], problem["input"]
    field = fields_of(str(section)).get(str(names[0])) if names else None
    if not names:
        rule = "must be a section"
    elif kind == "value_error":
        rule = str(problem["ctx"]["error"])
    elif field and field.description and not kind.endswith("_type"):
        rule = field.description
    else:
        rule = problem["msg"].replace("Input should be", "must be").replace("greater than or equal to", "at least")
    return f" is empty: {rule}" if value in ("", []) else f" = {value!r}: {rule}"
