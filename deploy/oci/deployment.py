"""deployment.toml: what is to be deployed. All that is wrong or missing in it is said at once."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from scripts.common.settings import UserError
from scripts.stack.docker.slim import PROFILES

AUTH = ("config", "resource_principal")
# The registry has two addresses in each region.
REGISTRY = r"([a-z0-9-]+\.ocir\.io|ocir\.[a-z0-9-]+\.oci\.[a-z0-9.-]+)"
IMAGE = re.compile(REGISTRY + r"/[a-z0-9_-]+(/[a-z0-9._-]+)+:[\w][\w.-]*(@sha256:[0-9a-f]{64})?", re.ASCII)
# So plain that it can stand in a path, a tag or a line on the terminal.
NAME = re.compile(r"\w[\w .-]{0,254}", re.ASCII)
SYSTEM = re.compile(r"[A-Za-z0-9_][\w.-]*")
# What a command needs of the file; of the rest, what is empty or wrong is not said.
TO_ASK = ("account.",)
TO_FIND = ("account.", "deployment.name", "deployment.compartment_id", "models.systems", "wait.")


@dataclass(frozen=True)
class Account:
    auth: str = "config"
    config_file: str = "~/.oci/config"
    profile: str = "DEFAULT"
    region: str = ""
    endpoint: str = ""


@dataclass(frozen=True)
class Place:
    name: str
    compartment_id: str
    project_id: str
    description: str = ""


@dataclass(frozen=True)
class Models:
    systems: list[str]
    bucket: str = ""


@dataclass(frozen=True)
class Container:
    image: str
    profile: str = "cpu"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Instances:
    shape: str
    ocpus: float = 0
    memory_gb: float = 0
    count: int = 1
    bandwidth_mbps: int = 10
    subnet_id: str = ""

    @property
    def flexible(self) -> bool:
        return self.shape.endswith(".Flex")


@dataclass(frozen=True)
class Logs:
    group_id: str = ""
    access_id: str = ""
    predict_id: str = ""


@dataclass(frozen=True)
class Wait:
    minutes: float = 60
    poll_seconds: float = 10


@dataclass(frozen=True)
class Deployment:
    deployment: Place
    models: Models
    container: Container
    instances: Instances
    account: Account = field(default_factory=Account)
    logs: Logs = field(default_factory=Logs)
    tags: dict[str, str] = field(default_factory=dict)
    wait: Wait = field(default_factory=Wait)

    @property
    def name(self) -> str:
        return self.deployment.name


def read(path: Path, needed: tuple[str, ...] = ("",)) -> Deployment:
    """`needed`: what the names of the settings begin with."""
    table = parsed(path)
    wrong = Wrong()
    sections = {
        name: wrong.section(name, kind, table.pop(name, {})) for name, kind in get_type_hints(Deployment).items()
    }
    wrong.said += [f"[{name}]: there is no such section" for name in table]
    deployment = Deployment(**sections)
    found = [problem for problem in problems(deployment) if problem.startswith(needed)]
    wrong.said += [problem for problem in found if problem.split(" ")[0] not in wrong.named]
    if wrong.said:
        raise UserError(f"{path} cannot be used as it is:\n" + "\n".join(f"  {each}" for each in wrong.said))
    return deployment


def parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"DEPLOYMENT={path}: there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None


class Wrong:
    """What is said of the file, and of which settings, so that nothing is said twice of one."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.named: set[str] = set()

    def say(self, setting: str, what: str) -> None:
        self.said.append(f"{setting} {what}")
        self.named.add(setting)

    def section(self, name: str, kind: Any, values: Any) -> Any:
        if get_origin(kind) is dict:
            return self.value(f"[{name}]", kind, values)
        if not isinstance(values, dict):
            self.say(f"[{name}]", "is a section")
            values = {}
        hints = get_type_hints(kind)
        for unknown in [key for key in values if key not in hints]:
            meant = difflib.get_close_matches(unknown, [key for key in hints if key not in values], n=1)
            self.say(f"{name}.{unknown}", "is no setting" + "".join(f": is it {key}?" for key in meant))
            self.named |= {f"{name}.{key}" for key in meant}
        given = {}
        for each in fields(kind):
            if each.name in values:
                given[each.name] = self.value(f"{name}.{each.name}", hints[each.name], values[each.name])
            elif each.default is MISSING and each.default_factory is MISSING:
                given[each.name] = empty(hints[each.name])  # of which the checks below say what it is for
        return kind(**given)

    def value(self, setting: str, kind: Any, value: Any) -> Any:
        if of_kind(value, kind):
            return value
        self.say(setting, f"= {value!r}: must be {NOUNS[get_origin(kind) or kind]}")
        return empty(kind)


