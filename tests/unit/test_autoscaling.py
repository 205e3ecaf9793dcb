"""The simulation of `make bench BENCH=autoscaling`: Kubernetes' algorithm, one replica, a day."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import yaml

from bench.autoscaling.benchmark import BEHAVIORS, TARGETS
from bench.autoscaling.horizontal_autoscaler import (
    Behavior,
    HorizontalAutoscaler,
    Policy,
    for_average_value,
    for_utilization,
    for_value,
)
from bench.autoscaling.measured_replica import Measurement, Point
from bench.autoscaling.simulated_day import CPU, IN_FLIGHT, QUEUE, RATE, ROOT, Scaler, arrivals, simulate
from bench.autoscaling.steady_replica import EDGES, Replica, bins, percentile, simulate_steady, tabulate
from tests.support import promql
from triton_transformers.settings import ROOT as ROOT_FOLDER

LAX, FAST = 0.1, Behavior(down_window_s=0)
REPLICA = Replica(0.004, 0.0025, 64)


@pytest.fixture(scope="module")
def table():
    return tabulate(REPLICA)


# --- Kubernetes' algorithm: the examples of its documentation ---------------------------------------------------------


@pytest.mark.parametrize(("value", "replicas"), [(0.2, 6), (0.05, 2), (0.109, 3), (0.091, 3), (0.112, 4)])
def test_replicas_follow_the_ratio_outside_the_tolerance(value, replicas):
    """Return twice the replicas for a value of 200m and a target of 100m, and half of them for 50m."""
    assert for_value(value, 0.1, LAX, 3, 3) == replicas
    assert for_utilization(value, 0.1, LAX, 3, 3) == replicas
    assert for_average_value(round(3 * value, 3), 0.1, LAX, 3) == replicas


def test_level_counts_only_replicas_that_are_ready():
    assert for_value(2.0, 1.0, LAX, 6, 4) == 8


def test_cpu_counts_starting_replicas_as_idle_to_scale_out():
    """Keep 4 + 4 replicas if the 4 that are measured use twice the target: the others will share it."""
    assert for_utilization(1.6, 0.8, LAX, 8, 4) == 8
    assert for_utilization(2.4, 0.8, LAX, 8, 4) == 12
    # Idle ones must not turn a proposal to scale out into one to scale in.
    assert for_utilization(1.0, 0.8, LAX, 8, 4) == 8


def test_policies_of_the_documentation_remove_a_tenth_or_four_per_minute():
    """Scale in from 80 to 10: 8 first, then 10 % of 72 rounded up, and 4 at a time below 40."""
    behavior = Behavior(down_window_s=0, down=(Policy(4, 60), Policy(10, 60, is_percent=True)))
    autoscaler = HorizontalAutoscaler(behavior, 1, 100, 80)
    seen = [80]
    for minute in range(1, 13):
        seen.append(autoscaler.decide(60.0 * minute, seen[-1], 10))
    assert seen[:4] == [80, 72, 64, 57]
    below = [value for value in seen if value < 40]
    assert all(earlier - later == 4 for earlier, later in itertools.pairwise(below))


def test_default_policies_double_or_add_four_in_15_seconds():
    for replicas, next_step in ((1, 5), (3, 7), (10, 20)):
        assert HorizontalAutoscaler(Behavior(), 1, 100, replicas).decide(15, replicas, 90) == next_step


def test_policy_counts_what_was_added_within_its_period():
    autoscaler = HorizontalAutoscaler(Behavior(up=(Policy(4, 60),)), 1, 100, 2)
    assert [autoscaler.decide(now, replicas, 50) for now, replicas in ((0, 2), (15, 6), (60, 6))] == [6, 6, 10]


def test_scale_in_takes_the_highest_proposal_of_its_window():
    autoscaler = HorizontalAutoscaler(Behavior(down_window_s=300), 1, 100, 10)
    assert [autoscaler.decide(now, 10, 4) for now in (15, 150, 285)] == [10, 10, 10]
    assert autoscaler.decide(300, 10, 5) == 5


def test_scale_out_takes_the_lowest_proposal_of_its_window():
    autoscaler = HorizontalAutoscaler(Behavior(up_window_s=30), 1, 100, 4)
    assert [autoscaler.decide(now, 4, proposed) for now, proposed in ((15, 9), (30, 8), (45, 8))] == [4, 8, 8]


def test_limits_hold():
    autoscaler = HorizontalAutoscaler(FAST, 2, 6, 4)
    assert autoscaler.decide(15, 4, 50) == 6
    assert autoscaler.decide(30, 6, 0) == 2


# --- one replica ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_server_without_batches_waits_as_m_d_1(load):
    """Compare with Pollaczek and Khinchine: the mean wait is load * service / (2 * (1 - load))."""
    service = 0.01
    state = simulate_steady(Replica(0.0, service, 1), load / service, np.random.default_rng(1), 400_000)
    assert state.busy == pytest.approx(load, rel=0.01)
    assert state.computing == pytest.approx(load, rel=0.01)
    assert state.waiting == pytest.approx(load * load / (2 * (1 - load)), rel=0.05)


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_means_obey_little_s_law(share):
    rate = share * REPLICA.capacity
    state = simulate_steady(REPLICA, rate, np.random.default_rng(1), 100_000)
    assert state.waiting + state.computing == pytest.approx(rate * state.latencies.mean(), rel=0.02)


@pytest.mark.slow
def test_busy_server_has_half_as_much_waiting_as_computing(table):
    """Expect what arrives during a batch to wait half of it: 70 % of the capacity has nearly the ratio of 90 %."""
    ratio = table.waiting[1:] / table.computing[1:]
    assert ratio[89] - ratio[69] < 0.05
    assert np.all((ratio[69:90] > 0.4) & (ratio[69:90] < 0.6))
    assert table.busy[70] > 0.95
    in_flight = table.waiting + table.computing
    assert in_flight[90] > 2.5 * in_flight[70]


def test_replica_is_the_line_through_the_points():
    points = [Point(1, 0.0, batch, 0.0, 0.004 + 0.0025 * batch) for batch in (1.0, 4.0, 16.0, 60.0)]
    measurement = Measurement(points, 5.0)
    assert dataclasses.astuple(measurement.replica) == pytest.approx((0.004, 0.0025, 64))
    assert measurement.largest_error == pytest.approx(0)
    assert measurement.replica.capacity == pytest.approx(64 / 0.164)


def test_percentile_is_within_a_bin():
    latencies = np.arange(1, 1001) / 1000
    histogram = np.bincount(bins(latencies), minlength=len(EDGES))
    assert percentile(histogram, 0.95) == pytest.approx(0.95, rel=0.021)


# --- a day ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_constant_load_settles_where_the_metric_meets_its_target(table):
    rates = np.full(3600, 8 * REPLICA.capacity)
    (outcome,) = simulate(table, [Scaler(RATE, 0.8 * REPLICA.capacity)], rates, 30)
    replicas = outcome.replicas[-5]
    assert abs(8 / replicas / 0.8 - 1) <= LAX
    assert outcome.replica_hours == pytest.approx(outcome.replicas[:60].mean(), rel=0.02)


@pytest.mark.slow
def test_overload_waits_as_long_as_its_backlog(table):
    """Overload two replicas by a half for 60 s while new ones take an hour: each carries 30 s of work at the end."""
    rates = np.full(61, 2 * REPLICA.capacity * 1.5)
    rates[0] = REPLICA.capacity
    (outcome,) = simulate(table, [Scaler(CPU, 0.8)], rates, 3600)
    longest = EDGES[np.nonzero(outcome.latencies)[0][-1]]
    assert longest == pytest.approx(29.5, rel=0.03)
    assert outcome.latencies.sum() == pytest.approx(rates.sum())


@pytest.mark.slow
def test_new_replicas_serve_only_after_their_start(table):
    rates = np.concatenate([np.full(300, 1.2 * REPLICA.capacity), np.full(900, 6 * REPLICA.capacity)])
    within = [simulate(table, [Scaler(ROOT, 8)], rates, start_s)[0].within(0.2) for start_s in (15, 60, 240)]
    assert within == sorted(within, reverse=True)
    assert within[0] > within[2] + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("scaler", [Scaler(CPU, 0.8), Scaler(QUEUE, 0.4), Scaler(IN_FLIGHT, 4), Scaler(ROOT, 6)])
def test_every_signal_scales_out_and_in(table, scaler):
    quiet, busy = np.full(1200, REPLICA.capacity), np.full(1200, 8 * REPLICA.capacity)
    (outcome,) = simulate(table, [scaler], np.concatenate([quiet, busy, quiet]), 30)
    assert outcome.replicas[38] > 8
    assert outcome.replicas[19] < 5
    assert outcome.replicas[58] < 5


def test_days_are_the_same_for_a_seed_and_differ_otherwise():
    assert np.array_equal(arrivals(1000, 1), arrivals(1000, 1))
    assert not np.array_equal(arrivals(1000, 1), arrivals(1000, 2))
    rates = arrivals(1000, 1)
    assert rates[4 * 3600 : 5 * 3600].mean() < 0.35 * rates[11 * 3600 : 12 * 3600].mean()
    assert math.isclose(arrivals(2000, 1).sum(), 2 * rates.sum())


# --- what is deployed -------------------------------------------------------------------------------------------------

COMPONENTS = ROOT_FOLDER / "deploy/kubernetes/components"


def deployed(path: str) -> dict:
    return yaml.safe_load((COMPONENTS / path).read_text())


def test_both_components_have_the_same_limits_target_and_query():
    keda, hpa = (
        deployed("autoscaling-keda/scaledobject.yaml")["spec"],
        deployed("autoscaling-hpa/autoscaler.yaml")["spec"],
    )
    (rule,) = deployed("autoscaling-hpa/prometheus-adapter.yaml")["externalRules"]
    (trigger,), (metric,) = keda["triggers"], hpa["metrics"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert trigger["metadata"]["query"] == rule["metricsQuery"]
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
    assert trigger["metricType"] == metric["external"]["target"]["type"] == "Value"
    assert metric["external"]["target"]["value"] == f"{1000 * float(trigger['metadata']['threshold']):.0f}m"


def test_deployed_autoscaler_is_one_that_the_benchmark_compares():
    spec = deployed("autoscaling-hpa/autoscaler.yaml")["spec"]
    policies = {
        way: tuple(Policy(own["value"], own["periodSeconds"], own["type"] == "Percent") for own in rules["policies"])
        for way, rules in spec["behavior"].items()
    }
    behavior = Behavior(
        up_window_s=spec["behavior"]["scaleUp"]["stabilizationWindowSeconds"],
        down_window_s=spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"],
        up=policies["scaleUp"],
        down=policies["scaleDown"],
    )
    assert behavior in BEHAVIORS.values()
    target = float(spec["metrics"][0]["external"]["target"]["value"].removesuffix("m")) / 1000
    assert any(target == pytest.approx(math.cbrt(requests), rel=1e-3) for requests in TARGETS[ROOT])


def test_query_reads_a_recorded_series():
    (rule,) = deployed("autoscaling-hpa/prometheus-adapter.yaml")["externalRules"]
    recorded = {rule.get("record") for rule in promql.rules()}
    assert promql.metrics(rule["metricsQuery"]) == {rule["seriesQuery"]}
    assert rule["seriesQuery"] in recorded


@pytest.mark.parametrize("name", ["autoscaling-keda", "autoscaling-hpa"])
def test_component_lists_only_files_that_exist_and_removes_the_replicas(name):
    component = deployed(f"{name}/kustomization.yaml")
    assert component["kind"] == "Component"
    assert all((COMPONENTS / name / resource).is_file() for resource in component["resources"])
    assert yaml.safe_load(component["patches"][0]["patch"]) == [{"op": "remove", "path": "/spec/replicas"}]
