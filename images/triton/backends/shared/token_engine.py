"""Engines that continue many texts at once: a text joins and leaves between two steps. Tokens go in and come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from shared.continuation import Options


@dataclass(frozen=True)
class NewTokens:
    """The tokens that a step added to one text."""

    key: int
    tokens: list[int]  # may end with the end token
    finished: bool  # the engine has dropped the text
    error: str = ""  # the reason why the engine could not continue it


@dataclass(frozen=True)
class EngineStats:
    cache_usage: float  # from 0 to 1
    # Tokens of prompts so far whose keys and values came from the prefix cache; None if the engine does not count them.
    prefix_tokens: int | None = None


class EngineFailed(RuntimeError):
    """Raised when the engine cannot continue any text; its process must restart."""


class TokenEngine(ABC):
    """Continues texts that have keys of the caller's choice. One thread makes all calls."""

    name: str  # label `engine` of the metric transformers_engine
    precision: str  # label `precision`

    @abstractmethod
    def add(self, key: int, tokens: list[int], options: Options) -> None:
        """Take a text. Raise if the engine refuses it; the other texts do not notice."""

    @abstractmethod
    def cancel(self, key: int) -> None:
        """Drop a text, if the engine still has it."""

    @abstractmethod
    def step(self) -> list[NewTokens]:
        """Run the model once for all texts. Raise EngineFailed if it cannot run again."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the state after the last step."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory."""
