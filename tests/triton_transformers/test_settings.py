"""Settings: their order, and the messages about invalid ones."""

import hashlib
import re
import stat
from contextlib import nullcontext

import pytest
from dotenv import dotenv_values

from loadtest.load.locust_users import USERS
from loadtest.load.workload import WORKLOADS
from loadtest.server.own_stack import with_names
from scripts.stack.neuron_cores import PER_DEVICE
from triton_transformers import settings as module
from triton_transformers.settings import (
    DEFAULTS,
    ROOT,
    TABLE,
    Settings,
    UserError,
    pins,
    restarting,
    save,
    saved,
    with_secrets,
)


@pytest.fixture
def dotenv(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DOTENV", tmp_path / ".env")
    return tmp_path / ".env"


def test_environment_wins_over_dotenv_and_dotenv_over_example(dotenv, monkeypatch):
    assert Settings.load()["TRITON_HTTP_PORT"] == "8000"
    dotenv.write_text("TRITON_HTTP_PORT=8100\nROUNDS=7\nUSERS=\n")
    for name, value in {"ROUNDS": "9", "WARMUP": ""}.items():
        monkeypatch.setenv(name, value)
    loaded = Settings.load()
    assert [loaded[name] for name in ("TRITON_HTTP_PORT", "ROUNDS", "USERS", "WARMUP")] == ["8100", "9", "", "3"]


def test_unlisted_variable_of_the_shell_is_no_setting(dotenv, monkeypatch):
    monkeypatch.setenv(module.NAMES, "ROUNDS OTHER")
    for name in ("USERS", "TAG", "TASK", "SOURCE", "WINDOW", "ROUNDS", "TRITON_HTTP_PORT"):
        monkeypatch.setenv(name, "7")
    loaded = Settings.load()
    assert [loaded[name] for name in ("USERS", "TAG", "TASK", "SOURCE", "WINDOW")] == [""] * 5
    assert (loaded["ROUNDS"], loaded["TRITON_HTTP_PORT"]) == ("7", "7")


def test_command_environment_passes_its_settings_and_no_others(dotenv, monkeypatch):
    monkeypatch.setenv(module.NAMES, "ROUNDS")
    monkeypatch.setenv("ROUNDS", "9")
    monkeypatch.setenv("USERS", "abc")
    # A benchmark adds variables of its own.
    for name, value in with_names(module.command_environment(SYSTEMS="spam") | {"SOURCE": "/weights"}).items():
        monkeypatch.setenv(name, value)
    loaded = Settings.load()
    assert [loaded[name] for name in ("SYSTEMS", "SOURCE", "ROUNDS", "USERS")] == ["spam", "/weights", "9", ""]


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("USERZ=3", "", r"^\.env: unknown setting USERZ; did you mean USERS\?$"),
        ("USERZ=3\nROUNSD=3", "", "ROUNSD, USERZ; did you mean ROUNDS, USERS"),
        ("NOTHING_LIKE_IT=3", "", r"NOTHING_LIKE_IT; \.env\.example lists all settings$"),
        ("", "SYSTEM USRES", "unknown setting USRES .* did you mean USERS"),
        ("", "MIN_RATOI", "unknown setting MIN_RATOI .* did you mean MIN_RATIO"),
        ("", "BENCH TENSORFLOW INSTALL_DOCKER PYTHON * RUNTIME SHELL MAKEFLAGS CI", ""),  # make's own
        ('USERS=3\nPROFILE="cpu', "", "line 2: write NAME=value"),
        ("USERS=3\n=cpu", "", "line 2: write NAME=value"),
        ("REPORTS=f\xfcr", "", "/.env is not text in UTF-8"),
    ],
)
def test_wrong_name_or_line_is_named(dotenv, monkeypatch, text, names, message):
    dotenv.write_bytes(f"{text}\n".encode("latin-1"))
    monkeypatch.setenv(module.NAMES, names)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        Settings.load()


WRONG = [
    ("RUNTIME", "podman", "must be one of docker, local"),
    ("ROUNDS", "2", "must be at least 3"),
    ("USERS", "0", "must be at least 1"),
    ("MIN_QUALITY", "98", "must be at most 1"),
    ("WARMUP", "-1", "must be at least 0"),
    ("WARMUP", "inf", "must be a number"),
    ("WAIT", "0.4,0.1", "the minimum must be at least 0 and at most the maximum"),
    ("MODES", "none fast", "must be some of none, instances, dynamic, separated by spaces"),
    ("MODES", "none instances", "must have dynamic, and none or instances to compare it with"),
    ("LOCUST_PORT", "70000", "a port is at most 65535"),
    ("TRITON_HTTP_PORT", "http", "must be a whole number"),
    ("BIND_ADDRESS", "::1", "must be an IPv4 address"),
    ("PROMETHEUS_RETENTION", "banana", "must be a duration, as in 7d or 12h"),
    ("TRACE_URL", "collector:4318", "must be an address as in http://collector:4318/v1/traces"),
    ("TRITON_CPUS", "all", "must be a list of CPUs"),
    ("TRITON_MEMORY", "8 GB", "must be a size, as in 512m or 8g"),
    ("MODEL_REPOSITORY", "~nobody-here/models", "unknown user"),
    ("GATEWAY_BODY", "0", "must be larger than 0"),
    ("GATEWAY_TIMEOUT", "0", "must be at least 0.1"),
]


