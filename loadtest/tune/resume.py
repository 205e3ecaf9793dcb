"""The measurements of a search in a file, so that a search that was stopped can go on: RESUME=1.

The search follows from its measurements and the order of its knobs. So replaying them brings it to where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadtest.tune.knobs import Candidate, Knob
from loadtest.tune.search import CandidateFailed, Measure, Measured
from triton_transformers.files import write_atomically
from triton_transformers.settings import UserError


class Log:
    """Wraps the measurements of a search. `subject` is plain data: they are valid only for it."""

    def __init__(
        self,
        path: Path,
        subject: dict[str, Any],
        measure: Measure,
        order: Callable[[list[Knob]], list[Knob]] = lambda knobs: knobs,
    ) -> None:
        self.path = path
        self.subject = subject
        self.entries: list[dict[str, Any]] = []
        self.replay: list[dict[str, Any]] = []
        self.knobs: list[list[str]] = []  # model and name of each, in order
        self.measure_now = measure
        self.order_now = order

    def resume(self) -> None:
        """Replay the measurements of the search that was stopped."""
        try:
            saved = json.loads(self.path.read_text())
            subject, self.knobs, self.replay = saved["subject"], saved["knobs"], saved["measurements"]
        except FileNotFoundError:
            raise UserError("RESUME=1: no search was stopped here; leave RESUME out") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"RESUME=1: {self.path} cannot be read; leave RESUME out") from None
        if subject != self.subject:
            changed = [name for name, value in self.subject.items() if subject.get(name) != value]
            raise UserError(f"RESUME=1: the search that was stopped had another {', '.join(changed)}; leave RESUME out")

    def order(self, knobs: list[Knob]) -> list[Knob]:
        """Return the knobs in the order that the search had before it was stopped.

        The statistics that decide about a new order are gone: Triton begins them anew with every load.
        """
        if not self.knobs:
            self.knobs = [[knob.model, knob.name] for knob in self.order_now(knobs)]
        places = {(model, name): place for place, (model, name) in enumerate(self.knobs)}
        return sorted(knobs, key=lambda knob: places.get((knob.model, knob.name), len(places)))

    def measure(self, candidate: Candidate, expected: float | None, pattern: int, in_full: bool = True) -> Measured:
        changes = [list(change) for change in candidate.changes]
        if self.replay and self.replay[0]["changes"] == changes:
            entry = self.replay.pop(0)
        else:
            self.replay.clear()  # the search took another way
            entry = {"changes": changes, "value": None, "probes": [], "is_bound": False, "reason": ""}
            try:
                entry |= self.measure_now(candidate, expected, pattern, in_full)._asdict()
            except CandidateFailed as error:
                entry["reason"] = str(error)
        self.entries.append(entry)
        log = {"subject": self.subject, "knobs": self.knobs, "measurements": self.entries}
        write_atomically(self.path, json.dumps(log))
        if entry["value"] is None:
            raise CandidateFailed(entry["reason"])
        return Measured(entry["value"], [(rate, p95) for rate, p95 in entry["probes"]], entry["is_bound"])

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
