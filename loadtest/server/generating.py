"""Systems that generate text: how their modes differ, and what their backends count.

Such a model batches the texts of all requests itself, so Triton's counters show one request per execution in every
mode. The backend's own counters show how many texts ran together.
"""

from __future__ import annotations

import re
import time
from dataclasses import astuple, dataclass, fields

import gevent

from triton_transformers.settings import UserError
from triton_transformers.triton import TEXT_LIMIT, Config, metrics_page

# The backends send their counters every half second, one after the other.
SETTLED_S, POLL_S = 2.0, 0.03


def with_limit(config: Config, texts: int) -> Config:
    return config | {"parameters": config.get("parameters", {}) | {TEXT_LIMIT: {"string_value": str(texts)}}}


@dataclass(frozen=True)
class Generated:
    """The counters of a generating model at a moment, or their growth over a time; docs/monitoring.md explains each."""

    seconds: float
    generated_tokens: float = 0
    runs: float = 0
    first_tokens: float = 0
    first_token_microseconds: float = 0
    later_tokens: float = 0
    later_token_microseconds: float = 0

    @classmethod
    def from_metrics(cls, page: str, model: str, seconds: float) -> Generated:
        counts = dict.fromkeys((field.name for field in fields(cls)[1:]), 0.0)
        samples = re.findall(rf'^transformers_(\w+)_total{{[^}}]*model="{re.escape(model)}".*}} (\S+)$', page, re.M)
        if "generated_tokens" not in dict(samples):
            raise UserError(
                f"Triton's metrics have no generated tokens of '{model}', so nothing shows whether texts ran together: "
                "see `make status` and `make logs`"
            )
        for name, value in samples:
            if name in counts:
                counts[name] += float(value)  # of several versions
        return cls(seconds, **counts)

    def since(self, before: Generated) -> Generated:
        growth = Generated(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))
        if min(astuple(growth)) < 0:
            raise UserError("a model was reloaded or the server restarted during a window: see `make logs`")
        return growth

    def __add__(self, other: Generated) -> Generated:
        return Generated(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def counts(self) -> tuple[float, ...]:
        return astuple(self)[1:]

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Return how many texts ran together, on average over the model's steps."""
        return self.generated_tokens / self.runs if self.runs else 0.0

    @property
    def first_token_ms(self) -> float | None:
        """Return the mean time from a request's arrival to its first token, if the backend counts that."""
        return self.first_token_microseconds / self.first_tokens / 1000 if self.first_tokens else None

    @property
    def output_token_ms(self) -> float | None:
        """Return the mean time between two tokens of a text, if the backend counts that."""
        return self.later_token_microseconds / self.later_tokens / 1000 if self.later_tokens else None


class Reader:
    """Reads the counters of one generating model."""

    def __init__(self, metrics_url: str, model: str) -> None:
        self.metrics_url = metrics_url
        self.model = model

    def read(self) -> Generated:
        return Generated.from_metrics(metrics_page(self.metrics_url), self.model, time.perf_counter())

    def read_when_sent(self) -> Generated:
        """Return the counters as the backend has just sent them, with the time when it did.

        Otherwise a window could miss half a second of tokens, or have as many from before it.
        """
        first = latest = self.read()
        while latest.counts == first.counts:
            if latest.seconds > first.seconds + SETTLED_S:
                return latest  # nothing was generated
            gevent.sleep(POLL_S)
            latest = self.read()
        sent_at = latest.seconds
        while latest.seconds < sent_at + SETTLED_S:
            gevent.sleep(POLL_S)
            before, latest = latest, self.read()
            if latest.counts == before.counts:
                break
        return Generated(sent_at, *latest.counts)
