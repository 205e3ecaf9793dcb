"""A namespace of a cluster with the stack in it, and the clients that send requests to it."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.support.kustomize import FOLDER, kubectl
from triton_transformers.settings import ROOT, UserError

NAMESPACE = "triton-transformers-test"
CLIENTS = Path(__file__).with_name("cluster_clients.yaml")
IMAGE = "spec.template.spec.containers.0.image"
WAIT_S = 600
# A report counts every request that ended this many seconds before it: the clients report once per second.
REPORTED_S = 3

Value = TypeVar("Value")


class Cluster:
    """The cluster of KUBECONFIG, and the test's own namespace in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = os.environ.get("KUBE_CONTEXT", "")
        current = self._run("config", "current-context").strip()
        if not self.context or self.context != current:
            raise UserError(
                f"the current context of kubectl is '{current}', and KUBE_CONTEXT='{self.context}' does not name it: "
                f"run `make test-k8s KUBE_CONTEXT={current}` if this cluster may be used for tests"
            )
        if self.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found"):
            raise UserError(f"the namespace {NAMESPACE} exists: run `kubectl delete namespace {NAMESPACE}`")

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self._run("--context", self.context, "--namespace", NAMESPACE, *arguments, input=input)

    def _run(self, *arguments: str, input: str | None = None) -> str:
        done = subprocess.run([kubectl(), *arguments], input=input, capture_output=True, text=True, timeout=WAIT_S)
        if done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
        return done.stdout

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        return json.loads(self.kubectl("get", *arguments, "--output", "json"))["items"]

    def apply(self) -> None:
        """Apply the overlay with the clients, in the test's namespace and with keys of its own."""
        overlay = ROOT / (os.environ.get("KUBE_OVERLAY") or "deploy/kubernetes/overlays/cpu")
        program = CLIENTS.with_suffix(".py")
        for file in (CLIENTS, program):
            (self.folder / file.name).write_text(file.read_text())
        keys = [f"{name}={secrets.token_hex(16)}" for name in ("TRITON_ADMIN_KEY", "API_KEYS")]
        kustomization = {
            "namespace": NAMESPACE,
            "resources": [os.path.relpath(overlay, self.folder), CLIENTS.name],
            "secretGenerator": [{"name": "keys", "literals": keys, "options": {"disableNameSuffixHash": True}}],
            "configMapGenerator": [{"name": "clients", "files": [program.name]}],
            "replacements": [
                {
                    "source": {"kind": "Deployment", "name": "gateway", "fieldPath": IMAGE},
                    "targets": [{"select": {"kind": "Job", "name": "clients"}, "fieldPaths": [IMAGE]}],
                }
            ],
        }
        (self.folder / "kustomization.yaml").write_text(json.dumps(kustomization))
        self.kubectl("apply", "--kustomize", str(self.folder))

    def delete(self) -> None:
        self.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")

    def wait_for_rollout(self, *deployments: str) -> None:
        for deployment in deployments:
            self.kubectl("rollout", "status", f"deployment/{deployment}", f"--timeout={WAIT_S}s")

    def pods(self, name: str = "triton") -> dict[str, dict[str, Any]]:
        """Return the ready pods of a deployment that do not end, by name."""
        pods = self.get("pods", "--selector", f"app.kubernetes.io/name={name}")
        return {
            pod["metadata"]["name"]: pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"] and self.ready_since(pod) is not None
        }

    def ready_since(self, pod: dict[str, Any]) -> str | None:
        conditions = {condition["type"]: condition for condition in pod["status"].get("conditions", [])}
        ready = conditions.get("Ready", {"status": "False"})
        return ready["lastTransitionTime"] if ready["status"] == "True" else None

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", "deployment/triton", f"--replicas={replicas}")
        # Until the pods that end are gone too.
        self.wait(lambda: len(self.get("pods", "--selector", "app.kubernetes.io/name=triton")) == replicas)
        self.wait_for_rollout("triton")

    def wait(self, condition: Callable[[], Value], seconds: float = WAIT_S) -> Value:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, "the condition does not hold"
            time.sleep(0.5)
        return value

    def python(self, pod: str, code: str) -> str:
        """Run Python beside Triton, with what its image has."""
        return self.kubectl("exec", pod, "--container", "triton", "--", "python3", "-c", code)

    def executed(self, pod: str) -> int:
        """Return how many requests the pod's system has answered."""
        page = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8002/metrics').read().decode())"
        sample = re.search(r'^nv_inference_request_success\{model="embedding",.*\} (\d+)', self.python(pod, page), re.M)
        return int(sample[1]) if sample else 0

    # --- autoscaling ------------------------------------------------------------------------------------------------

    def external_metrics(self) -> str:
        """Return the name of the service that has the metrics for autoscalers; empty if none has."""
        name = "v1beta1.external.metrics.k8s.io"
        return self.kubectl("get", "apiservice", name, "--ignore-not-found", "--output=jsonpath={.spec.service.name}")

    def has_monitoring(self) -> bool:
        kinds = self.kubectl("api-resources", "--api-group=monitoring.coreos.com", "--output=name")
        return "servicemonitors." in kinds and bool(self.get("servicemonitors"))

    @contextmanager
    def autoscaler(self, component: str, maximum: int) -> Iterator[None]:
        """Apply the autoscaler of a component, with another maximum of replicas."""
        (path,) = (FOLDER / "components" / component).glob("*scale*.yaml")
        autoscaler = yaml.safe_load(path.read_text())
        autoscaler["spec"]["maxReplicaCount" if autoscaler["kind"] == "ScaledObject" else "maxReplicas"] = maximum
        content = json.dumps(autoscaler)
        self.kubectl("apply", "--filename=-", input=content)
        try:
            yield
        finally:
            self.kubectl("delete", "--filename=-", input=content)

    @contextmanager
    def load(self, clients: int) -> Iterator[None]:
        """Let that many more clients send requests without pauses. Check that none of them fails."""
        job = json.loads(self.kubectl("get", "job/clients", "--output=json"))
        pod = job["spec"]["template"]["spec"]
        variables = {"CLIENTS": str(clients // 2), "PAUSE_S": "0"}
        pod["containers"][0]["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        template = {"metadata": {"labels": {"app.kubernetes.io/name": "clients"}}, "spec": pod}
        load = {"metadata": {"name": "load"}, "spec": {"backoffLimit": 0, "template": template}}
        self.kubectl("apply", "--filename=-", input=json.dumps({"apiVersion": "batch/v1", "kind": "Job"} | load))
        try:
            self.wait(lambda: self.totals("load"))
            yield
            totals = self.totals("load")
            print({"load": {name: totals[name] for name in ("right", "failed", "wrong", "duplicated", "slowest_s")}})
            assert (totals["failed"], totals["wrong"], totals["duplicated"]) == (0, 0, 0), totals["errors"]
        finally:
            self.kubectl("delete", "job/load", "--cascade=foreground")

    # --- the clients ------------------------------------------------------------------------------------------------

    def totals(self, job: str = "clients") -> dict[str, Any]:
        """Return the last report of the clients; nothing before the first. Raise AssertionError if they have ended."""
        pods = self.get("pods", "--selector", f"job-name={job}")
        if not pods or pods[0]["status"]["phase"] == "Pending":
            return {}
        lines = self.kubectl("logs", f"job/{job}", "--tail=100").splitlines()
        assert pods[0]["status"]["phase"] == "Running", "the clients ended: " + "\n".join(lines[-20:])
        # gRPC may log lines of its own between the reports.
        return json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}"))

    @contextmanager
    def no_request_fails(self) -> Iterator[Counts]:
        """Check that every request of the block, and of the seconds after it, gets one right answer."""
        before = self.totals()
        counts = Counts()
        yield counts
        ended = time.time() + REPORTED_S
        after = self.wait(lambda: totals if (totals := self.totals()).get("time", 0) > ended else {})
        for name in vars(counts):
            setattr(counts, name, after[name] - before[name])
        errors = {text: n - before["errors"].get(text, 0) for text, n in after["errors"].items()}
        print({"counts": vars(counts), "errors": {text: n for text, n in errors.items() if n}})
        assert counts.right > 0
        assert (counts.failed, counts.wrong, counts.duplicated) == (0, 0, 0), errors


@dataclass
class Counts:
    """The outcomes of the requests of one step."""

    right: int = 0
    failed: int = 0
    wrong: int = 0
    duplicated: int = 0
