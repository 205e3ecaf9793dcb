"""Settings: .env.example holds every name with its default; .env overrides it, and make's command line overrides both.

RULES holds the check of each setting. Reading the settings checks all of them, so a command refuses a wrong one before
it does anything.

An exported variable of the user's shell is no setting, because names such as USERS or TAG collide with other programs'.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import io
import ipaddress
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from dotenv import set_key
from dotenv.parser import parse_stream

# Names the environment variables that are settings. The Makefile puts the names of its command line here; containers
# and tests, whose whole environment is ours, set it to "*".
NAMES = "TRITON_SETTINGS_NAMES"
# These prefixes belong to this stack and its programs, so such a variable is a setting wherever it comes from.
PREFIXES = (
    "COMPOSE_PROJECT_NAME",
    "GATEWAY_",
    "GRAFANA_",
    "HF_",
    "LOADTEST_",
    "LOCUST_",
    "NEURON_",
    "OCI_",
    "PROMETHEUS_",
    "TRITON_",
)

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / ".env.example"
VERSIONS = ROOT / "versions.env"
# The tests name another file, so that the developer's settings do not reach them.
DOTENV = ROOT / (os.environ.get("TRITON_SETTINGS_FILE") or ".env")
PROFILES = ("cpu", "cuda", "neuron")
# Begins a key of API_KEYS that is given as its SHA-256 digest.
DIGEST = "sha256:"
# The modes of a comparison, in the order in which reports show them.
MODES = ("none", "instances", "dynamic")
# `make up` generates these if they are empty.
SECRETS = ("TRITON_ADMIN_KEY", "GRAFANA_ADMIN_PASSWORD")
# No message may show the value of these settings.
PRIVATE = {"API_KEYS"}


class UserError(Exception):
    """A mistake that the user can correct. The message states what is wrong, where, and what to do."""


# Return the value of a setting's text, or raise ValueError with the end of the message.
Rule = Callable[[str], Any]


def _number(kind: type[int] | type[float], noun: str, minimum: float) -> Rule:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"must be {noun}") from None
        if not -math.inf < value < math.inf:
            raise ValueError(f"must be {noun}")
        if value < minimum:
            raise ValueError(f"must be at least {minimum:g}")
        return value

    return read


def _integer(minimum: int = 0) -> Rule:
    return _number(int, "a whole number", minimum)


def _decimal(minimum: float = 0.0) -> Rule:
    return _number(float, "a number", minimum)


def _port(text: str) -> int:
    port = cast(int, _integer(1)(text))
    if port > 65535:
        raise ValueError("a port is at most 65535")
    return port


def _choice(*choices: str) -> Rule:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return read


def _pattern(pattern: str, noun: str) -> Rule:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {noun}")
        return text

    return read


def _ipv4(text: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        raise ValueError("must be an IPv4 address") from None


def _interval(text: str) -> tuple[float, float]:
    try:
        minimum, *rest = (float(part) for part in text.split(","))
        (maximum,) = rest or (minimum,)
    except ValueError:
        raise ValueError("must be a number of seconds, or minimum and maximum as in 0.1,0.4") from None
    if not 0 <= minimum <= maximum < float("inf"):
        raise ValueError("the minimum must be at least 0 and at most the maximum")
    return minimum, maximum


def _modes(text: str) -> tuple[str, ...]:
    chosen = text.split()
    if not set(chosen) <= set(MODES):
        raise ValueError(f"must be some of {', '.join(MODES)}, separated by spaces")
    if "dynamic" not in chosen or len(set(chosen)) < 2:
        raise ValueError("must have dynamic, and none or instances to compare it with")
    return tuple(mode for mode in MODES if mode in chosen)


def _size(text: str) -> int:
    match = re.fullmatch(r"(?i)(\d+(?:\.\d+)?)(?:b|([kmg])b?)?", text)
    if not match:
        raise ValueError("must be a size, as in 512m or 8g")
    return int(float(match[1]) * 1024 ** " kmg".index((match[2] or " ").lower()))


def _body_size(text: str) -> int:
    if size := _size(text):
        return size
    raise ValueError("must be larger than 0")


def _keys(text: str) -> tuple[bytes, ...]:
    """Return the SHA-256 digest of each key."""
    digests = []
    for key in text.split():
        if re.fullmatch(rf"{DIGEST}[0-9a-fA-F]{{64}}", key):
            digests.append(bytes.fromhex(key.removeprefix(DIGEST)))
        elif re.fullmatch(rf"(?!{DIGEST})[!-~]{{16,}}", key):
            digests.append(hashlib.sha256(key.encode()).digest())
        else:
            raise ValueError(
                "each key, separated by spaces, must have at least 16 characters of ASCII (`openssl rand -hex 24` "
                f"prints one), or be {DIGEST} and the 64 digits of its digest"
            )
    return tuple(digests)


def _path(text: str) -> Path:
    try:
        return ROOT / Path(text).expanduser()
    except RuntimeError:
        raise ValueError("unknown user; write the path in full") from None


_flag = _choice("0", "1")
_cpus = _pattern(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*", "a list of CPUs, as in 0 or 0-3 or 0,2")

# TASK and FORMAT are missing: the catalogue of models knows their values.
RULES: dict[str, Rule] = {
    "RUNTIME": _choice("docker", "local"),
    "COMPOSE_PROJECT_NAME": _pattern(r"[a-z0-9]+([_-][a-z0-9]+)*", "lower-case letters and digits, with single dashes"),
    "PROFILE": _choice(*PROFILES),
    **dict.fromkeys(
        ("LIST", "TRACE", "TRUST_REMOTE_CODE", "TRITON_SHARED_MEMORY", "DRY_RUN", "PUSH", "APPLY", "RESUME"), _flag
    ),
    **dict.fromkeys(
        ("MODEL_REPOSITORY", "SOURCE", "PACKAGE", "REPORTS", "LOCAL_STATE", "GRAFANA_HOME", "DEPLOYMENT", "REQUEST"),
        _path,
    ),
    **dict.fromkeys(("BUILD_PIP_CONF", "BUILD_CA", "TLS_CERT", "TLS_KEY", "OSV_DATABASE"), _path),
    **dict.fromkeys(("BIND_ADDRESS", "GATEWAY_BIND"), _ipv4),
    "API_KEYS": _keys,
    **dict.fromkeys(("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT", "LOADTEST_METRICS_PORT"), _port),
    **dict.fromkeys(("PROMETHEUS_PORT", "GRAFANA_PORT", "LOCUST_PORT"), _port),
    **dict.fromkeys(("GATEWAY_PORT", "GATEWAY_METRICS_PORT", "TRACE_PORT", "JAEGER_PORT"), _port),
    **dict.fromkeys(("TRITON_CPUS", "LOADTEST_CPUS"), _cpus),
    **dict.fromkeys(("TRITON_SHM_BYTES", "TRITON_LOG_VERBOSE", "WORKERS", "SEED", "NEURON_DEVICES"), _integer()),
    **dict.fromkeys(("EXPORTER_MEMORY", "TRITON_MEMORY", "TRITON_SHM_SIZE"), _size),
    "GATEWAY_BODY": _body_size,
    **dict.fromkeys(("READY_TIMEOUT", "TOKENS", "USERS", "MAX_BATCH"), _integer(1)),
    **dict.fromkeys(("GATEWAY_IN_FLIGHT", "GATEWAY_TEXTS", "TRACE_RATE"), _integer(1)),
    "TRACE_URL": _pattern(r"http://[\w.:-]+(/[\w./-]*)?", "an address as in http://collector:4318/v1/traces"),
    "PROMETHEUS_RETENTION": _pattern(r"(\d+(ms|[smhdwy]))+", "a duration, as in 7d or 12h"),
    "TRITON_ENGINE": _choice("auto", "onnxruntime", "openvino", "openvino-f32", "openvino-bf16"),
    "TRITON_SOURCE": _choice("pypi", "pypi-transformers", "ngc"),
    "WORKLOAD": _choice("mixed", "published"),
    "PROTOCOL": _choice("http", "grpc", "openai"),
    "ROUNDS": _integer(2),
    **dict.fromkeys(("RATE", "SPAWN_RATE", "GATEWAY_TIMEOUT", "SOAK"), _decimal(0.1)),
    "ARRIVALS": _choice("poisson", "constant"),
    **dict.fromkeys(("WINDOW", "MINUTES", "P95", "OVERLOAD"), _decimal(1)),
    **dict.fromkeys(("WARMUP", "MIN_RATIO"), _decimal()),
    "WAIT": _interval,
    "MODES": _modes,
    "NEURON_CHIP": _choice("inf1", "inf2", "trn1"),
}


class Settings(dict[str, str]):
    """The value of every setting."""

    _in_dotenv: frozenset[str] = frozenset()
    _in_environment: frozenset[str] = frozenset()

    @classmethod
    def load(cls, checked: bool = True) -> Settings:
        """Return the settings of this command. Raise UserError for an unknown name or a wrong value.

        Commands that only look at the stack or stop it leave the values unchecked.
        """
        defaults = _read(EXAMPLE)
        environment = {name: os.environ[name] for name in defaults if os.environ.get(name) and _is_setting(name)}
        own = {name: value for name, value in _read(DOTENV).items() if value}
        known = defaults.keys() | _read(VERSIONS).keys()
        if unknown := sorted(own.keys() - known):
            meant = [like for name in unknown for like in _like(name, defaults)]
            hint = f"did you mean {', '.join(meant)}?" if meant else ".env.example lists all settings"
            raise UserError(f".env: unknown setting {', '.join(unknown)}; {hint}")
        for name in sorted(set(os.environ.get(NAMES, "").split()) - known):
            # make's command line may hold variables of its own, so only a name like a setting's is refused.
            if like := _like(name, defaults):
                raise UserError(f"unknown setting {name} on make's command line; did you mean {like[0]}?")
        settings = cls({name: value for name, value in (defaults | own | environment).items() if name in defaults})
        settings._in_dotenv, settings._in_environment = frozenset(own), frozenset(environment)
        for name in RULES if checked else ():
            if settings[name]:
                settings._value(name)
        if checked:
            settings.shares_memory()
        return settings

    def replace(self, **values: str) -> Settings:
        """Return a copy with other values; `chosen` answers as before."""
        copy = Settings(self | values)
        copy._in_dotenv, copy._in_environment = self._in_dotenv, self._in_environment
        return copy

    def corrected(self) -> Settings:
        """Return a copy with defaults in place of wrong values. RUNTIME has none: make chooses it."""
        defaults = _read(EXAMPLE)
        wrong = [name for name in RULES if self[name] and name != "RUNTIME" and self._is_wrong(name)]
        copy = self.replace(**{name: defaults[name] for name in wrong})
        for check, names in ((copy.shares_memory, ["TRITON_SHARED_MEMORY"]), (copy.tls, ["TLS_CERT", "TLS_KEY"])):
            try:
                check()
            except UserError:
                copy.update({name: defaults[name] for name in names})
        return copy

    def chosen(self, name: str) -> bool:
        """Return whether the user set this; if not, its value is the default of .env.example."""
        return name in self._in_dotenv or self.chosen_for_this_command(name)

    def chosen_for_this_command(self, name: str) -> bool:
        """Return whether the value lasts for this command only: it came from make's command line, not from .env."""
        return name in self._in_environment

    def words(self, name: str) -> list[str]:
        return self[name].split()

    def path(self, name: str) -> Path:
        """Return an absolute path; a relative one starts at the checkout."""
        return cast(Path, self._value(name))

    def integer(self, name: str) -> int:
        return cast(int, self._value(name))

    def number(self, name: str) -> float:
        return cast(float, self._value(name))

    def interval(self, name: str) -> tuple[float, float]:
        return cast(tuple[float, float], self._value(name))

    def modes(self) -> tuple[str, ...]:
        return cast(tuple[str, ...], self._value("MODES"))

    def port(self, name: str) -> int:
        return cast(int, self._value(name))

    def choice(self, name: str, choices: tuple[str, ...] = ()) -> str:
        """Return one of the choices, which RULES has unless they are given."""
        return cast(str, self._value(name, _choice(*choices) if choices else None))

    def flag(self, name: str) -> bool:
        return self.choice(name) == "1"

    def bind_address(self) -> ipaddress.IPv4Address:
        return cast(ipaddress.IPv4Address, self._value("BIND_ADDRESS"))

    def address(self) -> str:
        """Return the address at which a client on this machine reaches the servers on BIND_ADDRESS."""
        return _reachable(self.bind_address())

    def shares_memory(self) -> bool:
        """Return whether clients may register shared memory without the key. Raise if the ports are not on loopback."""
        shares = self.flag("TRITON_SHARED_MEMORY")
        if shares and not self.bind_address().is_loopback:
            raise UserError(
                f"TRITON_SHARED_MEMORY=1 opens this machine's memory to every client, and BIND_ADDRESS="
                f"{self['BIND_ADDRESS']} to other machines: set TRITON_SHARED_MEMORY=0, or BIND_ADDRESS=127.0.0.1"
            )
        return shares

    def traces(self) -> Path | None:
        """Return the folder of our receiver of traces; None without traces, or with a collector of the user's own."""
        return self.path("LOCAL_STATE") / "traces" if self.flag("TRACE") and not self["TRACE_URL"] else None

    def gateway_bind(self) -> ipaddress.IPv4Address:
        """Return the address of the gateway's port on this machine."""
        return cast(ipaddress.IPv4Address, self._value("GATEWAY_BIND" if self["GATEWAY_BIND"] else "BIND_ADDRESS"))

    def gateway_listen(self, port: str = "GATEWAY_PORT") -> str:
        """Return the address on which the gateway opens a port; in a container GATEWAY_LISTEN sets it."""
        return os.environ.get("GATEWAY_LISTEN") or str(self.bind(port))

    def bind(self, port: str) -> ipaddress.IPv4Address:
        """Return the address of this machine on which the server behind a port setting listens."""
        return self.gateway_bind() if port == "GATEWAY_PORT" else self.bind_address()

    def api_keys(self) -> tuple[bytes, ...]:
        """Return the SHA-256 digests of the gateway's keys, or none if it requires no key.

        Raise UserError if it requires none although other machines reach it.
        """
        if not self["API_KEYS"] and not self.gateway_bind().is_loopback:
            name = "GATEWAY_BIND" if self["GATEWAY_BIND"] else "BIND_ADDRESS"
            raise UserError(
                f"{name}={self[name]} opens the gateway to other machines, and API_KEYS is empty, so it would answer "
                "everybody: set API_KEYS, or GATEWAY_BIND=127.0.0.1"
            )
        return cast(tuple[bytes, ...], self._value("API_KEYS"))

    def plain_api_key(self) -> str:
        """Return the first key that API_KEYS has in plain text, or nothing."""
        return next((key for key in self.words("API_KEYS") if not key.startswith(DIGEST)), "")

    def tls(self) -> tuple[Path, Path] | None:
        """Return the gateway's certificate and key; None if it speaks plain HTTP. Raise UserError if one is missing."""
        names = ("TLS_CERT", "TLS_KEY")
        if not any(self[name] for name in names):
            return None
        for name, other in (names, names[::-1]):
            if not self[name]:
                raise UserError(f"{other} is set and {name} is not: TLS needs the certificate and its key")
            if not os.access(self.path(name), os.R_OK):
                raise UserError(f"{name}={self[name]}: no such file, or you may not read it")
        return self.path("TLS_CERT"), self.path("TLS_KEY")

    def url(self, port: str) -> str:
        """Return the address of the server behind a port setting, such as TRITON_HTTP_PORT."""
        # TRITON_HOST, GATEWAY_HOST and PROMETHEUS_HOST are set in containers, where the servers are other hosts.
        host = os.environ.get(f"{port.partition('_')[0]}_HOST")
        scheme = "https" if port == "GATEWAY_PORT" and self["TLS_CERT"] else "http"
        return f"{scheme}://{host or _reachable(self.bind(port))}:{self.port(port)}"

    def _is_wrong(self, name: str) -> bool:
        try:
            self._value(name)
        except UserError:
            return True
        return False

    def _value(self, name: str, rule: Rule | None = None) -> Any:
        try:
            return (rule or RULES[name])(self[name])
        except ValueError as error:
            raise UserError(f"{name if name in PRIVATE else f'{name}={self[name]}'}: {error}") from None


