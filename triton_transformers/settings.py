"""Settings: Settings has one row for each. .env overrides its default, and make's command line overrides both.

.env.example explains them to users; a test compares it with the rows. Reading the settings checks all of them, so a
command refuses a wrong one before it does anything.

An exported variable of the user's shell is no setting, because names such as USERS or TAG collide with other programs'.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import ipaddress
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, overload

from dotenv import set_key
from dotenv.parser import parse_stream

from triton_transformers.engines import ENCODER_CHOICES

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
T = TypeVar("T")
# Returns the value of a setting's text, or raises ValueError with the end of the message.
Rule = Callable[[str], T]


class UserError(Exception):
    """A mistake that the user can correct. The message states what is wrong, where, and what to do."""


def _optional(rule: Rule[T]) -> Rule[T | None]:
    return lambda text: rule(text) if text else None


N = TypeVar("N", int, float)


def _number(kind: type[N], noun: str, minimum: float) -> Rule[N]:
    def read(text: str) -> N:
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


def _integer(minimum: int = 0) -> Rule[int]:
    return _number(int, "a whole number", minimum)


def _decimal(minimum: float = 0.0) -> Rule[float]:
    return _number(float, "a number", minimum)


def _share(text: str) -> float:
    if (share := _decimal(0.5)(text)) > 1:
        raise ValueError("must be at most 1")
    return share


def _port(text: str) -> int:
    port = _integer(1)(text)
    if port > 65535:
        raise ValueError("a port is at most 65535")
    return port


def _choice(*choices: str) -> Rule[str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return read


def _pattern(pattern: str, noun: str) -> Rule[str]:
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


def _system(text: str) -> str:
    if len(text.split()) != 1:
        raise ValueError("SYSTEM takes one system: run the command once for each")
    return text


def _formats(text: str) -> tuple[str, ...]:
    formats = tuple(text.split())
    if len(formats) == 1 or len(set(formats)) < len(formats) or len(formats) > len(MODES):
        raise ValueError("must be two or three different formats, separated by spaces")
    return formats


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


def _origins(text: str) -> tuple[bytes, ...]:
    """Return the origins as browsers write them."""
    if not all(re.fullmatch(r"https?://[^/?#@*]+", origin) for origin in text.split()):
        raise ValueError("each must be like https://app.example or http://localhost:3000, without a path")
    ports = {"http": ":80", "https": ":443"}  # which browsers leave out
    origins = [origin.lower() for origin in text.split()]
    return tuple(origin.removesuffix(ports[origin.partition(":")[0]]).encode() for origin in origins)


def _path(text: str) -> Path:
    try:
        return ROOT / Path(text).expanduser()
    except RuntimeError:
        raise ValueError("unknown user; write the path in full") from None


def _flag(text: str) -> bool:
    return _choice("0", "1")(text) == "1"


_cpus = _pattern(r"(\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*)?", "a list of CPUs, as in 0 or 0-3 or 0,2")
_trace_url = _pattern(r"(http://[\w.:-]+(/[\w./-]*)?)?", "an address as in http://collector:4318/v1/traces")


@dataclass(eq=False)
class Setting(Generic[T]):
    """A row of the table: `settings.users` is the value of USERS."""

    rule: Rule[T]
    default: str = ""
    # Another value restarts the gateway alone, or the rest of the stack in both runtimes or in one.
    restarts: Literal["", "gateway", "stack", "local", "docker"] = ""
    # Reports show it, because it changes what is served or measured. People share reports, so nothing that can hold a
    # token or a password may be shown: no keys, no URLs (TRANSFORMERS, TORCH_INDEX), no paths.
    shown: bool = False
    # No message may show the value.
    private: bool = False

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.name = attribute.upper()
        TABLE[self.name] = self

    @overload
    def __get__(self, settings: None, owner: type) -> Setting[T]: ...

    @overload
    def __get__(self, settings: Settings, owner: type) -> T: ...

    def __get__(self, settings: Settings | None, owner: type) -> Setting[T] | T:
        return self if settings is None else self.read(settings[self.name], self.rule)

    def read(self, text: str, rule: Rule[T]) -> T:
        try:
            return rule(text)
        except ValueError as error:
            raise UserError(f"{self.name if self.private else f'{self.name}={text}'}: {error}") from None


TABLE: dict[str, Setting[Any]] = {}
# The families of gateway/text/tool_calls.py.
TOOL_PARSERS = (
    "deepseek", "deepseek_v31", "gemma4", "glm", "granite", "harmony", "hermes", "json", "llama3", "mistral",
    "mistral_args", "phi", "qwen3_coder",
)  # fmt: skip


class Settings(dict[str, str]):
    """The text of every setting by its name, and as attributes the values."""

    runtime = Setting(_choice("docker", "local"), shown=True)
    compose_project_name = Setting(
        _pattern(r"[a-z0-9]+([_-][a-z0-9]+)*", "lower-case letters and digits, with single dashes"),
        "triton-transformers",
    )

    # Models
    systems = Setting(str.split, "embedding", shown=True)
    model_repository = Setting(_path, "model_repository", restarts="stack")
    hf_model = Setting(str, shown=True)
    hf_revision = Setting(str, shown=True)
    source = Setting(_optional(_path))
    # The catalogue of models has the values of TASK and FORMAT.
    task = Setting(str, shown=True)
    format = Setting(str, shown=True)
    min_quality = Setting(_optional(_share), shown=True)
    adapters = Setting(str.split)
    draft = Setting(str)
    transformers = Setting(str, "transformers", restarts="local")
    hf_token = Setting(str)
    exporter_memory = Setting(_size, "8g")
    trust_remote_code = Setting(_flag, "0")
    allow_pickles = Setting(_flag, "1")
    list = Setting(_flag, "0")
    package = Setting(_path, "model_repository.zip")
    profile = Setting(_choice(*PROFILES), "cpu", restarts="stack", shown=True)

    # Addresses and ports
    bind_address = Setting(_ipv4, "127.0.0.1", restarts="stack")
    gateway_port = Setting(_port, "8080", restarts="gateway")
    triton_http_port = Setting(_port, "8000", restarts="stack")
    triton_grpc_port = Setting(_port, "8001", restarts="stack")
    triton_metrics_port = Setting(_port, "8002", restarts="stack")
    prometheus_port = Setting(_port, "9090", restarts="local")
    grafana_port = Setting(_port, "3000", restarts="local")
    locust_port = Setting(_port, "8089")
    loadtest_metrics_port = Setting(_port, "8003")
    gateway_metrics_port = Setting(_port, "8004", restarts="gateway")
    trace_port = Setting(_port, "4318", restarts="local")
    jaeger_port = Setting(_port, "16686")

    # The gateway (docs/gateway.md)
    api_keys = Setting(_keys, restarts="gateway", private=True)
    gateway_bind = Setting(_optional(_ipv4), restarts="gateway")
    gateway_origins = Setting(_origins, restarts="gateway")
    tls_cert = Setting(_optional(_path), restarts="gateway")
    tls_key = Setting(_optional(_path), restarts="gateway")
    gateway_in_flight = Setting(_integer(1), "256", restarts="gateway", shown=True)
    gateway_texts = Setting(_integer(1), "2048", restarts="gateway")
    gateway_body = Setting(_body_size, "4m", restarts="gateway")
    gateway_timeout = Setting(_decimal(0.1), "60", restarts="gateway")
    image_urls = Setting(_flag, "0", restarts="gateway")
    tool_parser = Setting(_optional(_choice("none", *TOOL_PARSERS)), restarts="gateway")

    # Triton
    triton_admin_key = Setting(str, restarts="stack")
    triton_engine = Setting(_choice(*ENCODER_CHOICES), "auto", restarts="stack", shown=True)
    triton_cpus = Setting(_cpus, restarts="stack", shown=True)
    triton_shm_bytes = Setting(_integer(), "67108864", restarts="stack", shown=True)
    triton_shared_memory = Setting(_flag, "0", restarts="stack")
    triton_log_verbose = Setting(_integer(), "0", restarts="stack", shown=True)
    trace = Setting(_flag, "0", restarts="stack", shown=True)
    trace_rate = Setting(_integer(1), "1", restarts="stack", shown=True)
    trace_url = Setting(_trace_url, restarts="stack")
    triton_memory = Setting(_size, "8g", restarts="docker", shown=True)
    triton_shm_size = Setting(_size, "4g", restarts="docker", shown=True)
    ready_timeout = Setting(_integer(1), "180")

    # Prometheus and Grafana
    prometheus_retention = Setting(
        _pattern(r"(\d+(ms|[smhdwy]))+", "a duration, as in 7d or 12h"), "7d", restarts="local"
    )
    grafana_home = Setting(_optional(_path), restarts="local")
    grafana_admin_password = Setting(str, restarts="local")

    # Installing packages and building images
    triton_source = Setting(_optional(_choice("pypi", "pypi-transformers", "ngc")), shown=True)
    torch_index = Setting(str, "https://download.pytorch.org/whl/cpu")
    build_pip_conf = Setting(_optional(_path))
    build_ca = Setting(_optional(_path))

    # Generating text (`make generate`)
    prompt = Setting(str)
    tokens = Setting(_integer(1), "32", shown=True)

    # The comparison (`make loadtest`)
    system = Setting(_system, "embedding", shown=True)
    workload = Setting(_choice("mixed", "published"), "mixed", shown=True)
    protocol = Setting(_choice("http", "grpc", "openai"), "http", shown=True)
    users = Setting(_optional(_integer(1)), shown=True)
    rate = Setting(_optional(_decimal(0.1)), shown=True)
    arrivals = Setting(_choice("poisson", "constant"), "poisson", shown=True)
    overload = Setting(_optional(_decimal(1)), shown=True)
    workers = Setting(_optional(_integer()), shown=True)
    spawn_rate = Setting(_optional(_decimal(0.1)), shown=True)
    wait = Setting(_optional(_interval), shown=True)
    max_batch = Setting(_optional(_integer(1)), shown=True)
    modes = Setting(_modes, "none instances dynamic", shown=True)
    formats = Setting(_formats, shown=True)
    rounds = Setting(_integer(3), "4", shown=True)
    window = Setting(_optional(_decimal(1)), shown=True)
    warmup = Setting(_decimal(), "3", shown=True)
    seed = Setting(_integer(), "1", shown=True)
    min_ratio = Setting(_optional(_decimal()), shown=True)
    loadtest_cpus = Setting(_cpus, shown=True)
    reports = Setting(_path, "reports")

    # Finding the fastest configuration (`make tune`)
    p95 = Setting(_optional(_decimal(1)), shown=True)
    p95_first_token = Setting(_optional(_decimal(1)), shown=True)
    minutes = Setting(_decimal(1), "10", shown=True)
    apply = Setting(_flag, "0")
    resume = Setting(_flag, "0")

    # The drills (`make drill`: docs/reliability.md)
    soak = Setting(_optional(_decimal(0.1)))

    # The dashboards as one page (`make dashboards`)
    range = Setting(str, "15m")
    until = Setting(str)

    # AWS Neuron (PROFILE=neuron)
    neuron_chip = Setting(_choice("inf1", "inf2", "trn1"), "inf2", restarts="docker", shown=True)
    neuron_devices = Setting(_integer(), "1", restarts="docker", shown=True)
    neuron_batches = Setting(str, shown=True)
    neuron_lengths = Setting(str, shown=True)
    neuron_compiler_args = Setting(str.split, shown=True)
    neuron_cores = Setting(str, "0:1", shown=True)

    # Oracle Cloud (`make deploy-oci`: docs/oci.md)
    deployment = Setting(_path, "deploy/oci/deployment.toml")
    tag = Setting(str)
    dry_run = Setting(_flag, "0")
    push = Setting(_flag, "0")
    oci_endpoint = Setting(str)
    request = Setting(_optional(_path))

    # Known vulnerabilities (`make audit`: docs/security.md)
    osv_database = Setting(_optional(_path))

    # The local runtime (no Docker)
    local_state = Setting(_path, ".local")

    _in_dotenv: frozenset[str] = frozenset()
    _in_environment: frozenset[str] = frozenset()

    @classmethod
    def load(cls, checked: bool = True) -> Settings:
        """Return the settings of this command. Raise UserError for an unknown name or a wrong value.

        Commands that only look at the stack or stop it leave the values unchecked.
        """
        environment = {name: os.environ[name] for name in TABLE if os.environ.get(name) and _is_setting(name)}
        own = {name: value for name, value in _read(DOTENV).items() if value}
        known = TABLE.keys() | _read(VERSIONS).keys()
        if unknown := sorted(own.keys() - known):
            meant = [like for name in unknown for like in _like(name, TABLE)]
            hint = f"did you mean {', '.join(meant)}?" if meant else ".env.example lists all settings"
            raise UserError(f".env: unknown setting {', '.join(unknown)}; {hint}")
        for name in sorted(set(os.environ.get(NAMES, "").split()) - known):
            # make's command line may hold variables of its own, so only a name like a setting's is refused.
            if like := _like(name, TABLE):
                raise UserError(f"unknown setting {name} on make's command line; did you mean {like[0]}?")
        settings = cls({name: value for name, value in (DEFAULTS | own | environment).items() if name in TABLE})
        settings._in_dotenv, settings._in_environment = frozenset(own), frozenset(environment)
        for name in TABLE if checked else ():
            if settings[name]:
                settings.value(name)
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
        copy = self.replace()
        names = (name for name in TABLE if self[name] and name != "RUNTIME")
        checks: list[tuple[Callable[[], object], list[str]]] = [(partial(copy.value, name), [name]) for name in names]
        checks += [(copy.shares_memory, ["TRITON_SHARED_MEMORY"]), (copy.tls, ["TLS_CERT", "TLS_KEY"])]
        for check, wrong in checks:
            try:
                check()
            except UserError:
                copy.update({name: DEFAULTS[name] for name in wrong})
        return copy

    def chosen(self, name: str) -> bool:
        """Return whether the user set this; if not, its value is the default."""
        return name in self._in_dotenv or self.chosen_for_this_command(name)

    def chosen_for_this_command(self, name: str) -> bool:
        """Return whether the value lasts for this command only: it came from make's command line, not from .env."""
        return name in self._in_environment

    def value(self, name: str) -> Any:
        """Return the value of the setting with this name, as its attribute does."""
        return getattr(self, name.lower())

    def choice(self, name: str, choices: Iterable[str]) -> str:
        """Return the value of a setting that must be one of these choices here."""
        return cast(str, TABLE[name].read(self[name], _choice(*choices)))

    def address(self) -> str:
        """Return the address at which a client on this machine reaches the servers on BIND_ADDRESS."""
        return _reachable(self.bind_address)

    def variants(self) -> dict[str, str]:
        """Return the systems that SYSTEM becomes in each of FORMATS, with their formats."""
        return {f"{self.system}.{form}": form for form in self.formats}

    def shares_memory(self) -> bool:
        """Return whether clients may register shared memory without the key. Raise if the ports are not on loopback."""
        shares = self.triton_shared_memory
        if shares and not self.bind_address.is_loopback:
            raise UserError(
                f"TRITON_SHARED_MEMORY=1 opens this machine's memory to every client, and BIND_ADDRESS="
                f"{self['BIND_ADDRESS']} to other machines: set TRITON_SHARED_MEMORY=0, or BIND_ADDRESS=127.0.0.1"
            )
        return shares

    def traces(self) -> Path | None:
        """Return the folder of our receiver of traces; None without traces, or with a collector of the user's own."""
        return self.local_state / "traces" if self.trace and not self.trace_url else None

    def gateway_listen(self, port: str = "GATEWAY_PORT") -> str:
        """Return the address on which the gateway opens a port; in a container GATEWAY_LISTEN sets it."""
        return os.environ.get("GATEWAY_LISTEN") or str(self.bind(port))

    def bind(self, port: str) -> ipaddress.IPv4Address:
        """Return the address of this machine on which the server behind a port setting listens."""
        own = self.gateway_bind if port == "GATEWAY_PORT" else None
        return own or self.bind_address

    def gateway_keys(self) -> tuple[bytes, ...]:
        """Return the SHA-256 digests of the gateway's keys, or none if it requires no key.

        Raise UserError if it requires none although other machines reach it.
        """
        if not self.api_keys and not self.bind("GATEWAY_PORT").is_loopback:
            name = "GATEWAY_BIND" if self["GATEWAY_BIND"] else "BIND_ADDRESS"
            raise UserError(
                f"{name}={self[name]} opens the gateway to other machines, and API_KEYS is empty, so it would answer "
                "everybody: set API_KEYS, or GATEWAY_BIND=127.0.0.1"
            )
        return self.api_keys

    def plain_api_key(self) -> str:
        """Return the first key that API_KEYS has in plain text, or nothing."""
        return next((key for key in self["API_KEYS"].split() if not key.startswith(DIGEST)), "")

    def tls(self) -> tuple[Path, Path] | None:
        """Return the gateway's certificate and key; None if it speaks plain HTTP. Raise UserError if one is missing."""
        files = {"TLS_CERT": self.tls_cert, "TLS_KEY": self.tls_key}
        if not any(files.values()):
            return None
        for (name, file), other in zip(files.items(), reversed(files), strict=True):
            if not file:
                raise UserError(f"{other} is set and {name} is not: TLS needs the certificate and its key")
            if not os.access(file, os.R_OK):
                raise UserError(f"{name}={self[name]}: no such file, or you may not read it")
        return cast(tuple[Path, Path], tuple(files.values()))

    def url(self, port: str) -> str:
        """Return the address of the server behind a port setting, such as TRITON_HTTP_PORT."""
        # TRITON_HOST, GATEWAY_HOST and PROMETHEUS_HOST are set in containers, where the servers are other hosts.
        host = os.environ.get(f"{port.partition('_')[0]}_HOST")
        scheme = "https" if port == "GATEWAY_PORT" and self.tls_cert else "http"
        return f"{scheme}://{host or _reachable(self.bind(port))}:{self.value(port)}"


DEFAULTS = {name: row.default for name, row in TABLE.items()}


def restarting(*programs: str) -> tuple[str, ...]:
    """Return the settings of which another value restarts one of these: gateway, stack, local or docker."""
    return tuple(name for name, row in TABLE.items() if row.restarts in programs)


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
    return _read(DOTENV).get(name) or default or DEFAULTS[name]


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
    lines = list(parse_stream(io.StringIO(text)))
    for line in lines:
        if line.error:
            raise UserError(f"{path}, line {line.original.line}: write NAME=value, with a closing quote if it has one")
    return {line.key: line.value or "" for line in lines if line.key}
