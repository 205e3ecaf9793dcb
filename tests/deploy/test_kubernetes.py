"""The objects of deploy/kubernetes: rendered by kubectl, valid in three releases of Kubernetes, within our policies."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.support.kustomize import FOLDER, VERSIONS, Object, containers, is_custom, pods, render_with, schema_error
from triton_transformers.settings import DEFAULTS, PROFILES, ROOT, Settings

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text().replace("!override", ""))


COMPONENTS = sorted(
    str(path.parent.relative_to(FOLDER / "components"))
    for path in (FOLDER / "components").rglob("kustomization.yaml")
    if path.parent.name != "objects"  # which the three of monitoring have in common
)


def group(component: str) -> str:
    """Return the name that a component shares with those that exclude it."""
    name = re.split("[/-]", component)[0]
    return {"loadtest": "autoscaling", "http": "ingress"}.get(name, name)


def pairs() -> Iterator[tuple[str, ...]]:
    """Yield each overlay alone, with each component, and for the CPU combinations that contain every pair."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for component in COMPONENTS:
        if component not in ("monitoring/cuda", "monitoring/neuron"):
            groups.setdefault(group(component), [()]).append((component,))
    combinations = [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*groups.values())]
    seen: set[tuple[str, ...]] = set()
    for components in sorted(combinations, key=len, reverse=True):
        new = {*itertools.combinations(components, 2)} - seen
        if new or len(components) < 2:
            yield "cpu", *components
        seen |= new
    for profile in ("cuda", "neuron"):
        yield (profile,)
        for component in COMPONENTS:
            if group(component) != "monitoring" or component == f"monitoring/{profile}":
                yield profile, component


@functools.cache
def render_once(overlay: str, *components: str) -> list[Object]:
    """Return the objects of an overlay with components. Tests share them, and change copies."""
    return render_with(overlay, components)


@pytest.fixture(scope="module")
def combined() -> dict[str, list[Object]]:
    """Return the objects of each pair of components, and of the overlays."""
    return {" ".join(chosen): render_once(*chosen) for chosen in pairs()}


def find(objects: list[Object], kind: str, name: str) -> Object:
    (matching,) = (content for content in objects if content["kind"] == kind and content["metadata"]["name"] == name)
    return matching


# --- policies ---------------------------------------------------------------------------------------------------------
# A policy yields what is wrong with the objects.


def runs_restricted(objects: list[Object]) -> Iterator[str]:
    """Require Kubernetes' own level `restricted` (Pod Security Standards), and a read-only file system."""
    (namespace,) = (content for content in objects if content["kind"] == "Namespace")
    if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace does not enforce `restricted`"
    for workload, pod in pods(objects):
        security = pod.get("securityContext", {})
        if not (security.get("runAsNonRoot") and security.get("runAsUser")):
            yield f"{workload} may run as root"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{workload} has no seccomp profile"
        if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{workload} shares a namespace of the host"
        if any("hostPath" in volume for volume in pod.get("volumes", [])):
            yield f"{workload} mounts a folder of the host"
        for container in containers(pod):
            own = container.get("securityContext", {})
            if own.get("capabilities") != {"drop": ["ALL"]} or own.get("allowPrivilegeEscalation") is not False:
                yield f"{workload}: {container['name']} has privileges"
            if not own.get("readOnlyRootFilesystem"):
                yield f"{workload}: {container['name']} can write into its image"
            if own.keys() & {"runAsUser", "runAsNonRoot", "seccompProfile"} or own.get("privileged"):
                yield f"{workload}: {container['name']} overrides the pod's security"


def has_resources(objects: list[Object]) -> Iterator[str]:
    for workload, pod in pods(objects):
        for container in containers(pod):
            resources = {"requests": {}, "limits": {}} | container.get("resources", {})
            if not {"cpu", "memory"} <= resources["requests"].keys() or "memory" not in resources["limits"]:
                yield f"{workload}: {container['name']} lacks a request or its limit of memory"


def keeps_api_away(objects: list[Object]) -> Iterator[str]:
    for workload, pod in pods(objects):
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{workload} gets a token of Kubernetes' API"
        if pod.get("enableServiceLinks") is not False:
            yield f"{workload} gets variables such as GATEWAY_PORT=tcp://..., which are settings here"


