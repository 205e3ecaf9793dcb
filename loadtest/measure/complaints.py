"""What makes the numbers of a report doubtful, or worth nothing: a code with its fields, and the sentence of each code.

Reports and logs show the sentence. Decisions depend on the code.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from loadtest.server.machine import is_busy


class Code(Enum):
    """The reasons; the value is the sentence, with its fields."""

    # of every report
    STOPPED = "stopped early: {reason}; what was measured until then is kept"
    OTHER_PROGRAMS = (
        "{when}other programs used {amount}{cores:.1f} of this machine's {machine} core(s), so the numbers show them "
        "too: end them and measure again"
    )
    LOCUST_BOUND = "Locust used a whole core, so {effect}: set {remedy}"

    # of a comparison
    BATCHES = "{problem}{cause}"
    FOREIGN_REQUESTS = (
        "Triton answered {answered} requests in the windows, but Locust sent {sent}: something else used the server"
    )
    FEW_RESPONSES = (
        "a window of {mode} had only {requests} response(s) in {seconds:.0f} s, too few to show the latency: set a "
        "longer WINDOW, or {remedy}"
    )
    NEVER_KEEPS_UP = "the server never keeps up with {rate:g} requests per second: set a lower RATE"
    FAILED_REQUESTS = "{failed} request(s) failed; requests.csv has their errors"
    RATIO_TOO_LOW = "the {name} {ratio:.2f} is below MIN_RATIO={minimum:g}"
    NO_INTERVAL = "one round has no interval that could prove MIN_RATIO={minimum:g}"
    INTERVAL_TOO_LOW = (
        "the 95 % interval of the {name}, {low:.2f} to {high:.2f}, begins below MIN_RATIO={minimum:g}: more ROUNDS or "
        "a longer WINDOW narrow it"
    )

    # how the counters of a comparison contradict its modes
    RAN_TOGETHER = "one at a time, '{model}' still generated {steps:.2f} tokens per step: max_batch did nothing"
    RAN_ONE_AT_A_TIME = "together, '{model}' generated only {steps:.2f} tokens per step"
    FOREIGN_BATCHES = (
        "with dynamic batching off, '{model}' still ran {mean:.2f} {noun} per execution: something else was using the "
        "server"
    )
    NO_BATCHES = "with dynamic batching on, '{model}' ran only {mean:.2f} {noun} per execution"

    # of an overload
    GENERATOR_BOUND = (
        "the load generator used {cores:.2f} of the 1 core that a process can use, so it may have been late: set "
        "WORKERS, or a CPU of its own (LOADTEST_CPUS and TRITON_CPUS)"
    )
    SENT_LATE = (
        "the load generator sent one of twenty requests more than {late:.0f} ms after its arrival, and the latencies "
        "count that: {remedy}"
    )
    FEW_ARRIVALS = (
        "only {arrived:.0f} of {scheduled:.0f} requests per second arrived in the window: set a longer WINDOW"
    )
    NOT_SENT = "{requests} requests were not sent, because all users of the load generator were waiting"

    # of a search
    WINNER_FAILED = "the best in the search failed when it was measured again: {reason}"

    # of a soak
    PROBLEM = "{problem}"
    SOAK_STOPPED = "{reason}; what was sampled until then is kept"
    NOT_FLAT = "not flat: {series}. A longer SOAK shows if that goes on"
    WRONG_ANSWERS = "of {requests:,} {kind} requests {numbers}: {messages}"
    NOTHING_SENT = "no request was sent: set a longer SOAK, more USERS, or a shorter WAIT"


class Complaint:
    """One reason and what its sentence names; `str` makes the sentence."""

    def __init__(self, code: Code, **fields: Any) -> None:
        self.code, self.fields = code, fields

    def __str__(self) -> str:
        return str(self.code.value).format(**self.fields)


def busy_machine(cores: float | None, machine: int, when: str = "", amount: str = "up to ") -> Complaint | None:
    """Return the complaint if other programs used that many cores of the machine's, and that is too much."""
    if not is_busy(cores, machine):
        return None
    return Complaint(Code.OTHER_PROGRAMS, when=when, amount=amount, cores=cores, machine=machine)
