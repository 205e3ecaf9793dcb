"""Format numbers in the units that the dashboards use, as Grafana formats them, except that seconds stay seconds."""

from __future__ import annotations

import math

from triton_transformers.settings import UserError

# Unit -> (size, name) in rising order. A value is shown in the largest size that is not above it.
SCALES: dict[str, list[tuple[float, str]]] = {
    "s": [(1e-6, "µs"), (1e-3, "ms"), (1, "s")],  # of latencies, which nobody compares in minutes
    "bytes": [(2.0 ** (10 * n), unit) for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))],
    "watt": [(1, "W"), (1000, "kW")],
    "joule": [(1e-3, "mJ"), (1, "J"), (1000, "kJ")],
    "reqps": [(1, "req/s"), (1000, "K req/s")],
    "short": [(1, ""), (1000, "K"), (1e6, "Mil")],
    "none": [(1, "")],
}


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return (divisor, name) for values up to this one, on an axis or alone."""
    if unit == "percentunit":
        return 0.01, "%"
    if unit.startswith("suffix:"):
        return 1, unit.removeprefix("suffix:").strip()
    if unit not in SCALES:
        raise UserError(f"unknown unit '{unit}'; known are percentunit, suffix:..., {', '.join(SCALES)}")
    fitting = [(size, name) for size, name in SCALES[unit] if size <= abs(largest)]
    # Zero is shown in the plain unit.
    return fitting[-1] if fitting else next((size, name) for size, name in SCALES[unit] if size >= 1 or largest)


def text(value: float, unit: str, decimals: int | None = None) -> str:
    if not math.isfinite(value):
        return "-"
    size, name = scale(unit, value)
    shown = value / size
    if decimals is None:
        decimals = 0 if shown == 0 or abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2
        number = f"{shown:.{decimals}f}"
        number = number.rstrip("0").rstrip(".") if "." in number else number
    else:
        number = f"{shown:.{decimals}f}"
    return f"{number}{'' if name in ('%', '') else ' '}{name}"
