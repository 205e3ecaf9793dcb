"""The verdict of a search as a sentence and as a table, the same on the terminal and in the report."""

from __future__ import annotations

from typing import Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from loadtest.measure import verdicts
from loadtest.measure.statistics import Results, geometric_mean
from loadtest.measure.verdicts import PROVEN
from loadtest.tune.search import BETTER, FAILED, NOT_COMPARED, NOT_CONFIRMED, NOT_PROVEN, TOO_BUSY, Measured

# A candidate, as tune.json has it.
Arm = dict[str, Any]

AS_CONFIGURED, YOURS = "as configured", "your configuration"
RATE_UNIT, LATENCY_UNIT = "requests/s", "p95 ms"
# Ahead on average, but not proven.
LIKELY = "likely better"
STYLES = {"better": "green", LIKELY: "green", PROVEN: "bold green", "failed": "red"}
# Columns of a candidate's label in the lines that are printed during the search.
LABEL = 27


def sentence(results: Results) -> str:
    """Return the headline: the verdict and its cause, what was measured, and what to do if that is not proven."""
    return verdicts.sentence(results["verdict"], measured(results))


def measured(results: Results) -> str:
    """Return what was measured, as a sentence that begins with a small letter."""
    system, again, values = results["system"], results["confirmation"], results["original"]["values"]
    at_rate = "rate" in results["goal"]
    if results["outcome"] == BETTER:
        before, after = (figure(again[key]) for key in ("original", "winner"))
        if at_rate:
            return (
                f"{goal(results)}, {system} with the changes below answers 95 % of the requests within {after} ms "
                f"instead of {before} ms, {gain(again, results)}."
            )
        return (
            f"with the changes below, {system} answers {gain(again, results)} {goal(results)}: {after} instead of "
            f"{before} requests/s."
        )
    if results["outcome"] == NOT_CONFIRMED:
        winner = results["winner"]["label"]
        if not again:
            return f"{winner} was not measured again beside your configuration."
        return f"beside your configuration, {winner} answers {gain(again, results)}."
    if results["outcome"] == TOO_BUSY:
        label, values = results["disagreement"]["label"], results["disagreement"]["values"]
        reached, unit = ("had a p95 of", "ms") if at_rate else ("reached", RATE_UNIT)
        return (
            f"{YOURS if label == AS_CONFIGURED else label} {reached} {number(min(values))} to {number(max(values))} "
            f"{unit} in {len(values)} measurements of the same."
        )
    if len(values) < 2:  # a number that was measured once is in no verdict
        seen = f"{YOURS} was measured {'once' if values else 'not once'}."
    elif at_rate:
        seen = f"{goal(results)}, {YOURS} answers 95 % of the requests within {figure(values)} ms."
    else:
        seen = f"{YOURS} answers {figure(values)} requests/s {goal(results)}."
    return seen if results["outcome"] == NOT_COMPARED else f"{seen} {runner_up(results)}"


def runner_up(results: Results) -> str:
    """Return a sentence about the best candidate that is not better, with its interval."""
    arms = results["arms"]
    measured = [arm for arm in arms if arm["ratio"] is not None and len(arm["values"]) > 1]
    if not measured:
        if not arms or any(arm["outcome"] != FAILED for arm in arms):
            return "No other candidate was measured twice."
        return "The only other candidate failed." if len(arms) == 1 else f"All {len(arms)} other candidates failed."
    best = max(measured, key=lambda arm: arm["ratio"])
    return f"The best other candidate, {best['label']}, answers {gain(best, results)}."


def goal(results: Results) -> str:
    """Return the target and what it times."""
    target, tokens = results["goal"], results["new_tokens"]
    whole = f" for a whole text of at most {tokens} tokens" if tokens else ""
    if "rate" in target:
        return f"at {target['rate']:g} requests/s{whole}"
    parts = [f"{target['p95_ms']:g} ms{whole}"] if "p95_ms" in target else []
    parts += [f"{target['first_token_ms']:g} ms for its first token"] if "first_token_ms" in target else []
    return f"with a p95 of at most {' and '.join(parts)}"


def gain(compared: Arm, results: Results) -> str:
    """Return the ratio to the other configuration, in words and with its interval."""
    unit = "as fast" if "rate" in results["goal"] else "as many requests"
    return f"{number(compared['ratio'])} times {unit} (95 % interval {interval(compared, ' to ')})"


def number(value: float) -> str:
    """Return at least three significant digits, so that 8.25 and 8.31 requests/s differ."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def figure(values: list[float]) -> str:
    """Return the mean of a configuration's rounds: the geometric one, so that two of them have the ratio shown."""
    return number(geometric_mean(values)) if values else "-"


def interval(compared: Arm, dash: str = "-") -> str:
    return dash.join(map(number, compared["ci95"] or ()))


