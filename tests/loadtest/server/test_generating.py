"""The load test of systems that generate text: their modes, requests, counters, windows and report."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from loadtest.compare.compare import Comparison
from loadtest.load.arrivals import Sample
from loadtest.load.examples import Examples
from loadtest.load.locust_users import Traffic, user_class
from loadtest.measure import statistics
from loadtest.measure.windows import Experiment, Plan
from loadtest.reports import report
from loadtest.server import generating
from loadtest.server.generating import Generated, Reader
from loadtest.server.machine import OtherPrograms
from loadtest.server.switching import Capacity, Switch, plan
from monitoring.drawing.charts import LIGHT, render
from tests.support.measured_windows import comparison, generating_rounds
from triton_transformers.settings import MODES, Settings, UserError
from triton_transformers.triton import TritonError

INPUTS = ("prompt", "TYPE_STRING"), ("text_input", "TYPE_STRING"), ("max_new_tokens", "TYPE_INT32")
STORY = {
    "name": "story",
    "max_batch_size": 0,
    "input": [{"name": name, "data_type": kind, "dims": ["-1"], "optional": True} for name, kind in INPUTS],
    "parameters": {"max_batch": {"string_value": "16"}, "dtype": {"string_value": "auto"}},
}
ENCODER = {"name": "encoder", "max_batch_size": 8, "input": [{"name": "input_ids", "data_type": "TYPE_INT64"}]}
PAGE = """\
# TYPE transformers_generated_tokens_total counter
transformers_generated_tokens_total{model="story",version="1"} 100
transformers_generated_tokens_total{model="story",version="2"} 20
transformers_generated_tokens_total{model="other",version="1"} 7
transformers_runs_total{model="story",version="1"} 30
transformers_runs_total{model="encoder",version="1"} 9
transformers_first_tokens_total{model="story",version="1"} 4
transformers_first_token_microseconds_total{model="story",version="1"} 2e+06
transformers_later_tokens_total{model="story",version="1"} 50
transformers_later_token_microseconds_total{model="story",version="1"} 1e+06
transformers_running_texts{model="story",version="1"} 3
"""


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "max_batch", "expected"),
    [
        (STORY, None, {"none": "1", "instances": "1", "dynamic": "16"}),
        (STORY, 4, {"none": "1", "instances": "1", "dynamic": "4"}),
        (STORY | {"parameters": {}}, None, {"none": "1", "instances": "1", "dynamic": None}),
    ],
)
def test_only_max_batch_differs_between_the_modes(config, max_batch, expected):
    (model,) = plan({"story": config}, max_batch, MODES, 2)
    for mode, limit in expected.items():
        own = {"max_batch": {"string_value": limit}} if limit else {}
        assert model.modes[mode] == config | {"parameters": config["parameters"] | own}


@pytest.mark.parametrize(("config", "max_batch"), [(generating.with_limit(STORY, 1), None), (STORY, 1)])
def test_model_that_is_configured_for_one_text_cannot_be_compared(config, max_batch):
    with pytest.raises(UserError, match="nothing here can batch"):
        plan({"story": config}, max_batch, MODES)


class OneModel:
    """A Triton of one model that has no memory for the weights of two."""

    name = "stand-in"

    def __init__(self, config: dict) -> None:
        self.current: dict | None = config
        self.calls: list[str] = []

    def config(self, model):
        if self.current is None:
            raise TritonError("not loaded", 400)
        return self.current

    def load(self, model, config):
        self.calls.append("load")
        if self.current not in (None, config):
            raise TritonError("story takes about 15.9 GB and 5.1 GB of memory are free here", 400)
        self.current = config

    def unload(self, model, timeout):
        self.calls.append("unload")
        self.current = None


def test_switch_never_holds_the_weights_twice(tmp_path):
    triton = OneModel(STORY)
    with Switch(triton, plan({"story": STORY}, None, ("none", "dynamic")), tmp_path) as switch:
        switch.to("dynamic")
        assert "unload" not in triton.calls  # it is as configured already
        switch.to("none")
        assert triton.current["parameters"]["max_batch"] == {"string_value": "1"}
        assert triton.calls.count("unload") == 1
        triton.current = None  # somebody else unloads it meanwhile
    assert triton.current == STORY
    assert list(tmp_path.iterdir()) == []


# --- requests ---------------------------------------------------------------------------------------------------------


def test_request_is_a_prompt_with_the_number_of_new_tokens():
    ((prompt, count),) = Examples.from_config(STORY, ["hello"], 300).requests
    assert (prompt.name, prompt.shape, prompt.data[4:]) == ("prompt", [1], b"hello")
    assert (count.name, count.datatype, count.shape, count.data) == ("max_new_tokens", "INT32", [1], b"\x2c\x01\0\0")
    streaming = STORY | {"name": "story_stream", "model_transaction_policy": {"decoupled": True}}
    with pytest.raises(UserError, match=r"SYSTEM=story_stream streams.*set the system that answers once \(story\)"):
        Examples.from_config(streaming, ["hello"])


def test_comparison_finds_out_from_the_server_that_the_system_generates():
    measured = Comparison(Settings.load().replace(SYSTEM="story", USERS="", TOKENS="7"))
    measured.triton = OneModel(STORY)
    measured.triton.composing = lambda system: {system: STORY}
    assert (measured.workload.users, measured.plan.generates) == (8, True)
    assert user_class(Traffic(measured.job)).network_timeout == 600
    assert measured.job.requests[0][-1].data == b"\x07\0\0\0"


def test_original_is_what_an_earlier_killed_comparison_restored(monkeypatch):
    """The settings are checked, and so the system is looked at, before that comparison is undone."""
    monkeypatch.setattr(Capacity, "from_server", classmethod(lambda cls, settings: Capacity(2)))
    measured = Comparison(Settings.load().replace(SYSTEM="story"))
    measured.triton = OneModel(STORY)
    left, restored = generating.with_limit(STORY, 1), STORY
    measured.triton.composing = lambda system: {system: left}
    assert measured.plan.users == 8
    measured.triton.composing = lambda system: {system: restored}
    (model,) = measured.switched_models()
    assert model.original == STORY


# --- counters ---------------------------------------------------------------------------------------------------------


def test_counters_are_those_of_the_model_in_all_versions():
    counters = Generated.from_metrics(PAGE, "story", 5.0)
    assert counters == Generated(5.0, 120, 30, 4, 2e6, 50, 1e6)
    growth = counters.since(Generated(1.0, 20, 10, 2, 1e6, 10, 2e5))
    assert (growth.tokens_per_second, growth.tokens_per_step) == (25, 5)
    assert (growth.first_token_ms, growth.output_token_ms) == (500, 20)


def test_times_that_the_backend_does_not_count_are_a_dash(measured):
    page = "\n".join(line for line in PAGE.splitlines() if "first" not in line and "later" not in line)
    counters = Generated.from_metrics(page, "story", 1.0)
    assert (counters.first_token_ms, counters.output_token_ms, counters.tokens_per_step) == (None, None, 4)
    for window in measured.windows:
        window.generated = Generated(10, window.generated.generated_tokens, window.generated.runs)
    results = measured.results()
    assert ["time to first token, mean, ms", "-", "-"] in report.rows(results)
    drawn = report.all_charts(results, measured.windows)
    assert render(drawn["tokens"].draw, drawn["tokens"].wide, LIGHT, "png").startswith(b"\x89PNG")


def test_missing_counters_are_an_error():
    for page in (PAGE.replace("story", "another"), ""):
        with pytest.raises(UserError, match="no generated tokens of 'story'"):
            Generated.from_metrics(page, "story", 1.0)


def test_counters_that_fall_are_an_error():
    with pytest.raises(UserError, match="restarted"):
        Generated(2.0, 5).since(Generated(1.0, 9))


@pytest.fixture
def pages(monkeypatch):
    """Return a function that sets the pages to read, as (generated tokens, runs); a second passes with each."""

    def show(*counts: tuple[int, int]) -> None:
        texts = (PAGE.replace("} 100", f"}} {tokens}").replace("} 30", f"}} {runs}") for tokens, runs in counts)
        monkeypatch.setattr(generating, "metrics_page", lambda url: next(texts))

    clock = itertools.count(step=0.1)
    monkeypatch.setattr(generating.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(generating.gevent, "sleep", lambda seconds: None)
    return show


def test_counters_are_read_just_after_the_backend_sent_all_of_them(pages):
    # The first change shows the tokens without their runs, because the backend sends one counter after the other.
    pages((100, 30), (100, 30), (108, 30), (108, 31), (108, 31), (116, 32))
    reading = Reader("http://127.0.0.1:9", "story").read_when_sent()
    assert (reading.generated_tokens, reading.runs) == (128, 31)
    assert reading.seconds == pytest.approx(0.2)  # of the first change


def test_idle_model_is_read_after_a_while(pages):
    pages(*[(100, 30)] * 40)
    assert Reader("http://127.0.0.1:9", "story").read_when_sent().runs == 30


# --- windows ----------------------------------------------------------------------------------------------------------


class SlowUsers:
    """Users of whom one gets a response at each check, from this check on."""

    def __init__(self, first: int = 1) -> None:
        self.samples: list[Sample] = []
        self.first, self.checks, self.cores = first, 0, 0.0

    def check(self) -> None:
        self.checks += 1
        if self.checks >= self.first:
            self.samples.append(Sample(0.0, 20_000.0, ""))

    def open_window(self) -> None:
        self.samples = []

    def close_window(self) -> list[Sample]:
        return self.samples


@pytest.mark.parametrize(
    ("changes", "first", "warm_up", "measured"),
    [({"generates": True}, 1, 8, 16), ({"window_s": 0.01}, 3, 0, 1)],
    ids=["two responses per user", "the first response"],
)
def test_window_lasts_until_it_holds_enough_responses(monkeypatch, changes, first, warm_up, measured):
    monkeypatch.setattr("loadtest.measure.windows.SLOW_MINIMUM_WINDOW_S", 0.2)
    users = SlowUsers(first)
    fields = {"system": "story", "rounds": 2, "window_s": None, "warmup_s": 0.0, "users": 8, "spawn_rate": None}
    others, metrics = OtherPrograms.from_environment({}), SimpleNamespace(cores=lambda cores: None)
    experiment = Experiment(Plan(**fields | changes), MODES, {}, users, None, None, metrics, others, lambda *_: None)
    experiment.warm_up("round 1")
    assert len(users.samples) == warm_up
    users.open_window()
    experiment.wait_for_window("round 1", experiment.now(), lambda *_: None)
    assert len(users.samples) == measured


# --- results ----------------------------------------------------------------------------------------------------------

RATES = [(20, 100), (22, 99), (18, 101)]


@pytest.fixture
def measured(blank_charts) -> Comparison:
    return comparison(Settings.load().replace(USERS="8", SYSTEM="story"), generating_rounds(RATES))


def test_ratio_is_that_of_the_tokens(measured):
    results = measured.results()
    assert results["verdict"]["throughput_ratio"] == pytest.approx((5 * 4.5 * 101 / 18) ** (1 / 3))
    together = results["modes"]["dynamic"]
    assert together["throughput_rps"] == pytest.approx(2)
    assert together["tokens_per_second"] == pytest.approx(100, rel=0.01)
    assert (together["tokens_per_step"], results["modes"]["none"]["tokens_per_step"]) == pytest.approx((6, 1))
    assert (together["first_token_ms"], together["output_token_ms"]) == pytest.approx((400, 50))
    assert results["windows"][0]["tokens_per_second"] == pytest.approx(20)
    assert results["settings"]["new_tokens"] == 32


def test_sentence_and_table_name_the_modes_and_show_both_times(measured):
    results = measured.results()
    assert "batching generated 5.02 times as many tokens of story" in report.sentence(results)
    assert ") as the same server with one text at a time. p95: " in report.sentence(results)
    assert report.columns(results) == ["", "one at a time", "together"]
    rows = {row[0]: row[1:] for row in report.rows(results)}
    assert rows["tokens/s"] == ["19.9", "100.0"]
    assert (rows["together / this mode"], rows["  95 % interval"]) == (["5.02", ""], ["3.81-6.60", ""])
    assert rows["time to first token, mean, ms"] == ["400", "400"]
    assert rows["time per output token, mean, ms"] == ["50.0", "50.0"]
    assert rows["texts together (tokens per step)"] == ["1.00", "6.00"]
    assert report.window_line(measured.windows[1]).split()[:3] == ["1", "dynamic", "100.0"]


def test_streamed_texts_have_percentiles_in_place_of_means(measured):
    for window in measured.windows:
        window.samples = [
            sample._replace(first_token_ms=100.0 + place, output_token_ms=None if place else 20.0)
            for place, sample in enumerate(window.samples)
        ]
    results = measured.results()
    rows = {row[0]: row[1:] for row in report.rows(results)}
    assert rows["time to first token p50, ms"] == ["110", "110"]
    assert rows["time to first token p95, ms"] == ["118", "118"]
    assert rows["time per output token p95, ms"] == ["20.0", "20.0"]
    assert not [name for name in rows if "mean" in name]
    drawn = report.all_charts(results, measured.windows)
    assert b"later token, p95" in render(drawn["tokens"].draw, drawn["tokens"].wide, LIGHT, "svg")


def test_page_shows_tokens_in_place_of_batches(measured):
    results = measured.results()
    page = report.html(results, report.all_charts(results, measured.windows), "")
    assert "Time per token" in page
    assert "Generated tokens per second over time" in page
    assert "one per request, at most 32 new tokens each, seed 1" in page
    assert "until it holds 16 requests, after 3&nbsp;s of warm-up and one response to each user" in page
    for absent in ("Batch sizes", "Dynamic batching", "dynamic batching", "Where a request spends its time"):
        assert absent not in page


def test_round_in_which_every_request_failed_does_not_count():
    """The backend counts the tokens of failed requests too, but the window has no latency."""
    windows = generating_rounds(RATES)
    windows[0].samples = [sample._replace(error="504") for sample in windows[0].samples]
    assert [by_mode["none"].round for by_mode in statistics.complete_rounds(windows)] == [2, 3]