def with_secrets(settings: Settings) -> Settings:
    """Return the settings with their secrets. Generate those that are empty, and keep .env private (mode 600)."""
    if DOTENV.exists():
        with contextlib.suppress(OSError):  # another user owns it, or it is on a read-only disk
            DOTENV.chmod(0o600)  # the user may have created it, with API_KEYS
    generated = {name: secrets.token_urlsafe(32) for name in SECRETS if not settings[name]}
    for name, value in generated.items():
        save(name, value)
    complete = settings.replace(**generated)
    complete._in_dotenv |= generated.keys()
    return complete


def save(name: str, value: str) -> None:
    """Write a setting into .env, which holds secrets: mode 600."""
    DOTENV.touch(mode=0o600)
    DOTENV.chmod(0o600)
    set_key(DOTENV, name, value, quote_mode="always" if " " in value else "never")


def saved(name: str, default: str = "") -> str:
    """Return the value in .env, or the default, whatever this command's own value is."""
    return _read(DOTENV).get(name) or default or _read(EXAMPLE)[name]


def pins() -> dict[str, str]:
    """Return the images of versions.env, unless the environment or .env replaces them."""
    own = _read(DOTENV)
    return {name: os.environ.get(name) or own.get(name) or value for name, value in _read(VERSIONS).items()}


def command_environment(**settings: str) -> dict[str, str]:
    """Return the environment for a command of ours: this process's, with these settings over those it has."""
    return {**os.environ, **settings, NAMES: " ".join([os.environ.get(NAMES, ""), *settings])}


def _reachable(bind: ipaddress.IPv4Address) -> str:
    """Return the address at which a client on this machine reaches a server on this address."""
    return "127.0.0.1" if bind.is_unspecified else str(bind)


def _like(name: str, names: Iterable[str]) -> list[str]:
    """Return the one of the names that a misspelt name probably means, or an empty list."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.75)


def _is_setting(name: str) -> bool:
    listed = os.environ.get(NAMES, "").split()
    return name in listed or "*" in listed or name.startswith(PREFIXES)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8: save it as such") from None
    return dict(_parse(path, text))


@functools.lru_cache(maxsize=8)  # 5 ms for .env.example
def _parse(path: Path, text: str) -> dict[str, str]:
    lines = list(parse_stream(io.StringIO(text)))
    for line in lines:
        if line.error:
            raise UserError(f"{path}, line {line.original.line}: write NAME=value, with a closing quote if it has one")
    return {line.key: line.value or "" for line in lines if line.key}
