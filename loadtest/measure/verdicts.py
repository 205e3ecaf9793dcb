"""Decide whether a measurement is proven, doubtful or not proven: one rule for every command and all its outputs.

proven: nothing speaks against the number. The 95 % interval of a mean of rounds is clear of 1 (or begins at MIN_RATIO).
doubtful: measured, but the machine was busy, the load generator was the limit, or the rounds disagree.
not proven: the rest.

A command collects what speaks against its number, `Cause(Code.X, field=...)`, and calls `judge` with these causes, the
number, and the ratios of its rounds if the number is their mean. It keeps what `judge` returns as `verdict` of its
results. `sentence` then makes the headline (the cause, the number, one remedy), `also` the other causes, `EXIT_CODES`
the exit code, and the macro `large` of reports/parts.html.j2 the large number, which only a proven verdict has.

A new reason is one member of Code. Reports and logs show its texts; decisions depend on the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from loadtest.server.machine import is_busy

PROVEN, DOUBTFUL, NOT_PROVEN = "proven", "doubtful", "not proven"
# 1 is an error before anything was measured.
EXIT_CODES = {PROVEN: 0, DOUBTFUL: 3, NOT_PROVEN: 4}
# Fewer rounds have an interval that shows nothing: 0.03 to 50.
ENOUGH_ROUNDS = 3
STOP_OTHERS, KEEP = "Stop the other clients and measure again.", "Keep what you have."
END_PROGRAMS = "End the other programs and measure again."


class Code(Enum):
    """The causes: the word that each leads to, its sentence with its fields, and the remedy.

    If several apply, the first one here decides.
    """

    def __init__(self, word: str, text: str, remedy: str) -> None:
        self.word, self.text, self.remedy = word, text, remedy

    # a measurement that does not count
    NO_ROUND = (NOT_PROVEN, "{reason}, before one round was complete", "Measure again to the end.")
    STOPPED = (NOT_PROVEN, "stopped early: {reason}; what was measured until then is kept", "Measure again to the end.")
    FOREIGN_REQUESTS = (NOT_PROVEN, "Triton answered {answered} requests, but Locust sent {sent}", STOP_OTHERS)
    NEVER_KEEPS_UP = (NOT_PROVEN, "the server never keeps up with {rate:g} requests per second", "Set a lower RATE.")
    FAILED_REQUESTS = (NOT_PROVEN, "{failed} request(s) failed", "Look at their errors in {file}.")
    SUBJECT_OVERLOADED = (
        NOT_PROVEN,
        "{mode} does not keep up with {rate:g} requests per second, so MIN_RATIO={minimum:g} is missed",
        "Look for a faster one with `make tune`.",
    )
    FEW_RESPONSES = (NOT_PROVEN, "a window of {mode} had only {requests} response(s)", "Set a longer WINDOW.")
    NO_ANSWER = (NOT_PROVEN, "no request was answered as long as the overload lasted", "Set a longer WINDOW.")
    FEW_ROUNDS = (NOT_PROVEN, "only {rounds} of the rounds were complete, too few for an interval", "{more}")
    TIME_OVER = (
        NOT_PROVEN,
        "the time was over before another configuration was measured twice",
        "Set RESUME=1 MINUTES={minutes}, which goes on from these measurements.",
    )
    WINNER_FAILED = (NOT_PROVEN, "the best in the search failed when it was measured again: {reason}", KEEP)

    # counters that contradict the modes of a comparison
    RAN_TOGETHER = (NOT_PROVEN, "one at a time, '{model}' still generated {steps:.2f} tokens per step", STOP_OTHERS)
    FOREIGN_BATCHES = (
        NOT_PROVEN,
        "with dynamic batching off, '{model}' still ran {mean:.2f} {noun} per execution: something else was using the "
        "server",
        STOP_OTHERS,
    )
    RAN_ONE_AT_A_TIME = (NOT_PROVEN, "together, '{model}' generated only {steps:.2f} tokens per step", "{remedy}")
    NO_BATCHES = (
        NOT_PROVEN,
        "with dynamic batching on, '{model}' ran only {mean:.2f} {noun} per execution",
        "{remedy}",
    )

    # a soak
    PROBLEM = (NOT_PROVEN, "{problem}", "Report it with soak.json.")
    WRONG_ANSWERS = (NOT_PROVEN, "of {requests:,} {kind} requests {numbers}: {messages}", "Report it with soak.json.")
    NOT_FLAT = (NOT_PROVEN, "not flat: {series}", "A longer SOAK shows if that goes on.")
    NOTHING_SENT = (NOT_PROVEN, "no request was sent", "Set a longer SOAK.")
    TOO_SHORT = (NOT_PROVEN, "the soak is too short to judge a slope", "Set SOAK=10 or more.")

    # what makes a measurement doubtful
    OTHER_PROGRAMS = (
        DOUBTFUL,
        "{when}other programs used {amount}{cores:.1f} cores of this machine's {machine}, so the numbers show them too",
        END_PROGRAMS,
    )
    LOCUST_BOUND = (DOUBTFUL, "Locust used a whole core, so {effect}", "Set more WORKERS.")
    THINKING_USERS = (
        DOUBTFUL,
        "{users} users who think between their requests can send {limit:.0f} per second at most, and they sent "
        "{share:.0f} % of that or more in both modes of the ratio: the users were the limit, not the server",
        "Clear WAIT to see what the server can answer.",
    )
    SENT_LATE = (DOUBTFUL, "Locust sent one of twenty requests more than {late:.0f} ms after its arrival", "{remedy}")
    FEW_ARRIVALS = (
        DOUBTFUL,
        "only {arrived:.0f} of {scheduled:.0f} requests per second arrived",
        "Set a longer WINDOW.",
    )
    NOT_SENT = (DOUBTFUL, "{requests} requests were not sent, because all users were waiting", "Set a lower OVERLOAD.")
    REPEATS_DISAGREE = (DOUBTFUL, "measurements of one configuration disagree", END_PROGRAMS)
    ROUNDS_DISAGREE = (DOUBTFUL, "the rounds disagree: {ratios} {low:.2f} to {high:.2f}", "{more}")

    # what a quiet measurement does not prove
    RATIO_TOO_LOW = (NOT_PROVEN, "the ratio is below MIN_RATIO={minimum:g}", "Look for a faster one with `make tune`.")
    INTERVAL_TOO_LOW = (NOT_PROVEN, "the 95 % interval begins below MIN_RATIO={minimum:g}", "{more}")
    NOT_CONFIRMED = (NOT_PROVEN, "the best in the search did not win when it was measured again", KEEP)
    NOTHING_BETTER = (NOT_PROVEN, "no other configuration won", KEEP)
    CONTAINS_ONE = (NOT_PROVEN, "the 95 % interval contains 1", "{more}")


ORDER = list(Code)


class Cause:
    """One reason and what its texts name; `str` makes the sentence, without a period."""

    def __init__(self, code: Code, **fields: Any) -> None:
        self.code, self.fields = code, fields

    def __str__(self) -> str:
        return self.code.text.format(**self.fields)

    @property
    def remedy(self) -> str:
        return self.code.remedy.format(**self.fields)


def judge(
    causes: Iterable[Cause | None],
    number: float | None = None,
    ratios: Sequence[float] | None = None,
    interval: Sequence[float] | None = None,
    minimum: float = 0.0,
    more: str = "",
) -> dict[str, Any]:
    """Return the verdict: its word, its causes, the remedy of the first one, and the number if it may be shown large.

    `ratios` are those of the rounds, of which `number` is the mean and `interval` the 95 % interval. It has to be clear
    of 1, or with `minimum` (MIN_RATIO) to begin there. `more` is the sentence on how to get a narrower interval.
    """
    known = [cause for cause in causes if cause]
    if ratios is not None:
        known += filter(None, [of_rounds(ratios, interval, number or 0.0, minimum, more)])
    known.sort(key=lambda cause: ORDER.index(cause.code))
    word = known[0].code.word if known else PROVEN
    return {
        "word": word,
        "causes": [{"code": cause.code.name, "text": str(cause)} for cause in known],
        "remedy": known[0].remedy if known else "",
        "large": number if word == PROVEN else None,
    }


def of_rounds(
    ratios: Sequence[float], interval: Sequence[float] | None, mean: float, minimum: float, more: str
) -> Cause | None:
    """Return why these rounds prove nothing, or nothing."""
    if interval is None or len(ratios) < ENOUGH_ROUNDS:
        return Cause(Code.FEW_ROUNDS, rounds=len(ratios), more=more)
    low, high = interval
    if minimum and mean < minimum:
        return Cause(Code.RATIO_TOO_LOW, minimum=minimum)
    if minimum and low < minimum:
        return Cause(Code.INTERVAL_TOO_LOW, minimum=minimum, more=more)
    if not minimum and low <= 1 <= high:
        return Cause(Code.CONTAINS_ONE, more=more)
    if min(ratios) < 1 < max(ratios) and not low <= 1 <= high:
        return Cause(Code.ROUNDS_DISAGREE, ratios="their ratios are", low=min(ratios), high=max(ratios), more=more)
    return None


def sentence(verdict: dict[str, Any], number: str) -> str:
    """Return the headline: the word and the cause, the number as `number` names it, and the remedy.

    `number` is a sentence that begins with a small letter.
    """
    word = verdict["word"].capitalize()
    if not verdict["causes"]:
        return f"{word}: {number}"
    return f"{word}: {verdict['causes'][0]['text']}. {number[0].upper()}{number[1:]} {verdict['remedy']}"


def also(verdict: dict[str, Any]) -> list[str]:
    """Return a sentence for each other cause."""
    return [f"Also: {cause['text']}." for cause in verdict["causes"][1:]]


def busy_machine(cores: float | None, machine: int, when: str = "", amount: str = "up to ") -> Cause | None:
    """Return the cause if other programs used that many cores of the machine's, and that is too much."""
    if not is_busy(cores, machine):
        return None
    return Cause(Code.OTHER_PROGRAMS, when=when, amount=amount, cores=cores, machine=machine)
