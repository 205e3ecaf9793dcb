"""The stack on a real cluster, under load: no step of its operation fails a request. The steps build on each other."""

from __future__ import annotations

import os
import time
from datetime import datetime

import pytest

# Images and models are on the node.
FIRST_ANSWER_S = float(os.environ.get("KUBE_FIRST_ANSWER_S", 60))
SHARE_AFTER_S, SHARE_OVER_S, SHARE_TOLERANCE = 30, 10, 0.2
# So many that two replicas have more than 12 requests in flight each, though others wait elsewhere.
LOAD_CLIENTS, REPLICAS, MAX_REPLICAS = 128, 2, 4
# Each component of autoscaling, and what must serve the cluster's external metrics for it.
AUTOSCALERS = {"autoscaling-keda": "keda", "autoscaling-hpa": "prometheus-adapter"}
EDIT = """import json
from serving.watchdog.tritonserver import client
triton = client()
config = triton.config("encoder")
config["dynamic_batching"]["max_queue_delay_microseconds"] = "3000"
triton.load("encoder", config)
print(triton.config("encoder")["dynamic_batching"]["max_queue_delay_microseconds"])"""


def test_first_answer_comes_soon_after_apply(cluster):
    began = time.time()
    cluster.apply()
    totals = cluster.wait(cluster.totals)
    cluster.wait_for_rollout("gateway", "triton")
    seconds = totals["first_answer"] - began
    print(f"first answer after {seconds:.1f} s")
    assert seconds < FIRST_ANSWER_S


def test_roll_fails_no_request(cluster):
    """Replace every pod: by one of the image KUBE_IMAGE, or of the same image."""
    before = {*cluster.pods("triton"), *cluster.pods("gateway")}
    with cluster.no_request_fails():
        if image := os.environ.get("KUBE_IMAGE"):
            cluster.kubectl("set", "image", "deployment/triton", f"triton={image}")
        else:
            cluster.kubectl("rollout", "restart", "deployment/triton")
        cluster.kubectl("rollout", "restart", "deployment/gateway")
        cluster.wait_for_rollout("triton", "gateway")
        cluster.wait(lambda: not before & {pod["metadata"]["name"] for pod in cluster.get("pods")})


def test_changed_model_configuration_fails_no_request(cluster):
    with cluster.no_request_fails():
        for pod in cluster.pods():
            assert cluster.python(pod, EDIT).split() == ["3000"]


def test_new_replica_gets_its_share_and_scaling_fails_no_request(cluster):
    cluster.scale(1)
    with cluster.no_request_fails():
        cluster.scale(3)
        pods = cluster.pods()
        newest = max(datetime.fromisoformat(cluster.ready_since(pod)).timestamp() for pod in pods.values())
        time.sleep(max(0.0, newest + SHARE_AFTER_S - time.time()))
        before = {pod: cluster.executed(pod) for pod in pods}
        time.sleep(SHARE_OVER_S)
        counts = {pod: cluster.executed(pod) - before[pod] for pod in pods}
        cluster.scale(1)
    shares = [count * len(counts) / sum(counts.values()) for count in counts.values()]
    print(f"shares of three replicas, 1 is equal: {', '.join(f'{share:.2f}' for share in shares)}")
    assert all(abs(share - 1) <= SHARE_TOLERANCE for share in shares)


def test_deleted_pod_fails_no_request(cluster):
    cluster.scale(2)
    with cluster.no_request_fails():
        pod, *_ = cluster.pods()
        cluster.kubectl("delete", "pod", pod)
        cluster.wait_for_rollout("triton")
        gateway, *_ = cluster.pods("gateway")
        cluster.kubectl("delete", "pod", gateway)
        cluster.wait_for_rollout("gateway")


def test_drained_node_fails_no_request(cluster):
    nodes = [node["metadata"]["name"] for node in cluster.get("nodes") if not node["spec"].get("unschedulable")]
    busy = {pod["spec"]["nodeName"] for pod in cluster.pods().values()}
    clients = {pod["spec"]["nodeName"] for pod in cluster.pods("clients").values()}
    if len(nodes) < 2 or not busy - clients:
        pytest.skip("needs a node with a pod of Triton and without the clients, and another one for that pod")
    node = min(busy - clients)
    with cluster.no_request_fails():
        try:
            cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data")
            cluster.wait_for_rollout("triton", "gateway")
        finally:
            cluster.kubectl("uncordon", node)


@pytest.mark.parametrize("component", AUTOSCALERS)
def test_autoscaler_adds_and_removes_replicas_and_fails_no_request(cluster, component):
    if AUTOSCALERS[component] not in cluster.external_metrics():
        pytest.skip(f"needs {AUTOSCALERS[component]} in the cluster")
    if not cluster.has_monitoring():
        pytest.skip("needs a KUBE_OVERLAY with the component monitoring")
    cluster.scale(REPLICAS)
    with cluster.no_request_fails(), cluster.autoscaler(component, MAX_REPLICAS):
        with cluster.load(LOAD_CLIENTS):
            began = time.monotonic()
            cluster.wait(lambda: len(cluster.pods()) > REPLICAS)
            added_s = time.monotonic() - began
            time.sleep(SHARE_AFTER_S)
        # The clients without the load may need more replicas than the minimum.
        peak = len(cluster.get("pods", "--selector", "app.kubernetes.io/name=triton"))
        began = time.monotonic()
        cluster.wait(lambda: len(cluster.get("pods", "--selector", "app.kubernetes.io/name=triton")) < peak)
        removed_s = time.monotonic() - began
    print(f"{component}: the first new replica was ready after {added_s:.0f} s of load,", end=" ")
    print(f"{peak} replicas became fewer {removed_s:.0f} s after its end")
