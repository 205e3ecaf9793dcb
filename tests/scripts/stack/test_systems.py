"""Load and unload systems through model control, against a stand-in for Triton that records the calls."""

from __future__ import annotations

import os

import pytest

from scripts.stack.local.shared_memory import SHOWN, occupancy
from scripts.stack.systems import ModelControl, ServedSystems
from tests.support.model_control import READY, ControlledModels
from triton_transformers.settings import UserError
from triton_transformers.triton import TimedOutError, TritonError

UNHEALTHY = TritonError("load failed for model 'spam': Stub process 'spam_0_0' is not healthy.", 400)
CRASHED = TritonError("http://127.0.0.1:8000 does not answer: closed")
TOO_SLOW = TimedOutError("http://127.0.0.1:8000 does not answer: timed out")


@pytest.fixture
def triton():
    return ControlledModels({"spam": ["tokenizer", "encoder"], "ham": ["tokenizer"], "egg": []})


@pytest.fixture
def assembled():
    """Return the steps on disk of systems where they are not those of `triton`."""
    return {}


@pytest.fixture
def control(triton, assembled, tmp_path):
    for name in triton.steps:
        (tmp_path / name).mkdir()
    return ModelControl(
        triton,
        ServedSystems(tmp_path),
        tmp_path,
        5,
        lambda: "",
        lambda: triton.calls.append(("wait", "")),
        lambda: "/dev/shm is full, 0 bytes are free",
        lambda system: [system, *assembled.get(system, triton.steps[system])],
    )


NO_POLL = TritonError("failed to load 'spam', failed to poll from model repository", 400)
FULL = TritonError(
    "load failed for model 'spam': Unable to initialize shared memory key 'triton_python_backend_shm_region_7' to "
    "requested size (67108864 bytes). If you are running Triton inside docker, use '--shm-size' flag to control "
    "the shared memory region size. Error: No space left on device",
    400,
)
POLLED = """E1126 model_repository_manager.cc:1460] "Poll failed for model directory 'spam': an older reason"
[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: 24:9: no field named "nonsense".
E1126 model_repository_manager.cc:1460] "Poll failed for model directory 'spam': failed to read config.pbtxt"
E1126 model_repository_manager.cc:1460] "Poll failed for model directory 'ham': another reason"
"""


@pytest.mark.parametrize(
    ("errors", "log", "message"),
    [
        ([TritonError("bad config", 400)], "", "^model 'spam' did not load: bad config$"),
        ([NO_POLL], POLLED, r"\(failed to read config.pbtxt: 24:9: no field named \"nonsense\"\.\)$"),
        ([NO_POLL], "", r"\(`make logs` shows why\)$"),
        ([FULL], "", "^model 'spam' did not load: /dev/shm is full, 0 bytes are free$"),
        ([UNHEALTHY] * 3, "", "is not healthy"),
        ([CRASHED] * 3, "", "does not answer: closed"),
        (
            [TOO_SLOW],
            "",
            "^spam is not loaded within READY_TIMEOUT=5: Triton goes on loading encoder, tokenizer. `make",
        ),
    ],
)
def test_failed_load_is_refused_with_the_reason_and_keeps_no_other_from_loading(control, triton, errors, log, message):
    control.log = lambda: log
    triton.failures["spam"] = list(errors)
    triton.states = {step: ("LOADING", "") for step in triton.steps["spam"]}
    with pytest.raises(UserError, match=message):
        control.serve(["spam"], [])
    assert control.served.unfinished() == ["spam"] * (errors[0] is TOO_SLOW)
    triton.failures["spam"] = list(errors)
    with pytest.raises(UserError):
        control.serve(["spam", "ham"], ["spam", "ham"])
    assert control.served.read() == ["ham"]


@pytest.mark.parametrize(
    ("error", "calls", "message"),
    [
        (
            UNHEALTHY,
            ["load", "load"],
            "spam: a process of model 'spam' did not report to Triton in time. Loading the system again",
        ),
        (CRASHED, ["load", "wait", "load"], "spam: the server crashed and is restarted. Loading the system again"),
    ],
)
def test_system_is_loaded_again_after_a_crash(control, triton, capsys, error, calls, message):
    triton.failures["spam"] = [error]
    control.serve(["spam"], ["spam"])
    assert [call for call, _ in triton.calls] == calls
    assert message in " ".join(capsys.readouterr().err.split())


def test_largest_files_of_shared_memory_are_named_with_their_programs(tmp_path):
    (tmp_path / "held").write_bytes(bytes(1 << 20))
    (tmp_path / "left").write_bytes(bytes(2 << 20))
    for number in range(SHOWN):
        (tmp_path / str(number)).write_bytes(b"x")
    with (tmp_path / "held").open():
        text = occupancy(tmp_path)
    full, *files = text.split("; ")
    assert full.startswith(f"{tmp_path} is too full: ") and len(files) == SHOWN
    assert files[0] == f"{tmp_path}/left has 2.1 MB (no program uses it)"
    assert files[1].startswith(f"{tmp_path}/held has 1.0 MB (")
    assert f"process {os.getpid()})" in files[1]


def test_systems_are_loaded_one_after_the_other_and_listed(control, triton, capsys):
    control.serve(["spam", "ham"], ["spam", "ham"])
    assert triton.calls == [("load", "spam"), ("load", "ham")]
    assert control.served.read() == ["spam", "ham"]
    assert [line.split(" in ")[0] for line in capsys.readouterr().out.splitlines()] == ["spam: loaded", "ham: loaded"]