def has_probes(objects: list[Object]) -> Iterator[str]:
    for name in ("triton", "gateway"):
        (container,) = find(objects, "Deployment", name)["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe not in container:
                yield f"{name} has no {probe}"
        liveness = container.get("livenessProbe", {})
        if liveness.get("failureThreshold", 3) * liveness.get("periodSeconds", 10) < 60:
            yield f"{name} is restarted if it is busy for less than a minute"
    (triton,) = find(objects, "Deployment", "triton")["spec"]["template"]["spec"]["containers"]
    if "healthcheck" not in str(triton.get("readinessProbe")):
        yield "triton stays ready without a Python process"
    if "healthcheck" in str(triton.get("livenessProbe")):
        yield "triton is restarted while the watchdog reloads a model"


def shares_memory(objects: list[Object]) -> Iterator[str]:
    pod = find(objects, "Deployment", "triton")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    names = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    if [volumes[name].get("emptyDir", {}).get("medium") for name in names] != ["Memory"]:
        yield "/dev/shm of triton is not memory"


def survives_evictions(objects: list[Object]) -> Iterator[str]:
    # A comparison measures one server.
    is_loadtest = any(content["kind"] == "Job" and content["metadata"]["name"] == "loadtest" for content in objects)
    for name in ("triton", "gateway"):
        deployment = find(objects, "Deployment", name)
        if deployment["spec"].get("replicas", 2) < 2 and not (is_loadtest and name == "triton"):
            yield f"{name} has one replica, so an eviction is an outage"
        budgets = [content["spec"] for content in objects if content["kind"] == "PodDisruptionBudget"]
        if not any(
            budget["selector"] == deployment["spec"]["selector"] and budget.get("maxUnavailable") == 1
            for budget in budgets
        ):
            yield f"{name} has no disruption budget of one pod"
        spread = deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        if not {"kubernetes.io/hostname", "topology.kubernetes.io/zone"} <= {
            constraint["topologyKey"] for constraint in spread
        }:
            yield f"{name} is not spread over nodes and zones"
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        if rolling["maxUnavailable"] > (1 if rolling["maxSurge"] == 0 else 0):
            yield f"{name} loses more pods in a roll than it must"


def isolates_triton(objects: list[Object]) -> Iterator[str]:
    policies = {
        content["metadata"]["name"]: content["spec"] for content in objects if content["kind"] == "NetworkPolicy"
    }
    if policies.get("default-deny") != {"podSelector": {}, "policyTypes": ["Ingress"]}:
        yield "a pod without a policy accepts connections"
    selected = {"app.kubernetes.io/name": "triton"}
    rules = [
        rule
        for policy in policies.values()
        if policy["podSelector"].get("matchLabels") == selected
        for rule in policy.get("ingress", [])
    ]
    for rule in rules:
        for peer in rule.get("from") or [{}]:
            name = peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name")
            elsewhere = "namespaceSelector" in peer
            if (name, elsewhere) not in {("gateway", False), ("prometheus", True), ("loadtest", False)}:
                yield f"triton accepts connections from {peer or 'everywhere'}"
            if name == "prometheus" and rule.get("ports") != [{"port": "metrics"}]:
                yield "Prometheus reaches more of triton than its metrics"
    if "Egress" not in policies.get("triton", {}).get("policyTypes", []):
        yield "the code of a model can open connections"


def contains_no_secret(objects: list[Object]) -> Iterator[str]:
    yield from (f"Secret {content['metadata']['name']} is in git" for content in objects if content["kind"] == "Secret")
    private = {"TRITON_ADMIN_KEY", "API_KEYS", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"}
    for content in objects:
        if content["kind"] == "ConfigMap" and private & content["data"].keys():
            yield f"ConfigMap {content['metadata']['name']} has a secret"
    for workload, pod in pods(objects):
        for container in containers(pod):
            for variable in container.get("env", []):
                if variable["name"] in private and "secretKeyRef" not in variable.get("valueFrom", {}):
                    yield f"{workload}: {variable['name']} does not come from a Secret"


def seconds_in(file: str, pattern: str) -> int:
    return int(re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)[1])


def drains(objects: list[Object]) -> Iterator[str]:
    """Require that each pod leaves the Service before it refuses requests, and ends by itself before SIGKILL."""
    last = {
        "triton": seconds_in("serving/watchdog/drain.py", r"^LIMIT_S = (\d+)")
        + seconds_in("images/triton/serve.sh", r"--exit-timeout-secs=(\d+)"),
        "gateway": seconds_in("gateway/edge/server.py", r"^GRACE_S = (\d+)"),
    }
    for name, seconds in last.items():
        pod = find(objects, "Deployment", name)["spec"]["template"]["spec"]
        hook = pod["containers"][0].get("lifecycle", {}).get("preStop", {})
        wait = hook.get("sleep", {}).get("seconds", 0)
        if name == "triton":
            *command, argument = hook.get("exec", {}).get("command", ["0"])
            wait = int(argument) if command == ["python3", "-m", "serving.watchdog.drain"] else 0
        # Name servers keep an answer for five seconds, and the gateway asks every two (gateway/triton/inference.py).
        if wait < 8:
            yield f"{name} refuses requests before clients have learnt that it leaves"
        if pod.get("terminationGracePeriodSeconds", 30) < wait + seconds:
            yield f"{name} is killed {wait + seconds} s after its end began, or earlier"


def is_in_namespace(objects: list[Object]) -> Iterator[str]:
    for content in objects:
        namespace = content["metadata"].get("namespace")
        if content["kind"] not in ("Namespace", "PersistentVolume") and namespace != "triton-transformers":
            yield f"{content['kind']} {content['metadata']['name']} is in {namespace or 'the current namespace'}"


def pins_images(objects: list[Object]) -> Iterator[str]:
    """Yield each image without a fixed tag, or with a pull policy that replaces it.

    Without a tag, Kubernetes pulls `latest`. A colon before a slash belongs to a registry's port.
    """
    for workload, pod in pods(objects):
        images = [(c["name"], c["image"], c.get("imagePullPolicy")) for c in containers(pod)]
        volumes = [(volume["name"], volume["image"]) for volume in pod.get("volumes", []) if "image" in volume]
        images += [(name, image["reference"], image.get("pullPolicy")) for name, image in volumes]
        for name, image, pull_policy in images:
            if not re.search(r":(?!latest$)[^/]+$", image) or pull_policy != "IfNotPresent":
                yield f"{workload}: {name} may change its image with a restart"


POLICIES = (
    runs_restricted,
    has_resources,
    keeps_api_away,
    has_probes,
    shares_memory,
    survives_evictions,
    isolates_triton,
    contains_no_secret,
    drains,
    is_in_namespace,
    pins_images,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
def test_all_pairs_keep_policies(combined, policy):
    assert [f"{name}: {problem}" for name, objects in combined.items() for problem in policy(objects)] == []


# --- schemas ----------------------------------------------------------------------------------------------------------


def invalid(combined: dict[str, list[Object]], version: str) -> set[str]:
    """Return what is wrong with the objects. Custom resources are left out: their schemas belong to other projects."""
    texts = {
        json.dumps(content, sort_keys=True)
        for objects in combined.values()
        for content in objects
        if not is_custom(content)
    }
    return {
        f"{content['kind']} {content['metadata']['name']}: {error}"
        for content in map(json.loads, texts)
        if (error := schema_error(content, version))
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_in_kubernetes(combined, version):
    assert invalid(combined, version) == set()


@pytest.mark.slow
def test_custom_resources_are_those_that_the_docs_list(combined):
    custom = {content["kind"] for objects in combined.values() for content in objects if is_custom(content)}
    text = (ROOT / "docs/kubernetes.md").read_text()
    assert {kind for kind in custom if f"`{kind}`" not in text} == set()


# --- the documentation ----------------------------------------------------------------------------------------------


def documented() -> list[dict]:
    """Return the kustomizations of docs/kubernetes.md."""
    return [
        yaml.safe_load(text)
        for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)
    ]


def test_documented_overlay_renders():
    overlay, *_ = documented()
    names = [path.removeprefix("triton-transformers/deploy/kubernetes/components/") for path in overlay["components"]]
    objects = render_with(
        "cpu", names, **{field: overlay[field] for field in ("images", "configMapGenerator", "patches")}
    )
    assert find(objects, "HTTPRoute", "gateway")["spec"]["hostnames"] == ["models.example.org"]
    images = {container["image"] for _, pod in pods(objects) for container in containers(pod)}
    assert all(image.startswith("registry.example.com/") for image in images)
    (settings,) = (content["data"] for content in objects if content["metadata"]["name"].startswith("settings-"))
    assert settings == {"PROFILE": "cpu", "SYSTEMS": "embedding gpt2_ensemble"}


def test_documented_sources_of_models_render():
    _, volume, image, _ = documented()
    claim = find(render_with("cpu", **volume), "PersistentVolumeClaim", "models")["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadWriteMany"], "nfs")
    pod = find(render_with("cpu", ["models-image"], **image), "Deployment", "triton")["spec"]["template"]["spec"]
    assert pod["volumes"][0]["image"]["reference"] == "registry.example.com/models:7"


# --- one source for each fact -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_settings_are_those_of_the_stack(profile, monkeypatch):
    (settings,) = (
        content["data"] for content in render_once(profile) if content["metadata"]["name"].startswith("settings-")
    )
    assert settings["PROFILE"] == profile
    assert settings["SYSTEMS"] == DEFAULTS["SYSTEMS"]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    loaded = Settings.load()
    assert settings.items() <= loaded.items()


def service(container: str, profile: str) -> Object:
    """Return the service of compose.yaml that runs the same as a container."""
    name = {
        "triton": f"triton-{profile}",
        "wait-for-models": f"triton-{profile}",
        "exporter": "exporter-neuron" if profile == "neuron" else "exporter",
    }.get(container, container)
    return COMPOSE["services"][name]


@pytest.mark.parametrize("profile", PROFILES)
def test_images_are_those_of_compose(profile):
    for _, pod in pods(render_once(profile, "loadtest")):
        for container in containers(pod):
            assert container["image"] == default(service(container["name"], profile)["image"])


@pytest.mark.parametrize("profile", PROFILES)
def test_limits_are_those_of_compose(profile):
    objects = render_once(profile, "loadtest")
    for _, pod in pods(objects):
        for container in pod["containers"]:
            limit = default(service(container["name"], profile)["mem_limit"], **DEFAULTS)
            assert gibibytes(container["resources"]["limits"]["memory"]) == gibibytes(limit), container["name"]
    volumes = find(objects, "Deployment", "triton")["spec"]["template"]["spec"]["volumes"]
    (shm,) = (volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "shm")
    assert gibibytes(shm) == gibibytes(DEFAULTS["TRITON_SHM_SIZE"])


def test_workers_are_as_many_as_the_master_waits_for():
    objects = render_once("cpu", "loadtest")
    workers = find(objects, "Job", "loadtest-workers")["spec"]
    (master,) = find(objects, "Job", "loadtest")["spec"]["template"]["spec"]["containers"]
    assert {"name": "WORKERS", "value": str(workers["parallelism"])} in master["env"]
    assert workers["completions"] == workers["parallelism"]


def test_rules_are_those_of_prometheus():
    written = subprocess.run([FOLDER / "rules.sh"], check=True, capture_output=True, text=True).stdout
    committed = FOLDER / "components/monitoring/objects/rules.yaml"
    assert committed.read_text() == written, "run `make kubernetes-rules`"
    objects = [content for content in render_once("cpu", "monitoring/cpu") if content["kind"] == "PrometheusRule"]
    files = sorted((ROOT / "monitoring/prometheus/rules").glob("*.yml"))
    assert {content["metadata"]["name"]: content["spec"] for content in objects} == {
        path.stem: yaml.safe_load(path.read_text()) for path in files
    }


@pytest.mark.parametrize("profile", PROFILES)
def test_dashboards_are_those_of_grafana(profile):
    folder = ROOT / "monitoring/grafana"
    files = [*(folder / "dashboards").glob("*.json"), folder / "hardware" / profile / "hardware.json"]
    config_maps = [
        content
        for content in render_once(profile, f"monitoring/{profile}")
        if content["kind"] == "ConfigMap" and "grafana_dashboard" in content["metadata"].get("labels", {})
    ]
    assert {name: text for content in config_maps for name, text in content["data"].items()} == {
        path.name: path.read_text() for path in files
    }
    # `kubectl apply` keeps an object in an annotation of that size.
    assert max(len(json.dumps(content)) for content in config_maps) < 262144


def test_targets_have_the_names_of_the_rules():
    """Prometheus' own targets and ServiceMonitors give a target the same label `job`."""
    jobs = {
        group["labels"]["job"] for group in json.loads((ROOT / "monitoring/prometheus/targets/cpu.json").read_text())
    }
    objects = render_once("cpu", "loadtest", "monitoring/cpu")
    scraped = set()
    for monitor in (content["spec"] for content in objects if content["kind"] == "ServiceMonitor"):
        labels = monitor["selector"]["matchLabels"]
        (service,) = (
            content
            for content in objects
            if content["kind"] == "Service" and labels.items() <= content["metadata"]["labels"].items()
        )
        scraped.add(service["metadata"]["labels"][monitor["jobLabel"]])
        assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= {
            port["name"] for port in service["spec"]["ports"]
        }
    assert scraped == jobs


def test_kserve_example_runs_the_same_server():
    runtime, inference = yaml.safe_load_all((FOLDER / "kserve/triton.yaml").read_text())
    deployment = copy.deepcopy(find(render_once("cpu"), "Deployment", "triton"))
    (own,) = deployment["spec"]["template"]["spec"]["containers"]
    (container,) = runtime["spec"]["containers"]
    for field in ("image", "imagePullPolicy", "resources"):
        assert container[field] == own[field]
    assert container["readinessProbe"]["exec"] == own["readinessProbe"]["exec"]
    assert inference["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    assert (
        inference["spec"]["predictor"]["model"]["modelFormat"]["name"]
        == runtime["spec"]["supportedModelFormats"][0]["name"]
    )
    deployment["spec"]["template"]["spec"] = {name: runtime["spec"][name] for name in ("containers", "volumes")}
    assert [schema_error(deployment, version) for version in VERSIONS] == [""] * len(VERSIONS)


def default(text: str, **settings: str | None) -> str:
    """Return a text of compose.yaml as compose would read it with these settings."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{(\w+)\}", lambda match: settings[match[1]] or "", text)


def gibibytes(size: str) -> int:
    """Return the number of a size such as 8g in compose, 8Gi in Kubernetes."""
    return int(re.fullmatch(r"(\d+)(g|Gi)", size)[1])
