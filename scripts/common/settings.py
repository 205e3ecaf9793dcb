"""Settings: .env.example holds every name with its default; .env overrides it, and make's command line overrides both.

An exported variable of the user's shell is no setting, because names such as USERS or TAG collide with other programs'.
"""

from __future__ import annotations

import difflib
import io
import ipaddress
import os
import secrets
from pathlib import Path

from dotenv import set_key
from dotenv.parser import parse_stream

# Names the environment variables that are settings. The Makefile puts the names of its command line here; containers
# and tests, whose whole environment is ours, set it to "*".
NAMES = "TRITON_SETTINGS_NAMES"
# These prefixes belong to this stack and its programs, so such a variable is a setting wherever it comes from.
PREFIXES = ("GRAFANA_", "HF_", "LOADTEST_", "LOCUST_", "NEURON_", "OCI_", "PROMETHEUS_", "TRITON_")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / ".env.example"
VERSIONS = ROOT / "versions.env"
# The tests name another file, so that the developer's settings do not reach them.
DOTENV = ROOT / (os.environ.get("TRITON_SETTINGS_FILE") or ".env")
PROFILES = ("cpu", "cuda", "neuron")
SECRETS = ("TRITON_ADMIN_KEY", "GRAFANA_ADMIN_PASSWORD")


class UserError(Exception):
    """A mistake that the user can correct. The message states what is wrong, where, and what to do."""


class Settings(dict[str, str]):
    """The value of every setting."""

    _in_dotenv: frozenset[str] = frozenset()
    _in_environment: frozenset[str] = frozenset()

    @classmethod
    def load(cls) -> Settings:
        """Return the settings of this command. Raise UserError for a name in .env that is no setting."""
        defaults = _read(EXAMPLE)
        environment = {name: os.environ[name] for name in defaults if os.environ.get(name) and _is_setting(name)}
        own = {name: value for name, value in _read(DOTENV).items() if value}
        known = defaults.keys() | _read(VERSIONS).keys()
        if unknown := own.keys() - known:
            raise UserError(f".env: unknown setting {', '.join(sorted(unknown))}; .env.example lists all settings")
        for name in set(os.environ.get(NAMES, "").split()) - known:
            # make's command line may hold variables of its own, so only a name like a setting's is refused.
            if close := difflib.get_close_matches(name, defaults, n=1, cutoff=0.75):
                raise UserError(f"unknown setting {name} on make's command line; did you mean {close[0]}?")
        settings = cls({name: value for name, value in (defaults | own | environment).items() if name in defaults})
        settings._in_dotenv, settings._in_environment = frozenset(own), frozenset(environment)
        if os.environ.get("SERVE_SYSTEM") and settings["SYSTEM"] not in settings.words("SYSTEMS"):
            others = settings["SYSTEMS"] if settings.chosen("SYSTEMS") else ""
            settings["SYSTEMS"] = f"{others} {settings['SYSTEM']}".strip()
        return settings

    def chosen(self, name: str) -> bool:
        """Return whether the user set this; if not, its value is the default of .env.example."""
        return name in self._in_dotenv or self.chosen_for_this_command(name)

    def chosen_for_this_command(self, name: str) -> bool:
        """Return whether the value lasts for this command only: it came from make's command line, not from .env."""
        return name in self._in_environment

    def path(self, name: str) -> Path:
        """Return an absolute path; a relative one starts at the checkout."""
        try:
            return ROOT / Path(self[name]).expanduser()
        except RuntimeError:
            raise UserError(f"{name}={self[name]}: unknown user; write the path in full") from None

    def words(self, name: str) -> list[str]:
        return self[name].split()

    def integer(self, name: str, minimum: int = 0) -> int:
        return int(self._number(name, int, "a whole number", minimum))

    def number(self, name: str, minimum: float = 0.0) -> float:
        return self._number(name, float, "a number", minimum)

    def port(self, name: str) -> int:
        port = self.integer(name, minimum=1)
        if port > 65535:
            raise UserError(f"{name}={port}: a port is at most 65535")
        return port

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        if self[name] not in choices:
            raise UserError(f"{name}={self[name]}: must be one of {', '.join(choices)}")
        return self[name]

    def flag(self, name: str) -> bool:
        return self.choice(name, ("0", "1")) == "1"

    def bind_address(self) -> ipaddress.IPv4Address:
        try:
            return ipaddress.IPv4Address(self["BIND_ADDRESS"])
        except ValueError:
            raise UserError(f"BIND_ADDRESS={self['BIND_ADDRESS']}: must be an IPv4 address") from None

    def address(self) -> str:
        """Return the address at which a client on this machine reaches the servers on BIND_ADDRESS."""
        bind = self.bind_address()
        return "127.0.0.1" if bind.is_unspecified else str(bind)

    def shares_memory(self) -> bool:
        """Return whether clients may register shared memory without the key. Raise if the ports are not on loopback."""
        shares = self.flag("TRITON_SHARED_MEMORY")
        if shares and not self.bind_address().is_loopback:
            raise UserError(
                f"TRITON_SHARED_MEMORY=1 opens this machine's memory to every client, and BIND_ADDRESS="
                f"{self['BIND_ADDRESS']} to other machines: set TRITON_SHARED_MEMORY=0, or BIND_ADDRESS=127.0.0.1"
            )
        return shares

    def url(self, port: str) -> str:
        """Return the address of the server behind a port setting, such as TRITON_HTTP_PORT."""
        # TRITON_HOST and PROMETHEUS_HOST are set in containers, where the servers are other hosts.
        host = os.environ.get(f"{port.partition('_')[0]}_HOST")
        return f"http://{host or self.address()}:{self.port(port)}"

    def _number(self, name: str, kind: type[int] | type[float], noun: str, minimum: float) -> float:
        try:
            value = kind(self[name])
        except ValueError:
            raise UserError(f"{name}={self[name]}: must be {noun}") from None
        if not minimum <= value < float("inf"):
            raise UserError(f"{name}={self[name]}: must be at least {minimum:g}")
        return value


def with_secrets(settings: Settings) -> Settings:
    """Return the settings with their secrets. Generate those that are empty and keep them in .env, mode 600."""
    generated = {name: secrets.token_urlsafe(32) for name in SECRETS if not settings[name]}
    for name, value in generated.items():
        DOTENV.touch(mode=0o600)
        DOTENV.chmod(0o600)
        set_key(DOTENV, name, value, quote_mode="never")
    complete = Settings(settings | generated)
    complete._in_dotenv = settings._in_dotenv | generated.keys()
    complete._in_environment = settings._in_environment
    return complete


def command_environment(**settings: str) -> dict[str, str]:
    """Return the environment for a command of ours: this process's, with these settings over those it has."""
    return {**os.environ, **settings, NAMES: " ".join([os.environ.get(NAMES, ""), *settings])}


def _is_setting(name: str) -> bool:
    listed = os.environ.get(NAMES, "").split()
    return name in listed or "*" in listed or name.startswith(PREFIXES)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        lines = list(parse_stream(io.StringIO(path.read_text(encoding="utf-8"))))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8: save it as such") from None
    for line in lines:
        if line.error:
            raise UserError(f"{path}, line {line.original.line}: write NAME=value, with a closing quote if it has one")
    return {line.key: line.value or "" for line in lines if line.key}
