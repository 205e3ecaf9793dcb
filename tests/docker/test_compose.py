"""compose.yaml as compose reads it: PROFILE=neuron, the settings, the command by hand. No engine is asked."""

import contextlib
import json
import os
import re
import signal
import subprocess

import pytest
from dotenv import dotenv_values

from scripts.stack.docker.compose import NEURON_SERVICES, Compose
from scripts.stack.docker.stack import DockerStack
from tests.support.certificates import save_certificate
from triton_transformers.settings import DEFAULTS, ROOT, VERSIONS, Settings, UserError, pins

pytestmark = pytest.mark.timeout(1800)

PINS = {"inf2": "TRITON_IMAGE", "trn1": "TRITON_IMAGE", "inf1": "TRITON_INF1_IMAGE"}
NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere.sock"}


@pytest.fixture
def new_compose(tmp_path, monkeypatch):
    """Return a function that makes a Compose of settings. It assumes a rootful engine."""
    monkeypatch.setattr("scripts.stack.docker.preflight.check_engine", dict)

    def make(**settings):
        for name in DEFAULTS:
            monkeypatch.delenv(name, raising=False)
        own = {"PROFILE": "neuron", "LOCAL_STATE": str(tmp_path / "state"), "MODEL_REPOSITORY": str(tmp_path)}
        return Compose(Settings(DEFAULTS | own | settings))

    return make


def services(compose):
    command = compose.command("config", "--format", "json", profile="*")
    done = subprocess.run(command, env=compose.environment | NO_ENGINE, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)["services"]


@pytest.mark.parametrize("count", [0, 1, 2, 12])
def test_neuron_services_get_neuron_devices(new_compose, count):
    composed = services(new_compose(NEURON_DEVICES=str(count)))
    expected = [f"/dev/neuron{number}" for number in range(count)]
    for service in NEURON_SERVICES:
        devices = composed[service].get("devices") or []
        assert [device["source"] for device in devices] == [device["target"] for device in devices] == expected
    assert {name for name, service in composed.items() if service.get("devices")} <= set(NEURON_SERVICES)


def test_only_neuron_services_have_limits(new_compose):
    limited = {name: service["ulimits"] for name, service in services(new_compose()).items() if service.get("ulimits")}
    limits = {"memlock": -1, "stack": 67108864}
    assert limited == {"triton-neuron": limits, "exporter-neuron": limits}


@pytest.mark.parametrize("chip", PINS)
def test_each_chip_has_its_image(new_compose, chip):
    compose = new_compose(NEURON_CHIP=chip)
    composed = services(compose)
    target = "neuron-inf1" if chip == "inf1" else "neuron"
    triton = composed["triton-neuron"]
    assert triton["image"] == composed["neuron-monitor"]["image"] == f"triton-transformers:{target}"
    assert triton["build"]["target"] == target
    assert triton["build"]["args"]["TRITON_IMAGE"] == pins()[PINS[chip]]
    assert compose.environment["TRITON_IMAGE_BUILT"] == triton["image"]


@pytest.mark.parametrize("source", ["pypi", "pypi-transformers", "ngc"])
def test_every_target_is_in_its_dockerfile(new_compose, source):
    builds = [
        service["build"] for service in services(new_compose(TRITON_SOURCE=source)).values() if "build" in service
    ]
    targets = {(build["dockerfile"], build["target"]) for build in builds if "target" in build}
    assert len(targets) == 4
    assert services(new_compose(PROFILE="cuda"))["triton-cuda"]["build"]["target"] == "cuda"
    for file, target in targets:
        assert f" AS {target}\n" in (ROOT / file).read_text()


def test_other_profiles_use_the_compose_file_alone(new_compose):
    compose = new_compose(PROFILE="cuda", NEURON_CHIP="inf1")
    assert "--file" not in compose.command("up")
    assert services(compose)["triton-cuda"]["build"]["args"]["TRITON_IMAGE"] == pins()["TRITON_IMAGE"]
    assert not compose.written_file.parent.exists()


def save_text_model(folder, file=""):
    (folder / "story/1").mkdir(parents=True, exist_ok=True)
    (folder / "story/config.pbtxt").write_text('backend: "generation"')
    for name in ("config.json", file) if file else ():
        (folder / "story/1" / name).touch()


