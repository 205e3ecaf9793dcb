"""Flags that serve.sh passes to Triton. Stand-ins replace the server and df."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from triton_transformers.settings import ROOT

MIB = 2**20
KNOWN_SIZE = "echo Size; echo 1000000000"


@pytest.fixture
def serve(tmp_path):
    """Return a function that runs serve.sh with a df of the given script, and returns what it prints."""
    for name in ("bin", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
    programs = {
        "home/bin/tritonserver": 'printf "%s\\n" "$@" "core $(ulimit -Hc)"; env; exit ${EXIT:-0}',
        "bin/python3": "exit ${WATCHDOG_EXIT:-0}",
        "bin/df": '. "$DF"',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    def run(df: str = KNOWN_SIZE, **settings: str) -> str:
        (tmp_path / "df").write_text(df)
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "DF": str(tmp_path / "df"),
            "TRITON_HOME": str(tmp_path / "home"),
            "TRITON_ADMIN_KEY": "a-key-of-the-tests",
        }
        done = subprocess.run(
            [ROOT / "images/triton/serve.sh"], env=environment | settings, capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr) == (int(settings.get("EXIT", 0)), "")
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("df", "settings", "expected"),
    [
        *[
            (f"printf '  1B-blocks\\n %s\\n' {available}", {}, expected * MIB)
            for available, expected in ((64 * MIB, 4), (256 * MIB, 16), (16 * 2**30, 64), (MIB, 4), (0, 64))
        ],
        ("echo 'df: unrecognized option: output' >&2; exit 1", {}, 64 * MIB),
        ("echo Size; echo -", {}, 64 * MIB),
        ("kill -9 $PPID", {"TRITON_SHM_BYTES": "12345678"}, 12345678),
    ],
)
def test_shared_memory_is_a_sixteenth_within_limits_unless_it_is_set(serve, df, settings, expected):
    (size,) = re.findall(r"shm-default-byte-size=(\d+)$", serve(df, **settings), re.MULTILINE)
    assert int(size) == expected


@pytest.mark.parametrize(
    ("settings", "restricted"),
    [
        ({}, True),
        ({"TRITON_SHARED_MEMORY": "0"}, True),
        ({"TRITON_SHARED_MEMORY": "1"}, False),
        ({"TRITON_SHARED_MEMORY": "1", "CONTAINER_TYPE": "TRITON"}, True),
    ],
)
def test_shared_memory_needs_the_key_unless_it_is_opened(serve, settings, restricted):
    flags = re.findall(r"--(http-restricted-api|grpc-restricted-protocol)=([\w,-]+):(\S+)=", serve(**settings))
    names = ["model-repository", "trace", "logging", *(["shared-memory"] if restricted else [])]
    assert flags == [
        ("http-restricted-api", ",".join(names), "triton-admin-key"),
        ("grpc-restricted-protocol", ",".join(names), "triton-admin-key"),
    ]


def test_front_ends_that_ignore_the_key_stay_closed(serve):
    printed = serve(AIP_MODE="PREDICTION", AIP_HTTP_PORT="8090", AIP_STORAGE_URI="gs://models").splitlines()
    assert {"--allow-sagemaker=false", "--allow-vertex-ai=false"} <= set(printed)
    assert [line for line in printed if line.startswith("AIP_")] == []


def test_server_writes_no_core_dumps_and_hands_the_key_to_no_model(serve):
    printed = serve().splitlines()
    assert "core 0" in printed
    assert [line for line in printed if line.startswith("TRITON_ADMIN_KEY=")] == []


def test_traces_go_to_the_receiver_or_to_a_collector_of_the_users(serve):
    assert "--trace-config" not in serve(TRACE="0", TRACE_URL="http://collector:4318/v1/traces")
    flags = serve(TRACE="1", TRACE_RATE="7", TRACE_PORT="4319")
    assert "--trace-config=rate=7\n" in flags
    assert "--trace-config=opentelemetry,url=http://127.0.0.1:4319/v1/traces\n" in flags
    assert "url=http://collector:4318/v1/traces\n" in serve(TRACE="1", TRACE_URL="http://collector:4318/v1/traces")


def test_watchdog_that_cannot_run_ends_with_the_server(serve):
    """serve() returns after the last process that holds its output, and checks the exit code."""
    serve(WATCHDOG_EXIT="1", EXIT="3")


@pytest.mark.parametrize(("profile", "visible"), [("cpu", ""), ("neuron", ""), ("cuda", "1")])
def test_only_cuda_uses_the_gpus_of_the_machine(serve, profile, visible):
    printed = serve(PROFILE=profile, CUDA_VISIBLE_DEVICES="1")
    assert f"\nCUDA_VISIBLE_DEVICES={visible}\n" in printed
    assert ("harmless: 'CudaDriverHelper has not been initialized'" in printed) == (visible == "")


def test_engine_of_a_system_is_loaded_with_it(serve):
    flags = serve(MODEL_REPOSITORY=str(ROOT / "model_repository"), SYSTEMS="embedding falcon7b")
    assert re.findall(r"--load-model=(\S+)", flags) == ["embedding", "falcon7b", "falcon7b_stream"]


@pytest.mark.parametrize(
    ("own", "expected"), [({}, ""), ({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}, ":glibc.malloc.perturb=1")]
)
def test_memory_is_in_large_pages_beside_the_users_own_tunables(serve, own, expected):
    assert f"\nGLIBC_TUNABLES=glibc.malloc.hugetlb=1{expected}\n" in serve(**own)
