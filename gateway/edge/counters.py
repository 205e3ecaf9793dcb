"""The gateway's own metrics, for Prometheus, and the slots of GATEWAY_IN_FLIGHT."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Counters:
    """The metrics, in a registry of their own: tests run several gateways in one process."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=self.registry)
        text = "Requests by route and HTTP status; 499: the client left"
        self._requests = counter("gateway_requests", text, ["route", "code"])
        text = "Time from the request's head to the last byte of the answer"
        self._seconds = histogram("gateway_request_seconds", text, ["route"])
        text = "Time until the first piece of a generated text"
        self._first_token = histogram("gateway_first_token_seconds", text, ["route"])
        tokens = counter("gateway_tokens", "Tokens that models read and generated", ["kind"])
        self._prompt, self._completion = (tokens.labels(kind) for kind in ("prompt", "completion"))
        self.running = 0  # requests that hold one of GATEWAY_IN_FLIGHT
        in_flight = Gauge("gateway_in_flight", "Requests that hold one of GATEWAY_IN_FLIGHT", registry=self.registry)
        in_flight.set_function(lambda: self.running)
        # labels() takes a lock and compares names: too slow for each request.
        self._by_code: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def request(self, route: str, status: int, seconds: float | None = None) -> None:
        """Count a request that has ended, and its time unless it was refused before its route."""
        metrics = self._by_code.get((route, status))
        if metrics is None:
            metrics = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._by_code[route, status] = metrics
        metrics[0].inc()
        if seconds is not None:
            metrics[1].observe(seconds)

    def first_token(self, route: str, seconds: float) -> None:
        self._first_token.labels(route).observe(seconds)

    def certificate_expires(self, timestamp: float) -> None:
        """Export when the certificate expires that the gateway has loaded: a renewed file counts after a restart."""
        name = "gateway_certificate_expiry_timestamp_seconds"
        Gauge(name, "When the certificate expires, in seconds since 1970", registry=self.registry).set(timestamp)

    def tokens(self, prompt: int, completion: int = 0) -> None:
        self._prompt.inc(prompt)
        if completion:
            self._completion.inc(completion)


class InFlightSlot:
    """One of GATEWAY_IN_FLIGHT: a request holds it until nothing of the request runs, in the gateway or in Triton.

    Parts that Triton still runs after the client has left hold the slot, too.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._holders = 0

    def hold(self) -> None:
        self._holders += 1
        self._counters.running += self._holders == 1

    def release(self) -> None:
        self._holders -= 1
        self._counters.running -= self._holders == 0


# The slot of the request that this task answers. Tasks that it starts inherit it.
SLOT: ContextVar[InFlightSlot] = ContextVar("slot")
