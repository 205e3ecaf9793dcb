"""The page: self-contained, and it says what the numbers say."""

import re
from html.parser import HTMLParser

import pytest
from markupsafe import Markup, escape

from loadtest import charts as plots
from loadtest import report, table
from loadtest import statistics as results
from loadtest.switching import MODES
from scripts.common.figures import DARK, LIGHT, render
from scripts.common.settings import SECRETS, Settings
from tests.unit.test_results import rounds


@pytest.fixture
def found():
    windows = rounds([(100, 150), (100, 160), (100, 140)])
    return {
        "system": "embedding",
        "profile": "cpu",
        "runtime": "local",
        "host": {"cpu": "a CPU", "cores": 2, "memory_gb": 24, "gpu": None, "system": "Linux"},
        "triton": {"version": "2.51.0", "image": None},
        "settings": {
            "users": 64,
            "workers": 0,
            "protocol": "http",
            "wait": [0.0, 0.0],
            "rounds": 3,
            "window_s": None,
            "warmup_s": 3.0,
            "seed": 1,
            "texts": {"file": "texts.txt", "count": 240},
            "min_ratio": 0.0,
            "triton_cpus": "",
        },
        "command": "make loadtest NOTE='<script>'",
        "model": "encoder",
        "noun": "texts",
        "modes": {mode: results.summary([w for w in windows if w.mode == mode], "encoder") for mode in MODES},
        "windows": [results.window_record(w, "encoder") for w in windows],
        "verdict": results.verdict(windows, "encoder"),
        "stopped": "",
        "unproven": "",
        "complaints": ["the ratio is below"],
    }, windows


def test_the_page_is_self_contained_and_escaped(found):
    page = report.html(found[0], plots.all_plots(*found), Markup("<p>drawn</p>"))
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', page)
    assert len(sources) == 8
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "<script" not in page
    HTMLParser().feed(page)


def test_every_figure_of_the_table_is_on_the_page(found):
    page = report.html(found[0], plots.all_plots(*found), Markup("<p>drawn</p>"))
    for row in table.rows(found[0]):
        for cell in row:
            assert escape(cell) in page
    assert escape(table.sentence(found[0])) in page
    assert "the ratio is below" in page


def test_the_page_says_what_was_sent(found):
    result = found[0]
    page = report.html(result, plots.all_plots(*found), Markup("<p>drawn</p>"))
    assert "240 of <code>loadtest/texts.txt</code>" in page
    assert "texts a batch (encoder)" in page
    del result["settings"]["texts"]
    result["settings"]["pictures"] = {"count": 36}
    result["noun"] = "pictures"
    page = report.html(result, plots.all_plots(*found), Markup("<p>drawn</p>"))
    assert "<dt>pictures</dt><dd>36, made up" in page
    assert "pictures a batch (encoder)" in page
    assert "texts" not in page


@pytest.mark.parametrize("title", ["throughput", "latency", "batches", "time"])
def test_figures_draw_in_both_formats(found, title):
    plot = plots.all_plots(*found)[title]
    assert render(plot.draw, plot.size, LIGHT, "png").startswith(b"\x89PNG")
    assert b"<svg" in render(plot.draw, plot.size, DARK, "svg")


def test_the_sentence(found):
    said = table.sentence(found[0])
    assert "1.50 times the requests" in said
    assert "64 users" in said
    found[0]["verdict"] |= {"throughput_ratio": 1.01, "ci95": [0.97, 1.05]}
    assert "no difference" in table.sentence(found[0])


def test_complaints(found):
    good = found[0]
    assert report.complaints(good) == []
    good["settings"]["min_ratio"] = 1.6
    assert "below MIN_RATIO=1.6" in report.complaints(good)[0]
    good["settings"]["min_ratio"] = 0.0
    good["windows"][0]["failures"] = 3
    good["verdict"]["client_bound"] = True
    good["stopped"] = "interrupted"
    assert len(report.complaints(good)) == 3


def test_one_user_is_the_likely_cause(found):
    found[0]["unproven"] = "with dynamic batching on, 'encoder' ran only 1.00 texts an execution"
    found[0]["modes"]["dynamic"]["mean_batch"] = 1.0
    assert "allow_ragged_batch" in report.complaints(found[0])[0]
    found[0]["settings"]["users"] = 1
    assert "use more USERS" in report.complaints(found[0])[0]


def test_the_command_says_what_differs_and_no_secret():
    secrets = {name: "a-secret" for name in SECRETS}
    said = report.command(Settings(Settings.load() | secrets | {"USERS": "64", "TRITON_HTTP_PORT": "8010"}))
    assert "USERS=64" in said
    assert "a-secret" not in said
    assert "8010" not in said
