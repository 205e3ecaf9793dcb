"""Settings: their order, and the messages about invalid ones."""

import re
import stat

import pytest

from scripts.common import settings as module
from scripts.common.settings import ROOT, Settings, UserError, with_secrets


@pytest.fixture
def dotenv(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DOTENV", tmp_path / ".env")
    return tmp_path / ".env"


def test_environment_wins_over_dotenv_and_dotenv_over_example(dotenv, monkeypatch):
    assert Settings.load()["TRITON_HTTP_PORT"] == "8000"
    dotenv.write_text("TRITON_HTTP_PORT=8100\nROUNDS=7\n")
    monkeypatch.setenv("ROUNDS", "9")
    loaded = Settings.load()
    assert (loaded["TRITON_HTTP_PORT"], loaded["ROUNDS"]) == ("8100", "9")


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
    for name, value in module.command_environment(SYSTEMS="spam", WARMUP="1").items():
        monkeypatch.setenv(name, value)
    loaded = Settings.load()
    assert [loaded[name] for name in ("SYSTEMS", "WARMUP", "ROUNDS", "USERS")] == ["spam", "1", "9", ""]


def test_tests_do_not_read_the_developers_dotenv():
    assert module.DOTENV.parent != ROOT


def test_empty_value_means_the_default(dotenv, monkeypatch):
    dotenv.write_text("ROUNDS=\n")
    monkeypatch.setenv("WARMUP", "")
    loaded = Settings.load()
    assert (loaded["ROUNDS"], loaded["WARMUP"]) == ("5", "3")


def test_measured_system_is_served(dotenv, monkeypatch):
    monkeypatch.setenv("SYSTEM", "spam")
    assert Settings.load()["SYSTEMS"] == "embedding"
    monkeypatch.setenv("SERVE_SYSTEM", "1")  # set by make loadtest
    assert Settings.load()["SYSTEMS"] == "spam"
    dotenv.write_text("SYSTEMS=embedding vit_ensemble\n")
    assert Settings.load()["SYSTEMS"] == "embedding vit_ensemble spam"
    monkeypatch.setenv("SYSTEM", "vit_ensemble")
    assert Settings.load()["SYSTEMS"] == "embedding vit_ensemble"


def test_value_that_equals_the_default_counts_as_chosen(dotenv, monkeypatch):
    assert not Settings.load().chosen("SYSTEM")
    dotenv.write_text("USERS=8\n")
    monkeypatch.setenv("SYSTEM", "embedding")
    loaded = with_secrets(Settings.load())
    assert [loaded.chosen(name) for name in ("SYSTEM", "USERS", "ROUNDS")] == [True, True, False]
    assert [loaded.chosen_for_this_command(name) for name in ("SYSTEM", "USERS", "ROUNDS")] == [True, False, False]


def test_misspelt_name_raises(dotenv):
    dotenv.write_text("USERZ=3\n")
    with pytest.raises(UserError, match="USERZ"):
        Settings.load()


@pytest.mark.parametrize(("wrong", "right"), [("USRES", "USERS"), ("ROUNSD", "ROUNDS"), ("MIN_RATOI", "MIN_RATIO")])
def test_misspelt_name_on_the_command_line_raises_with_the_right_one(dotenv, monkeypatch, wrong, right):
    monkeypatch.setenv(module.NAMES, f"SYSTEM {wrong}")
    with pytest.raises(UserError, match=f"unknown setting {wrong} .* did you mean {right}"):
        Settings.load()


def test_variables_of_make_itself_are_no_misspelt_settings(dotenv, monkeypatch):
    monkeypatch.setenv(module.NAMES, "BENCH TENSORFLOW INSTALL_DOCKER PYTHON SERVE_SYSTEM * RUNTIME SHELL MAKEFLAGS CI")
    Settings.load()


@pytest.mark.parametrize("wrong", ['PROFILE="cpu', "=cpu"])
def test_unreadable_line_of_dotenv_raises_with_its_number(dotenv, wrong):
    dotenv.write_text(f"USERS=3\n{wrong}\n")
    with pytest.raises(UserError, match=r"line 2: write NAME=value"):
        Settings.load()


def test_dotenv_in_another_encoding_raises_with_its_path(dotenv):
    dotenv.write_bytes("REPORTS=Berichte für mich\n".encode("latin-1"))
    with pytest.raises(UserError, match=f"{re.escape(str(dotenv))} is not text in UTF-8"):
        Settings.load()


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("ROUNDS", "x", lambda s: s.integer("ROUNDS")),
        ("ROUNDS", "1", lambda s: s.integer("ROUNDS", minimum=2)),
        ("WARMUP", "-1", lambda s: s.number("WARMUP")),
        ("WARMUP", "nan", lambda s: s.number("WARMUP")),
        ("WARMUP", "inf", lambda s: s.number("WARMUP")),
        ("LOCUST_PORT", "70000", lambda s: s.port("LOCUST_PORT")),
        ("BIND_ADDRESS", "::1", lambda s: s.address()),
        ("DRY_RUN", "true", lambda s: s.flag("DRY_RUN")),
        ("PROTOCOL", "carrier pigeon", lambda s: s.choice("PROTOCOL", ("http", "grpc"))),
    ],
)
def test_invalid_value_raises_with_name_and_value(dotenv, name, value, read):
    with pytest.raises(UserError, match=re.escape(f"{name}={value}")):
        read(Settings(Settings.load() | {name: value}))


@pytest.mark.parametrize(
    ("shares", "address", "expected"), [("0", "0.0.0.0", False), ("0", "127.0.0.1", False), ("1", "127.0.0.2", True)]
)
def test_shared_memory_is_opened_on_loopback(dotenv, shares, address, expected):
    chosen = {"TRITON_SHARED_MEMORY": shares, "BIND_ADDRESS": address}
    assert Settings(Settings.load() | chosen).shares_memory() is expected


def test_shared_memory_is_refused_where_others_reach_the_ports(dotenv):
    settings = Settings(Settings.load() | {"TRITON_SHARED_MEMORY": "1", "BIND_ADDRESS": "0.0.0.0"})
    with pytest.raises(UserError, match=r"TRITON_SHARED_MEMORY=1 opens .* BIND_ADDRESS=0.0.0.0 to other machines"):
        settings.shares_memory()


def test_admin_key_is_generated_once_and_kept_private(dotenv):
    first = with_secrets(Settings.load())["TRITON_ADMIN_KEY"]
    assert len(first) >= 40
    assert stat.S_IMODE(dotenv.stat().st_mode) == 0o600
    assert with_secrets(Settings.load())["TRITON_ADMIN_KEY"] == first


def test_every_setting_is_used_somewhere(dotenv):
    files = [path for folder in ("deploy", "scripts", "loadtest", "images") for path in (ROOT / folder).rglob("*")]
    code = "".join(
        path.read_text() for path in (*files, ROOT / "compose.yaml") if path.suffix in (".py", ".sh", ".conf", ".yaml")
    )
    assert [name for name in Settings.load() if not re.search(rf"\b(ENV_)?{name}\b", code)] == []