@pytest.mark.parametrize(
    ("file", "target"), [("", "cuda-vllm"), ("model.json", "cuda-vllm"), ("model.safetensors", "cuda")]
)
def test_generating_systems_choose_the_image_with_vllm(new_compose, tmp_path, file, target):
    """Choose it by default with PROFILE=cuda; after `make models`, choose by the files."""
    save_text_model(tmp_path, file)
    compose = new_compose(PROFILE="cuda", SYSTEMS="embedding story")
    triton = services(compose)["triton-cuda"]
    assert (triton["image"], triton["build"]["target"]) == (f"triton-transformers:{target}", target)
    pin = "TRITON_VLLM_IMAGE" if target == "cuda-vllm" else "TRITON_IMAGE"
    assert triton["build"]["args"]["TRITON_IMAGE"] == compose.nvidia_image == pins()[pin]
    assert f" AS {target}\n" in (ROOT / triton["build"]["dockerfile"]).read_text()
    assert services(new_compose(PROFILE="cuda", SYSTEMS="embedding"))["triton-cuda"]["build"]["target"] == "cuda"
    assert new_compose(PROFILE="cpu", SYSTEMS="story").nvidia_image == pins()["TRITON_IMAGE"]


def test_neuron_exporter_differs_by_the_profile_and_its_settings(new_compose):
    compose = new_compose(NEURON_DEVICES="0", NEURON_LENGTHS="16 64")
    composed = services(compose)
    plain, neuron = composed["exporter"], composed["exporter-neuron"]
    own = {name: value for name, value in compose.settings.items() if name == "PROFILE" or name.startswith("NEURON_")}
    assert neuron["environment"] == plain["environment"] | own
    for same in ("volumes", "user", "read_only", "cap_drop", "restart"):
        assert neuron[same] == plain[same]
    assert neuron["build"]["target"] == "neuron-exporter"


@pytest.mark.parametrize(("profile", "exporter"), [("neuron", "exporter-neuron"), ("cpu", "exporter")])
def test_profile_selects_the_exporter(new_compose, profile, exporter):
    assert DockerStack(new_compose(PROFILE=profile).settings).exporter == exporter


def test_other_systems_make_no_other_container(new_compose, tmp_path):
    """Triton gets its systems from a file that it may only read, so a change of SYSTEMS does not restart it."""
    composed = [services(new_compose(PROFILE="cpu", SYSTEMS=systems)) for systems in ("spam", "spam ham")]
    one, two = (services["triton-cpu"] for services in composed)
    assert one == two
    # The gateway answers for systems that are not loaded yet, too.
    assert composed[0]["gateway"]["environment"]["SYSTEMS_FILE"] == "/serving/requested"
    assert (one["environment"]["SYSTEMS"], one["environment"]["SYSTEMS_FILE"]) == ("", "/serving/systems")
    (serving,) = [volume for volume in one["volumes"] if volume["target"] == "/serving"]
    assert (serving["source"], serving["read_only"]) == (str(tmp_path / "state/serving"), True)


@pytest.mark.parametrize(
    ("profile", "running", "otherwise"),
    [("cpu", "cpu-pypi-transformers", "cpu-pypi"), ("cuda", "cuda-vllm", "cuda")],
)
def test_smaller_image_does_not_replace_the_running_one(new_compose, profile, running, otherwise):
    """Removing a system must not restart Triton."""
    settings = new_compose(PROFILE=profile).settings
    assert Compose(settings).image_tag == otherwise
    assert Compose(settings, running).image_tag == running
    assert Compose(settings, "the image of another profile").image_tag == otherwise


def test_engines_are_kept_in_a_volume(new_compose):
    """Keep the choice of engines, and the code that vLLM compiled."""
    composed = services(new_compose(TRITON_ENGINE="onnxruntime"))
    volumes = {name: service.get("volumes") or [] for name, service in composed.items()}
    with_cache = {name for name in volumes if "engines" in [volume["source"] for volume in volumes[name]]}
    assert with_cache == {"triton-cpu", "triton-cuda"}
    cpu, cuda, neuron = (composed[f"triton-{profile}"] for profile in ("cpu", "cuda", "neuron"))
    assert cpu["environment"] == cuda["environment"]
    assert cpu["environment"]["TRITON_ENGINE_CACHE"] == "/engines"
    assert cpu["environment"]["TRITON_ENGINE"] == "onnxruntime"
    assert cpu["volumes"] == cuda["volumes"]
    (engines,) = [volume for volume in cpu["volumes"] if volume not in neuron["volumes"]]
    assert (engines["type"], engines["source"], engines["target"]) == ("volume", "engines", "/engines")


def test_image_is_chosen_again_after_systems_were_assembled(new_compose, tmp_path, monkeypatch):
    """`make up` asks for the image before `make models` has written a new system's configuration."""
    stack = DockerStack(new_compose(PROFILE="cuda", SYSTEMS="embedding story").settings)
    assert stack.compose.image_tag == "cuda"
    save_text_model(tmp_path, "model.json")

    def check_device(settings, engine) -> None:
        raise UserError(stack.compose.image_tag)

    monkeypatch.setattr("scripts.stack.docker.preflight.check_device", check_device)
    monkeypatch.setattr("scripts.stack.docker.preflight.check_build", lambda *_: {})
    with pytest.raises(UserError, match="cuda-vllm"):
        stack.start(["embedding", "story"])