def test_loaded_system_is_refreshed_step_by_step(control, triton):
    control.serve(["spam"], ["spam"])
    triton.calls.clear()
    control.serve(["spam", "egg"], ["spam", "egg"])
    assert triton.calls == [("load", name) for name in ("encoder", "tokenizer", "spam", "egg")]
    triton.calls.clear()
    control.serve(["spam", "egg"], ["egg"])
    assert triton.calls == [("load", "egg")]


def test_steps_that_a_system_no_longer_has_are_unloaded_if_no_other_runs_them(control, triton, assembled):
    triton.steps = {"spam": ["tokenizer", "old", "encoder"], "ham": ["tokenizer"]}
    control.serve(["spam", "ham"], [])
    triton.states |= dict.fromkeys(["old", "encoder", "tokenizer"], READY)
    triton.calls.clear()
    assembled["spam"] = ["encoder"]
    load = triton.load

    def load_and_change(name: str, timeout: int) -> None:
        load(name, timeout)
        triton.steps = triton.steps | assembled

    triton.load = load_and_change
    control.serve(["spam", "ham"], ["spam"])
    assert triton.calls == [("load", "encoder"), ("load", "spam"), ("unload", "old")]


def test_failed_refresh_keeps_the_system_listed(control, triton):
    control.serve(["spam"], ["spam"])
    triton.failures["encoder"] = [TritonError("bad config", 400)]
    with pytest.raises(UserError, match="'encoder' did not load, the previous version stays loaded: bad config"):
        control.serve(["spam"], ["spam"])
    assert control.served.read() == ["spam"]


def test_unload_keeps_steps_that_another_system_runs(control, triton):
    control.serve(["spam", "ham"], ["spam", "ham"])
    control.served.request(["spam", "ham"])
    triton.calls.clear()
    control.unload(["spam"])
    assert triton.calls == [("unload", "spam"), ("unload", "encoder")]
    assert (control.served.read(), control.served.requested()) == (["ham"], ["ham"])


def test_system_that_is_not_loaded_is_only_unlisted(control, triton):
    control.served.write(["spam"])
    control.served.begin("spam")  # on a server that restarted since
    control.unload(["spam"])
    assert (triton.calls, control.served.read(), control.served.unfinished()) == ([], [], [])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TOO_SLOW])
def test_load_that_was_not_seen_to_end_is_waited_for_and_unloaded(control, triton, error):
    triton.failures["spam"] = [error]
    with pytest.raises((KeyboardInterrupt, UserError)):
        control.serve(["spam"], [])
    triton.states = {"encoder": ("LOADING", "")}  # Triton goes on with the steps, and does not know the ensemble yet
    assert (control.listed(), control.served.unfinished()) == ([], ["spam"])
    control.unload(["spam"])
    assert triton.calls == [*[("load", "spam")] * 2, *(("unload", model) for model in ["spam", "tokenizer", "encoder"])]
    assert control.served.unfinished() == []
    # A load that goes on beyond the timeout stays noted.
    control.served.begin("spam")
    triton.states, triton.failures["spam"] = {"encoder": ("LOADING", "")}, [TOO_SLOW]
    with pytest.raises(UserError, match=r"^spam is not loaded within READY_TIMEOUT=5: Triton goes on loading encoder"):
        control.unload(["spam"])
    assert control.served.unfinished() == ["spam"]


@pytest.mark.parametrize("content", [b"\xff\xfe\0garbage", b"unknown\n", None])
def test_damaged_list_is_written_again_from_what_the_server_has_loaded(control, triton, content):
    assert control.listed() == []
    triton.steps = triton.steps | {"tokenizer": [], "encoder": []}
    triton.states = dict.fromkeys(["encoder", "tokenizer", "spam"], READY)
    if content is not None:
        control.served.write(["spam"])
        control.served.path.write_bytes(content)
    assert control.listed() == ["spam"]
    control.serve(["egg"], [])
    assert control.served.read() == ["spam", "egg"]


def test_unreadable_configuration_is_named_before_triton_is_asked(control, triton):
    def assembled(system):
        raise UserError("models/encoder/config.pbtxt, line 3, is not a model configuration: Expected identifier")

    control.assembled = assembled
    with pytest.raises(UserError, match=r"^spam did not load: models/encoder/config.pbtxt, line 3, is not"):
        control.serve(["spam"], [])
    assert triton.calls == []
    assert control.served.unfinished() == []


def test_lists_are_readable_by_the_containers_user_unless_they_are_damaged(tmp_path):
    served = ServedSystems(tmp_path)
    served.write(["spam", "ham", "spam"])
    served.request(["spam"])
    assert served.read() == ["spam", "ham"]
    for path, mode in ((served.folder, 0o755), (served.path, 0o644), (served.requested_path, 0o644)):
        assert path.stat().st_mode & 0o777 == mode
    for content in (b"\xff\xfe\x00", bytes(64), b'{"a": [', b"spam ../ham"):
        for path in served.files:
            path.write_bytes(content)
        assert (served.read(), served.unfinished()) == (None, [])
        assert served.damaged() == [served.path, served.requested_path]
        served.begin("spam")
        assert served.unfinished() == ["spam"]
