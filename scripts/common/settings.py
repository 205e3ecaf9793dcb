"""Settings: .env.example holds every name with its default, .env overrides it, the environment overrides both."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

from dotenv import dotenv_values, set_key

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / ".env.example"
VERSIONS = ROOT / "versions.env"
DOTENV = ROOT / ".env"
PROFILES = ("cpu", "cuda", "neuron")
SECRETS = ("TRITON_ADMIN_KEY", "GRAFANA_ADMIN_PASSWORD")


class UserError(Exception):
    """Something the person at the keyboard can mend. The message says what, where, and how."""


class Settings(dict[str, str]):
    """The value of every setting."""

    # Names that the user set, in .env or for this command.
    _chosen: frozenset[str] = frozenset()

    @classmethod
    def load(cls) -> Settings:
        defaults = _read(EXAMPLE)
        environment = {name: os.environ[name] for name in defaults if os.environ.get(name)}
        if "STY" in os.environ and "WINDOW=" not in os.environ.get("MAKEFLAGS", ""):
            environment.pop("WINDOW", None)  # GNU screen's, the number of its window
        own = {name: value for name, value in _read(DOTENV).items() if value}
        unknown = own.keys() - defaults.keys() - _read(VERSIONS).keys()
        if unknown:
            raise UserError(f".env: no such setting {', '.join(sorted(unknown))} (.env.example lists them all)")
        settings = cls({name: value for name, value in (defaults | own | environment).items() if name in defaults})
        settings._chosen = frozenset(own | environment)
        if os.environ.get("SERVE_SYSTEM") and settings["SYSTEM"] not in settings.words("SYSTEMS"):
            said = settings["SYSTEMS"] if "SYSTEMS" in own | environment else ""
            settings["SYSTEMS"] = f"{said} {settings['SYSTEM']}".strip()
        return settings

    def chosen(self, name: str) -> bool:
        """Return whether the user set this; if not, its value is the default of .env.example."""
        return name in self._chosen

    def path(self, name: str) -> Path:
        try:
            return ROOT / Path(self[name]).expanduser()
        except RuntimeError:
            raise UserError(f"{name}={self[name]}: there is no such user") from None

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
        """Where a client on this machine reaches what listens on BIND_ADDRESS."""
        bind = self.bind_address()
        return "127.0.0.1" if bind.is_unspecified else str(bind)

    def url(self, port: str) -> str:
        # TRITON_HOST, PROMETHEUS_HOST: of who runs elsewhere than they do, in a container for one (docs/comparison.md).
        host = os.environ.get(f"{port.partition('_')[0]}_HOST")
        return f"http://{host or self.address()}:{self.port(port)}"

    def _number(self, name: str, kind: type, noun: str, minimum: float):
        try:
            value = kind(self[name])
        except ValueError:
            raise UserError(f"{name}={self[name]}: must be {noun}") from None
        if not minimum <= value < float("inf"):
            raise UserError(f"{name}={self[name]}: must be at least {minimum:g}")
        return value


def with_secrets(settings: Settings) -> Settings:
    """The settings with their secrets; one that is empty is made at random and kept in .env, mode 600."""
    made = {name: secrets.token_urlsafe(32) for name in SECRETS if not settings[name]}
    for name, value in made.items():
        DOTENV.touch(mode=0o600)
        DOTENV.chmod(0o600)
        set_key(DOTENV, name, value, quote_mode="never")
    complete = Settings(settings | made)
    complete._chosen = settings._chosen
    return complete


def _read(path: Path) -> dict[str, str]:
    values = dotenv_values(path, interpolate=False) if path.exists() else {}
    return {name: value or "" for name, value in values.items()}
