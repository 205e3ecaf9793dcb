"""The settings NEURON_*: what text encoders are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from triton_transformers.settings import Settings, UserError

FIRST_LENGTH = 32  # tokens: the shortest default length
MIN_LENGTH = 8  # tokens: a word and the special tokens around it
MAX_LENGTH = 100_000
DEFAULT_BATCHES = (1, 8)
MAX_BATCH = 64  # rows: Triton passes no larger batch to an encoder
COMPILER_ARGS = ("--model-type", "transformer")


@dataclass(frozen=True)
class Target:
    """A chip, and the shapes to compile for. Empty shapes and arguments mean the defaults."""

    chip: str
    batches: tuple[int, ...]  # in rows, ascending
    lengths: tuple[int, ...]  # in tokens, ascending
    cores: range
    device: bool  # this machine has one, to verify the compiled model on
    compiler_args: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> Target | None:
        """Return the target, or None unless PROFILE=neuron."""
        if settings.profile != "neuron":
            return None
        cores = re.fullmatch(r"(\d+):(\d+)", settings.neuron_cores)
        if not cores or int(cores[1]) > int(cores[2]):
            raise UserError(
                f"NEURON_CORES={settings.neuron_cores}: must be the first and the last NeuronCore, like 0:1"
            )
        return cls(
            settings.neuron_chip,
            sizes(settings, "NEURON_BATCHES", range(1, MAX_BATCH + 1)),
            sizes(settings, "NEURON_LENGTHS", range(MIN_LENGTH, MAX_LENGTH + 1)),
            range(int(cores[1]), int(cores[2]) + 1),
            settings.neuron_devices > 0,
            tuple(settings.neuron_compiler_args),
        )

    def lengths_up_to(self, maximum: int, system: str) -> list[int]:
        """Return the lengths of NEURON_LENGTHS, or lengths that double up to the model's maximum."""
        if self.lengths:
            if self.lengths[-1] > maximum:
                raise UserError(
                    f"NEURON_LENGTHS: {self.lengths[-1]} tokens are more than the maximum of {system}, {maximum}"
                )
            return list(self.lengths)
        doubled = [FIRST_LENGTH << step for step in range(maximum.bit_length()) if FIRST_LENGTH << step < maximum]
        return [*doubled, maximum]

    @property
    def rows(self) -> tuple[int, ...]:
        return self.batches or DEFAULT_BATCHES

    @property
    def compiler_command(self) -> list[str]:
        return ["--target", self.chip, *(self.compiler_args or COMPILER_ARGS)]

    def record(self) -> dict[str, Any]:
        """Return what decides whether a compiled model can stay, for its record."""
        return {"lengths": list(self.lengths), "batches": list(self.rows), "arguments": self.compiler_command}

    def matches(self, record: dict[str, Any] | None) -> bool:
        """Return whether a model compiled with this record is what the settings ask for. Empty settings fit any."""
        if record is None or record["arguments"][:2] != self.compiler_command[:2]:
            return False
        chosen = {
            "lengths": self.lengths,
            "batches": self.batches,
            "arguments": self.compiler_args and self.compiler_command,
        }
        return all(not value or record[name] == list(value) for name, value in chosen.items())


def sizes(settings: Settings, name: str, valid: range) -> tuple[int, ...]:
    words = settings[name].split()
    if not all(word.isdecimal() and int(word) in valid for word in words):
        raise UserError(
            f"{name}={settings[name]}: must be whole numbers from {valid[0]} to {valid[-1]}, separated by spaces"
        )
    return tuple(sorted({int(word) for word in words}))