NOUNS = {str: "a text", int: "a whole number", float: "a number", list: "a list of texts", dict: "a table of texts"}


def of_kind(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(of_kind(each, get_args(kind)[0]) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(of_kind(each, get_args(kind)[1]) for each in value.values())
    return isinstance(value, kind)


def empty(kind: Any) -> Any:
    return (get_origin(kind) or kind)()


def problems(deployment: Deployment) -> Iterator[str]:
    """Each begins with the setting's name."""
    place, container, instances = deployment.deployment, deployment.container, deployment.instances
    yield from identifiers(deployment)
    if not NAME.fullmatch(place.name):
        yield f"deployment.name = '{place.name}': must be 1 to 255 letters, digits, blanks, '_', '-' and '.'"
    if not deployment.models.systems:
        yield "models.systems is empty: name at least one, as in SYSTEMS"
    for name in deployment.models.systems:
        if not SYSTEM.fullmatch(name):
            yield f"models.systems holds '{name}', which is no name of a system"
    if len(set(deployment.models.systems)) < len(deployment.models.systems):
        yield "models.systems names one twice"
    if not IMAGE.fullmatch(container.image):
        yield f"container.image = '{container.image}': must be <region>.ocir.io/<namespace>/<repository>:<tag>"
    yield from one_of("container.profile", container.profile, PROFILES)
    yield from one_of("account.auth", deployment.account.auth, AUTH)
    if not instances.shape:
        yield "instances.shape is empty: `oci data-science model-deployment-shape list` names them"
    elif container.profile == "cuda" and "GPU" not in instances.shape:
        yield f"instances.shape = '{instances.shape}' has no GPU, which container.profile = 'cuda' wants"
    yield from numbers(deployment)


def identifiers(deployment: Deployment) -> Iterator[str]:
    place, logs = deployment.deployment, deployment.logs
    for setting, value, kinds, needed in (
        ("deployment.compartment_id", place.compartment_id, ("compartment", "tenancy"), True),
        ("deployment.project_id", place.project_id, ("datascienceproject",), True),
        ("instances.subnet_id", deployment.instances.subnet_id, ("subnet",), False),
        ("logs.group_id", logs.group_id, ("loggroup",), bool(logs.access_id or logs.predict_id)),
        ("logs.access_id", logs.access_id, ("log",), False),
        ("logs.predict_id", logs.predict_id, ("log",), False),
    ):
        like = f"ocid1.{kinds[0]}..."
        if needed and not value:
            yield f"{setting} is empty: it is needed, as {like}"
        elif value and not re.fullmatch(rf"ocid1\.({'|'.join(kinds)})\.\S+", value):
            yield f"{setting} = '{value}': must be {like}"
    if logs.group_id and not (logs.access_id or logs.predict_id):
        yield "logs.group_id says where, and logs.access_id and logs.predict_id are empty: say at least one"


def one_of(setting: str, value: str, choices: tuple[str, ...]) -> Iterator[str]:
    if value not in choices:
        yield f"{setting} = '{value}': must be one of {', '.join(choices)}"


def numbers(deployment: Deployment) -> Iterator[str]:
    instances, wait = deployment.instances, deployment.wait
    for setting, value, least, asked in (
        ("instances.ocpus", instances.ocpus, 1, instances.flexible),
        ("instances.memory_gb", instances.memory_gb, 1, instances.flexible),
        ("instances.count", instances.count, 1, True),
        ("instances.bandwidth_mbps", instances.bandwidth_mbps, 10, True),
        ("wait.minutes", wait.minutes, 1, True),
        ("wait.poll_seconds", wait.poll_seconds, 0.1, True),
    ):
        if asked and not least <= value < math.inf:
            yield f"{setting} = {value}: must be at least {least}"