@pytest.mark.parametrize(("name", "value", "problem"), WRONG)
def test_wrong_value_is_refused_when_the_settings_are_read(dotenv, name, value, problem):
    """Refuse it there, so that every command does before it assembles, stops or starts anything."""
    dotenv.write_text(f"{name}='{value}'\n")
    with pytest.raises(UserError, match=re.escape(f"{name}={value}: {problem}")):
        Settings.load()
    assert Settings.load(checked=False)[name] == value  # for `make down`


@pytest.mark.parametrize(
    ("size", "count"),
    [("8g", 8 << 30), ("8GB", 8 << 30), ("512mb", 512 << 20), ("1.5k", 1536), ("1073741824", 1 << 30), ("100b", 100)],
)
def test_sizes_are_those_of_docker(dotenv, size, count):
    dotenv.write_text(f"TRITON_MEMORY={size}\n")
    loaded = Settings.load()
    assert (loaded["TRITON_MEMORY"], loaded.triton_memory) == (size, count)


KEY = "a-key-of-the-tests"
KEY_DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def test_api_keys_become_digests(dotenv):
    assert Settings.load().gateway_keys() == ()
    dotenv.write_text(f"API_KEYS='sha256:{KEY_DIGEST.upper()} {KEY}  another-key-of-the-tests'\n")
    loaded = Settings.load()
    digest, other = bytes.fromhex(KEY_DIGEST), hashlib.sha256(b"another-key-of-the-tests").digest()
    assert (loaded.gateway_keys(), loaded.plain_api_key()) == ((digest, digest, other), KEY)
    dotenv.write_text(f"API_KEYS=sha256:{KEY_DIGEST}\n")
    assert Settings.load().plain_api_key() == ""


@pytest.mark.parametrize("wrong", ["a-short-key", f"{KEY} sha256:abc", f"sha256:{KEY_DIGEST}0", "a-key-with-umlauts-ä"])
def test_wrong_api_key_is_refused_without_showing_any(dotenv, wrong):
    dotenv.write_text(f"API_KEYS='{wrong}'\n")
    with pytest.raises(UserError, match=r"^API_KEYS: each key, separated by spaces, must have at least 16") as refusal:
        Settings.load()
    assert not any(key in str(refusal.value) for key in wrong.split())


def test_origins_are_as_browsers_write_them(dotenv):
    dotenv.write_text("GATEWAY_ORIGINS='https://App.example:443 http://localhost:3000'\n")
    assert Settings.load().gateway_origins == (b"https://app.example", b"http://localhost:3000")
    for wrong in ("*", "app.example", "https://app.example/", "null"):
        dotenv.write_text(f"GATEWAY_ORIGINS='{wrong}'\n")
        with pytest.raises(UserError, match=r"^GATEWAY_ORIGINS=.*: each must be like https://app\.example"):
            Settings.load()


@pytest.mark.parametrize("name", ["BIND_ADDRESS", "GATEWAY_BIND"])
def test_gateway_that_other_machines_reach_requires_keys(dotenv, name):
    dotenv.write_text(f"{name}=0.0.0.0\n")
    loaded = Settings.load()
    with pytest.raises(UserError, match=rf"^{name}=0\.0\.0\.0 opens the gateway .* set API_KEYS, or GATEWAY_BIND="):
        loaded.gateway_keys()
    assert loaded.replace(API_KEYS=KEY).gateway_keys()
    assert loaded.replace(GATEWAY_BIND="127.0.0.1").gateway_keys() == ()


def test_gateway_has_an_address_of_its_own(dotenv, monkeypatch):
    loaded = Settings.load().replace(BIND_ADDRESS="127.0.0.2")
    assert loaded.url("GATEWAY_PORT") == "http://127.0.0.2:8080"
    loaded = loaded.replace(GATEWAY_BIND="0.0.0.0")
    assert (loaded.url("GATEWAY_PORT"), loaded.gateway_listen()) == ("http://127.0.0.1:8080", "0.0.0.0")
    assert loaded.url("GATEWAY_METRICS_PORT") == "http://127.0.0.2:8004"
    assert loaded.replace(TLS_CERT="c", TLS_KEY="k").url("GATEWAY_PORT") == "https://127.0.0.1:8080"
    monkeypatch.setenv("GATEWAY_HOST", "gateway")
    monkeypatch.setenv("GATEWAY_LISTEN", "0.0.0.0")
    loaded = loaded.replace(GATEWAY_BIND="127.0.0.1")
    assert (loaded.url("GATEWAY_PORT"), loaded.gateway_listen()) == ("http://gateway:8080", "0.0.0.0")


