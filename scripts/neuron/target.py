"""What text encoders are compiled for on AWS Neuron: the settings NEURON_*."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scripts.common.settings import PROFILES, Settings, UserError

CHIPS = ("inf1", "inf2", "trn1")
SHORTEST = 32  # tokens, of the lengths that nobody asked for
LEAST = 8  # tokens: a word, and what stands around it
LONGEST = 100_000
BATCHES = (1, 8)
COMPILER_ARGS = ("--model-type", "transformer")
MOST = 64  # rows: the most that Triton gives to an encoder


@dataclass(frozen=True)
class Target:
    chip: str
    # What was asked for; nothing, where what is in place will do.
    batches: tuple[int, ...]  # in rows, ascending
    lengths: tuple[int, ...]  # in tokens, ascending
    cores: range
    device: bool  # here, to try on what was compiled
    compiler_args: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> Target | None:
        """None but with PROFILE=neuron."""
        if settings.choice("PROFILE", PROFILES) != "neuron":
            return None
        cores = re.fullmatch(r"(\d+):(\d+)", settings["NEURON_CORES"])
        if not cores or int(cores[1]) > int(cores[2]):
            raise UserError(f"NEURON_CORES={settings['NEURON_CORES']}: must be the first and the last, like 0:1")
        return cls(
            settings.choice("NEURON_CHIP", CHIPS),
            sizes(settings, "NEURON_BATCHES", range(1, MOST + 1)),
            sizes(settings, "NEURON_LENGTHS", range(LEAST, LONGEST + 1)),
            range(int(cores[1]), int(cores[2]) + 1),
            settings.integer("NEURON_DEVICES") > 0,
            tuple(settings.words("NEURON_COMPILER_ARGS")),
        )

    def lengths_up_to(self, longest: int, system: str) -> list[int]:
        """Those asked for; or doubled from one to the next, up to the longest that the model takes."""
        if self.lengths:
            if self.lengths[-1] > longest:
                raise UserError(f"NEURON_LENGTHS: {self.lengths[-1]} tokens are more than {system} takes, {longest}")
            return list(self.lengths)
        doubled = [SHORTEST << step for step in range(longest.bit_length()) if SHORTEST << step < longest]
        return [*doubled, longest]

    @property
    def rows(self) -> tuple[int, ...]:
        return self.batches or BATCHES

    @property
    def arguments(self) -> list[str]:
        """Of the compiler."""
        return ["--target", self.chip, *(self.compiler_args or COMPILER_ARGS)]

    def record(self) -> dict:
        """What makes another model of it."""
        return {"lengths": list(self.lengths), "batches": list(self.rows), "arguments": self.arguments}

    def made(self, record: dict | None) -> bool:
        """Is that what is asked for?"""
        if record is None or record["arguments"][:2] != self.arguments[:2]:
            return False
        asked = {"lengths": self.lengths, "batches": self.batches, "arguments": self.compiler_args and self.arguments}
        return all(not value or record[name] == list(value) for name, value in asked.items())


def sizes(settings: Settings, name: str, fitting: range) -> tuple[int, ...]:
    words = settings.words(name)
    if not all(word.isdecimal() and int(word) in fitting for word in words):
        raise UserError(
            f"{name}={settings[name]}: must be whole numbers from {fitting[0]} to {fitting[-1]}, separated by spaces"
        )
    return tuple(sorted({int(word) for word in words}))
