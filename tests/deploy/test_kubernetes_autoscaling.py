"""The components that scale a cluster: docs/kubernetes.md."""

from __future__ import annotations

import pytest
import yaml

from tests.support import promql
from triton_transformers.settings import ROOT

COMPONENTS = ROOT / "deploy/kubernetes/components"


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