def columns(results: Results) -> list[str]:
    unit = LATENCY_UNIT if "rate" in results["goal"] else RATE_UNIT
    return ["candidate", unit, "beside", "ratio", "95 % interval", "outcome"]


def rows(results: Results) -> list[list[str]]:
    """Return a row for the original configuration, for each candidate, and for the winner that is measured again."""
    # On a machine that was too busy to tell, no candidate is better.
    told = results["outcome"] != TOO_BUSY
    compared = [
        [arm["label"], *cells(arm if told or arm["outcome"] == FAILED else arm | {"outcome": NOT_PROVEN})]
        for arm in results["arms"]
    ]
    original = [AS_CONFIGURED, figure(results["original"]["values"]), "", "", "", ""]
    return [original, *compared, *confirmation_rows(results)]


def confirmation_rows(results: Results) -> list[list[str]]:
    again = results["confirmation"]
    if not again:
        return []
    arm = again | {"values": again["winner"], "base_values": again["original"], "outcome": results["verdict"]["word"]}
    return [[f"{winner_name(results)}, measured again", *cells(arm)]]


def winner_name(results: Results) -> str:
    return "the winner" if results["outcome"] == BETTER else "the best in the search"


def cells(arm: Arm) -> list[str]:
    """Return a candidate's value, that of the configuration beside it, their ratio, its interval, and the outcome.

    The ratio is empty until there is one. The sign < marks a candidate so slow that its highest rate was not looked
    for.
    """
    below = "<" * bool(arm.get("is_bound"))
    ratio = "" if arm["ratio"] is None else f"{below}{number(arm['ratio'])}"
    return [below + figure(arm["values"]), figure(arm["base_values"]), ratio, interval(arm), arm["outcome"]]


def failures(results: Results) -> list[str]:
    """Return why candidates failed."""
    return [f"{arm['label']} {arm['outcome']}: {arm['reason']}" for arm in results["arms"] if arm["reason"]]


def notes(results: Results) -> list[str]:
    return [f"Note: {note}." for note in results["notes"]]


def arms_header(larger_is_better: bool) -> str:
    """Return the header of the lines that arm_line() returns."""
    unit = RATE_UNIT if larger_is_better else LATENCY_UNIT
    return f"{'candidate':<{LABEL}}{unit:>11}{'beside':>8}{'ratio':>7}  {'interval':<11}outcome"


def measured_line(seconds: float, label: str, measured: Measured, larger_is_better: bool) -> str:
    """Return the line of one measurement, for a log."""
    value = "<" * measured.is_bound + number(measured.value)
    shown = f"{value} {RATE_UNIT}" if larger_is_better else f"p95 {value} ms"
    return escape(f"{int(seconds) // 60:>3}:{int(seconds) % 60:02}  {label}: {shown}")


def arm_line(arm: Arm) -> str:
    """Return a candidate's line during the search, in rich's markup."""
    value, beside, ratio, bounds, outcome = cells(arm)
    label = escape(cut(arm["label"], LABEL).ljust(LABEL))
    return f"{label}{value:>11}{beside:>8}{ratio:>7}  {bounds:<11}{styled(outcome)}"


def cut(label: str, width: int) -> str:
    """Cut a label in the middle: its beginning names the model, its end the value."""
    if len(label) <= width:
        return label
    kept = width - 1
    return f"{label[: kept // 2]}…{label[-(kept - kept // 2) :]}"


def styled(outcome: str) -> str:
    style = STYLES.get(outcome)
    return f"[{style}]{outcome}[/]" if style else outcome


def print_result(results: Results, console: Console) -> None:
    """Print the sentence, the table, what to know about it, and the diff of a proven winner."""
    console.print(f"\n[bold]{escape(sentence(results))}[/]")
    for cause in verdicts.also(results["verdict"]):
        console.print(escape(cause))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for position, column in enumerate(columns(results)):
        # Two lines, so that a label with its model and knob fits a terminal of 80 columns.
        heading = column.replace("% ", "%\n").replace("requests/s", "requests\n/s")
        justify: JustifyMethod = "right" if position in (1, 2, 3) else "left"
        table.add_column(heading, justify=justify, no_wrap=position > 0, vertical="bottom")
    first_of_confirmation = len(rows(results)) - len(confirmation_rows(results))
    for number, row in enumerate(rows(results)):
        if number == first_of_confirmation:
            table.add_row()
        table.add_row(*map(escape, row[:-1]), styled(row[-1]))
    console.print(table, soft_wrap=False)  # so that long labels wrap within their column
    console.print()
    for line in [*failures(results), *notes(results)]:
        console.print(escape(line))
    if results["verdict"]["word"] == PROVEN:
        console.print(coloured(results["diff"]), end="")


def coloured(diff: str) -> Text:
    text = Text()
    for line in ["", *diff.splitlines()]:
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")
        text.append(f"{line}\n", "bold" if line.startswith(("+++", "---")) else style)
    return text