def test_tls_requires_two_readable_files(dotenv, tmp_path):
    loaded = Settings.load()
    assert loaded.tls() is None
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.touch()
    for settings, problem in (
        ({"TLS_CERT": str(cert)}, "^TLS_CERT is set and TLS_KEY is not"),
        ({"TLS_KEY": str(key)}, "^TLS_KEY is set and TLS_CERT is not"),
        ({"TLS_CERT": str(cert), "TLS_KEY": str(key)}, rf"^TLS_KEY={key}: no such file"),
    ):
        with pytest.raises(UserError, match=problem):
            loaded.replace(**settings).tls()
    key.touch()
    assert loaded.replace(TLS_CERT=str(cert), TLS_KEY=str(key)).tls() == (cert, key)


@pytest.mark.parametrize(
    "wrong",
    ["TRITON_HTTP_PORT=abc", "WORKERS=many", "TRITON_SHARED_MEMORY=1\nBIND_ADDRESS=0.0.0.0", "TLS_CERT=no-such-file"],
)
def test_wrong_settings_can_be_replaced_by_their_defaults(dotenv, wrong):
    """`make down` needs that: with Docker, each command computes the environment of all containers."""
    dotenv.write_text(f"RUNTIME=docker\n{wrong}\n")
    corrected = Settings.load(checked=False).corrected()
    for name in TABLE:
        corrected.value(name)
    assert not corrected.shares_memory()
    assert corrected.tls() is None
    assert (corrected["RUNTIME"], corrected["TRITON_HTTP_PORT"]) == ("docker", "8000")


def test_example_file_lists_every_setting_with_its_default():
    example = {name: value or "" for name, value in dotenv_values(ROOT / ".env.example").items()}
    assert [*example.items()] == [*DEFAULTS.items()]
    Settings.load()  # the defaults are valid


def test_choices_are_those_of_the_features():
    """The table repeats them, because the ground may not import a feature."""
    for name, choices in {"WORKLOAD": WORKLOADS, "PROTOCOL": USERS, "NEURON_CHIP": PER_DEVICE}.items():
        for choice in choices:
            TABLE[name].rule(choice)
        with pytest.raises(ValueError, match=f"must be one of {', '.join(choices)}"):
            TABLE[name].rule("another")


def test_saved_value_ignores_this_command_and_counts_as_chosen(dotenv, monkeypatch):
    assert not Settings.load().chosen("SYSTEMS")
    monkeypatch.setenv("SYSTEMS", "embedding")  # equal to the default
    assert saved("SYSTEMS") == "embedding"
    save("USERS", "8")
    save("MODES", "dynamic  none dynamic")
    save("SYSTEMS", "embedding vit_ensemble")
    save("GRAFANA_IMAGE", "mirror.example/grafana:1")
    assert (saved("SYSTEMS"), pins()["GRAFANA_IMAGE"]) == ("embedding vit_ensemble", "mirror.example/grafana:1")
    assert stat.S_IMODE(dotenv.stat().st_mode) == 0o600
    loaded = with_secrets(Settings.load())
    assert [loaded.chosen(name) for name in ("SYSTEMS", "USERS", "ROUNDS")] == [True, True, False]
    assert [loaded.chosen_for_this_command(name) for name in ("SYSTEMS", "USERS", "ROUNDS")] == [True, False, False]
    assert loaded.modes == ("none", "dynamic")  # the order of reports


def test_admin_key_is_generated_once_and_kept_private(dotenv):
    first = with_secrets(Settings.load())["TRITON_ADMIN_KEY"]
    assert len(first) >= 40
    assert stat.S_IMODE(dotenv.stat().st_mode) == 0o600
    dotenv.chmod(0o644)
    assert with_secrets(Settings.load())["TRITON_ADMIN_KEY"] == first
    assert stat.S_IMODE(dotenv.stat().st_mode) == 0o600


def test_every_setting_is_used_somewhere():
    folders = ("deploy", "drills", "gateway", "scripts", "triton_transformers", "loadtest", "images")
    files = [ROOT / "compose.yaml", *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    code = "".join(path.read_text() for path in files if path.suffix in (".py", ".sh", ".conf", ".yaml"))
    assert [name for name in TABLE if not re.search(rf"\b(ENV_)?{name}\b|ettings\.{name.lower()}\b", code)] == []


def test_supervisord_gets_the_settings_that_it_names():
    conf = (ROOT / "scripts/stack/local/supervisord.conf").read_text()
    assert {*re.findall(r"%\(ENV_(\w+)\)", conf)} & TABLE.keys() <= {*restarting("stack", "local")}


def test_variables_of_kubernetes_are_settings_or_the_programs_own():
    own = {"GATEWAY_HOST", "GATEWAY_LISTEN", "LOADTEST_BIND", "LOADTEST_MASTER", "MPLCONFIGDIR", "TRITON_HOST"}
    for path in (ROOT / "deploy/kubernetes").rglob("*.yaml"):
        text = path.read_text()
        names = {*re.findall(r"\bname: ([A-Z][A-Z0-9_]+)\b", text)}
        for literals in re.findall(r"literals: \[(.*)\]", text):
            names |= {*re.findall(r"(\w+)=", literals)}
        assert names <= TABLE.keys() | own | {"TRITON_ENGINE_CACHE"}, path
