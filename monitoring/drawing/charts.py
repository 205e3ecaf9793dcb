"""Charts for a light and for a dark page, drawn by one function that gets the colours."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from triton_transformers.files import write_atomically

# The colours of a comparison's modes, in reports and on dashboards. Grafana has one palette for both themes, so each is
# readable on white and on black, and differs from the others for colour-blind readers too.
MODE_COLOURS = {"none": "#e0752d", "instances": "#1b9e77", "dynamic": "#3274d9"}


@dataclass(frozen=True)
class Palette:
    """The colours of a page, and of the modes of a comparison."""

    ink: str
    quiet: str
    faint: str
    paper: str
    none: str
    instances: str
    dynamic: str

    def colour_of(self, mode: str) -> str:
        return {"none": self.none, "instances": self.instances, "dynamic": self.dynamic}[mode]


LIGHT = Palette(ink="#24292f", quiet="#818b98", faint="#d8dee4", paper="#ffffff", **MODE_COLOURS)
DARK = Palette(ink="#d5dbe1", quiet="#8d96a0", faint="#343b43", paper="#161b22", **MODE_COLOURS)
PALETTES = {"light": LIGHT, "dark": DARK}
# Colours that no chart has of its own, such as those of a dashboard's lines, which are alike in both themes.
PLACEHOLDERS = Palette(*(f"#01020{number}" for number in range(7)))


@dataclass(frozen=True)
class Chart:
    """A figure, and its size in inches on a wide page and on a phone."""

    draw: Callable[[Figure, Palette], None]
    wide: tuple[float, float]
    narrow: tuple[float, float]


def render(draw: Callable[[Figure, Palette], None], size: tuple[float, float], palette: Palette, form: str) -> bytes:
    """Return the content of a chart's file in the format `form`: svg or png."""
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": palette.ink,
        "axes.labelcolor": palette.ink,
        "axes.edgecolor": palette.faint,
        "axes.facecolor": palette.paper,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": palette.faint,
        "grid.linewidth": 0.6,
        "xtick.color": palette.ink,
        "ytick.color": palette.ink,
        "legend.frameon": False,
        "figure.facecolor": palette.paper,
        "svg.hashsalt": "figure",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, palette)
        out = io.BytesIO()
        figure.savefig(out, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def svg_data_urls(draw: Callable[[Figure, Palette], None], size: tuple[float, float]) -> dict[str, str]:
    """Return the chart as a data: URL for each theme, light and dark."""
    drawing = render(draw, size, PLACEHOLDERS, "svg")
    return {
        theme: "data:image/svg+xml;base64," + base64.b64encode(coloured(drawing, palette)).decode()
        for theme, palette in PALETTES.items()
    }


def coloured(svg: bytes, palette: Palette) -> bytes:
    """Return a chart that was drawn in PLACEHOLDERS in the colours of a palette. To draw it again would take 0.1 s."""
    pairs = zip(astuple(PLACEHOLDERS), astuple(palette), strict=True)
    colours = {before.encode(): after.encode() for before, after in pairs}
    return re.sub(b"|".join(colours), lambda match: colours[match[0]], svg)


def write_charts(charts: dict[str, Chart], folder: Path) -> None:
    """Write each chart as a PNG file for a light page."""
    for title, chart in charts.items():
        write_atomically(folder / f"{title}.png", render(chart.draw, chart.wide, LIGHT, "png"))


def images(charts: dict[str, Chart]) -> dict[str, dict[str, dict[str, str]]]:
    """Return each chart as data: URLs for a wide page and for a phone, light and dark."""
    return {
        title: {"wide": svg_data_urls(chart.draw, chart.wide), "narrow": svg_data_urls(chart.draw, chart.narrow)}
        for title, chart in charts.items()
    }