@pytest.mark.parametrize(
    ("settings", "traced"),
    [
        ({"TRACE": "1"}, True),
        ({"TRACE": "0"}, False),
        ({"TRACE": "1", "TRACE_URL": "http://other:4318/v1/traces"}, False),
    ],
)
def test_traces_have_services_only_while_ours_receive_them(new_compose, tmp_path, settings, traced):
    compose = new_compose(PROFILE="cpu", JAEGER_PORT="16000", **settings)
    done = subprocess.run(
        compose.command("config", "--services"), env=compose.environment | NO_ENGINE, capture_output=True, text=True
    )
    assert ({"traces", "jaeger"} <= set(done.stdout.split())) == traced == ("traces" in done.stdout.split())
    composed = services(compose)
    url = settings.get("TRACE_URL", "http://traces:4318/v1/traces")
    assert composed["triton-cpu"]["environment"]["TRACE_URL"] == url
    (written,) = composed["traces"]["volumes"]
    (read,) = [volume for volume in composed["loadtest"]["volumes"] if volume["target"] == "/app/.local/traces"]
    assert written["source"] == read["source"] == (str(tmp_path / "state/traces") if traced else "/dev/null")
    assert (read["read_only"], composed["traces"].get("ports")) == (True, None)
    (page,) = composed["jaeger"]["ports"]
    assert (page["host_ip"], page["published"], page["target"]) == ("127.0.0.1", "16000", 16686)


def test_services_get_the_settings_that_they_read(new_compose):
    secrets = {"HF_TOKEN": "a-secret", "TRITON_ADMIN_KEY": "a-key", "API_KEYS": "a-key-of-the-clients"}
    composed = services(new_compose(USERS="9", P95="100", TRITON_CPUS="0-3", **secrets))
    for name in ("loadtest", "locust", "tune"):
        environment = composed[name]["environment"]
        assert (environment["USERS"], environment["TRITON_CPUS"], environment["PROTOCOL"]) == ("9", "0-3", "http")
    with_key = {name for name, service in composed.items() if "a-key" in (service.get("environment") or {}).values()}
    assert with_key == {"triton-cpu", "triton-cuda", "triton-neuron", "loadtest", "locust", "tune"}
    assert (composed["tune"]["environment"]["P95"], composed["tune"]["environment"]["MINUTES"]) == ("100", "10")
    with_api_key = {name for name, service in composed.items() if "a-key-of-the-clients" in json.dumps(service)}
    assert with_api_key == {"gateway", "loadtest", "locust", "tune"}
    assert {composed[name]["environment"]["GATEWAY_HOST"] for name in with_api_key - {"gateway"}} == {"gateway"}
    with_token = {name for name, service in composed.items() if "a-secret" in json.dumps(service)}
    assert with_token == {"exporter", "exporter-neuron"}


def test_gateway_is_published_at_its_own_address(new_compose, tmp_path):
    """Pass it the host's address: all but loopback need a key, and in its container it listens on all addresses."""
    cert, key = save_certificate(tmp_path)
    own = {"TLS_CERT": str(cert), "TLS_KEY": str(key), "API_KEYS": "a-key-of-the-clients"}
    for settings, address in (({}, "127.0.0.1"), ({"GATEWAY_BIND": "0.0.0.0", **own}, "0.0.0.0")):
        compose = new_compose(PROFILE="cpu", GATEWAY_PORT="8100", REPORTS=str(tmp_path / "reports"), **settings)
        gateway = services(compose)["gateway"]
        (port,) = gateway["ports"]
        assert (port["host_ip"], port["published"], port["target"]) == (address, "8100", 8080)
        inside = gateway["environment"]
        assert (inside["BIND_ADDRESS"], inside["GATEWAY_BIND"]) == ("127.0.0.1", settings.get("GATEWAY_BIND", ""))
        assert (inside["GATEWAY_LISTEN"], inside["TRITON_HOST"]) == ("0.0.0.0", "triton")
        assert "GATEWAY_PORT" not in inside  # of the host
        mounts = {volume["target"]: volume for volume in gateway["volumes"]}
        assert all(mount["read_only"] for mount in mounts.values())
        assert mounts["/serving"]["source"] == str(tmp_path / "state/serving")
        assert mounts["/reports"]["source"] == str(tmp_path / "reports")
        tls = [str(cert), str(key)] if settings else ["/dev/null"] * 2
        assert [mounts[f"/tls/{name}.pem"]["source"] for name in ("certificate", "key")] == tls
        expected = ["/tls/certificate.pem", "/tls/key.pem"] if settings else ["", ""]
        assert [inside["TLS_CERT"], inside["TLS_KEY"]] == expected


