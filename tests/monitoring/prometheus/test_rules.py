"""Prometheus' rules, checked by promtool against the cases in monitoring/prometheus/tests."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from monitoring.drawing.evaluate import BATCHING, load
from scripts.stack.local.programs import prometheus
from tests.support import promql
from triton_transformers.settings import ROOT

FOLDER = ROOT / "monitoring/prometheus"
RUNBOOK = "docs/monitoring.md"


@functools.cache
def loaded(path: str) -> dict:
    return yaml.safe_load((FOLDER / path).read_text())


ALERTS = {rule["alert"]: rule for rule in promql.rules() if "alert" in rule}
RECORDED = sorted({rule["record"] for rule in promql.rules() if "record" in rule})


@pytest.fixture(scope="module")
def promtool():
    binary = prometheus(ROOT / ".local")
    if binary is None:
        pytest.fail("Prometheus is missing: it is not on the PATH, and Debian's package could not be downloaded")
    tool = binary.with_name("promtool")
    if not tool.exists():
        pytest.fail(f"there is no promtool beside {binary}")

    def run(*arguments: str, folder: Path) -> str:
        done = subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("targets", sorted((FOLDER / "targets").iterdir()), ids=lambda path: path.stem)
def test_prometheus_accepts_the_configuration(promtool, tmp_path, targets):
    for name, source in (("prometheus.yml", "prometheus.yml"), ("rules", "rules"), ("targets.json", targets)):
        (tmp_path / name).symlink_to(FOLDER / source)
    output = promtool("check", "config", "--lint-fatal", "prometheus.yml", folder=tmp_path)
    # Prometheus accepts a pattern that matches no file, and a missing file of targets.
    assert f"{len(list((FOLDER / 'rules').iterdir()))} rule files found" in output
    assert "WARNING" not in output
    jobs = [group["labels"]["job"] for group in json.loads((tmp_path / "targets.json").read_text())]
    assert jobs == ["triton", "gateway", "loadtest", *(["neuron"] if targets.stem == "neuron" else [])]


@pytest.mark.parametrize("name", ["recording.yml", "alerts.yml"])
def test_rules_pass_their_cases(promtool, name):
    promtool("test", "rules", name, folder=FOLDER / "tests")


def test_largest_mean_batch_is_drawn_in_measured_windows_only(promtool, tmp_path):
    """A rate reaches three seconds back, so before the window it still has the batches of the mode before."""
    (panel,) = (panel for panel in load(BATCHING)["panels"] if panel["title"] == "Largest mean batch")
    expr = panel["targets"][0]["expr"].replace("$run", "R").replace("$__rate_interval", "4s")
    case = {
        "interval": "1s",
        "input_series": [
            {"series": 'model:batch_size:mean{model="encoder", run="R", mode="none"}', "values": "16x4 1x5"},
            {"series": 'loadtest_window{run="R", mode="none", round="2"}', "values": "_x5 1x5"},
        ],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "4s", "exp_samples": []},
            {"expr": expr, "eval_time": "5s", "exp_samples": [{"labels": '{mode="none"}', "value": 1}]},
        ],
    }
    (tmp_path / "panel.yml").write_text(yaml.safe_dump({"evaluation_interval": "1s", "tests": [case]}))
    promtool("test", "rules", "panel.yml", folder=tmp_path)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_series_has_a_case(name):
    cases = [case for test in loaded("tests/recording.yml")["tests"] for case in test["promql_expr_test"]]
    whole = re.compile(rf"(?<![\w:]){name}(?![\w:])")
    assert any(whole.search(case["expr"]) and case["exp_samples"] for case in cases)


@pytest.mark.parametrize("targets", sorted((FOLDER / "targets").iterdir()), ids=lambda path: path.stem)
def test_target_down_watches_each_target_but_the_load_generator(targets):
    (named,) = re.findall(r'up\{job=~"([\w|]+)"\} == 0', ALERTS["TargetDown"]["expr"])
    jobs = {group["labels"]["job"] for group in json.loads(targets.read_text())}
    assert jobs - set(named.split("|")) == {"loadtest"}


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_link_a_case_that_fires_and_one_that_does_not(name):
    assert ALERTS[name]["annotations"]["runbook"] == f"{RUNBOOK}#{name.lower()}"
    cases = [case for test in loaded("tests/alerts.yml")["tests"] for case in test["alert_rule_test"]]
    expected = [case["exp_alerts"] for case in cases if case["alertname"] == name]
    assert any(expected), "no case in which it fires"
    assert not all(expected), "no case in which it must not fire"


def test_runbook_has_one_section_per_alert():
    sections = re.findall(r"^### (.*)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    assert sections == list(ALERTS)