def test_renewed_certificate_makes_another_gateway_and_no_other_triton(new_compose, tmp_path):
    composed = []
    for _ in range(2):
        cert, key = save_certificate(tmp_path)
        composed.append(services(new_compose(PROFILE="cpu", TLS_CERT=str(cert), TLS_KEY=str(key))))
    one, two = composed
    assert one["gateway"] != two["gateway"]
    assert one["triton-cpu"] == two["triton-cpu"]


@pytest.mark.parametrize(("name", "value"), [("API_KEYS", "a-key-of-the-clients"), ("GATEWAY_TIMEOUT", "5")])
def test_settings_of_the_gateway_make_no_other_triton(new_compose, name, value):
    one, two = (services(new_compose(PROFILE="cpu", **settings)) for settings in ({}, {name: value}))
    assert one["gateway"] != two["gateway"]
    assert one["triton-cpu"] == two["triton-cpu"]


@pytest.mark.parametrize(
    ("monitor", "exporter"),
    [("exit 0", "while read -r; do :; done; sleep 600"), ("while echo a line; do sleep 0.01; done", "exit 0")],
    ids=["monitor ends", "exporter ends"],
)
def test_neuron_monitor_ends_if_either_program_ends(new_compose, tmp_path, monitor, exporter):
    """Two stand-ins for AWS's programs: one ends, the other does not."""
    command = services(new_compose())["neuron-monitor"]["entrypoint"]
    for name, script in (("neuron-monitor", monitor), ("python3", exporter)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, process_group=0) as process:
        try:
            process.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# --- by hand --------------------------------------------------------------------------------------------------------


def documented_commands() -> list[str]:
    """Return the commands of docs/install.md that start the stack without make."""
    page = (ROOT / "docs/install.md").read_text()
    section = page.split("## Without make")[1]
    (block,) = re.findall(r"```sh\n(.*?docker compose --profile cpu up.*?)```", section, re.DOTALL)
    return block.splitlines()


def test_command_by_hand_works_in_a_fresh_clone(clone):
    """Run all of it but `up` itself: compose reads its files and fills in the settings."""
    *before, up = documented_commands()
    assert up.endswith(" up --build")
    names = {*DEFAULTS, *dotenv_values(VERSIONS)}
    environment = {name: value for name, value in os.environ.items() if name not in names} | NO_ENGINE
    script = "\n".join([*before, up.removesuffix("up --build") + "config --format json"])
    done = subprocess.run(
        ["bash", "-euc", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=900
    )
    assert (done.returncode, done.stderr) == (0, "")
    composed = json.loads(done.stdout)["services"]
    assert set(composed) == {"triton-cpu", "gateway", "prometheus", "grafana"}
    triton = composed["triton-cpu"]
    assert len(triton["environment"]["TRITON_ADMIN_KEY"]) >= 32
    assert len(composed["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]) >= 32
    assert triton["environment"]["SYSTEMS"] == "embedding"
    assert triton["environment"]["SYSTEMS_FILE"] == ""
    assert (clone / triton["build"]["dockerfile"]).exists()
    gateway = composed["gateway"]
    assert (gateway["environment"]["SYSTEMS"], gateway["environment"]["SYSTEMS_FILE"]) == ("embedding", "")
    assert {port["host_ip"] for port in gateway["ports"]} == {"127.0.0.1"}
    assert (clone / gateway["build"]["dockerfile"]).exists()
    assert {volume["source"] for volume in gateway["volumes"]} == {"/dev/null"}
    assert triton["volumes"][0]["source"] == str(clone / "model_repository")
    assert (clone / ".env").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("profile", ["cpu", "cuda", "neuron", "*"])
def test_compose_alone_reads_the_file_without_settings(clone, profile):
    names = {*DEFAULTS, *dotenv_values(VERSIONS)}
    environment = {name: value for name, value in os.environ.items() if name not in names} | NO_ENGINE
    command = ["docker", "compose", "--profile", profile, "config", "--quiet"]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_each_documented_command_has_the_files_and_the_profile():
    prefix = documented_commands()[-1].removesuffix("up --build")
    commands = re.findall(r"docker compose (?:--profile|stop|exec).*", (ROOT / "docs/install.md").read_text())
    assert len(commands) == 4
    assert [command for command in commands if not command.startswith(prefix)] == []


def test_compose_file_names_the_same_command():
    head = (ROOT / "compose.yaml").read_text()
    for command in documented_commands():
        assert f"#   {command}\n" in head
