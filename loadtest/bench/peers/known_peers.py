"""The servers of the comparison, and the settings that are tried for each."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest.bench.clients import DIMENSIONS
from loadtest.bench.embedder import VARIABLE, runs_bf16
from loadtest.bench.peers.running import Running, started
from loadtest.server.own_stack import OwnStack
from triton_transformers.ports import free_ports
from triton_transformers.settings import ROOT, Settings, UserError

REQUIREMENTS = Path(__file__).with_name("requirements")
PRECISIONS = {"f32": "fp32", "bf16": "bf16"}  # as Triton's metrics name them, and as the table does
ONNX, INT8 = "onnx", ("int8", "onnx-int8")  # formats of this project
# The options of a server, as its source or its command line names them.
Variant = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """The same CPUs, model and work folder for every server. The model has two forms: its own weights and our graph."""

    cpus: tuple[int, ...]
    weights: Path
    repository: Path
    work: Path
    formats: dict[str, Site] = field(default_factory=dict)  # the same with the model in other formats

    @property
    def cpu_list(self) -> str:
        return ",".join(map(str, self.cpus))

    def in_format(self, name: str) -> Site:
        """Return the site with the model in this format. Raise UserError if it could not be assembled."""
        if name != ONNX and name not in self.formats:
            raise UserError(f"FORMAT={name} could not be assembled: the reason is above")
        return replace(self.formats.get(name, self), cpus=self.cpus)


@dataclass(frozen=True)
class Peer:
    """Another way to serve the model, started by one command in a virtual environment of its own."""

    name: str
    packages: str
    command: tuple[str, ...]  # {name} stands for an option
    variants: Callable[[int], list[Variant]]  # to try on as many cores
    form: str = "embed"
    is_rival: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    format: str = ONNX
    in_weights: bool = False  # runs in the folder of the weights

    def install(self) -> Path:
        """Return the virtual environment, after an install if its requirements have changed.

        Packages of .venv serve here too, unless the requirements replace them: all servers compute with one version of
        the engine, and PyTorch is installed once. The requirements name every other package.
        """
        venv = Settings.load().local_state / "peers" / self.packages
        requirements = (REQUIREMENTS / f"{self.packages}.txt").read_text()
        marker = venv / "installed.txt"
        if marker.exists() and marker.read_text() == requirements:
            return venv
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], check=True)
        (packages,) = venv.glob("lib/python3*/site-packages")
        (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
        pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--no-deps", "--requirement", str(REQUIREMENTS / f"{self.packages}.txt")],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(f"could not be installed: {done.stderr.strip().rpartition(chr(10))[2][:200]}")
        marker.write_text(requirements)
        return venv

    @contextlib.contextmanager
    def serve(self, site: Site, variant: Variant) -> Iterator[Running]:
        venv = self.install()
        site = site.in_format(self.format)
        (port,) = free_ports(1)
        options = variant | {"port": port, "repository": str(site.repository)}
        names = options | {"weights": site.weights, "venv": venv, "cpus": site.cpu_list}
        command = [f"{venv}/bin/{self.command[0]}", *(part.format(**names) for part in self.command[1:])]
        variables = {name: value.format(**names) for name, value in self.environment} | {
            VARIABLE: json.dumps(options),
            "OMP_NUM_THREADS": str(len(site.cpus)),
        }
        cwd = site.weights if self.in_weights else ROOT
        with started(command, port, self.form, site.cpu_list, variables, cwd) as running:
            yield replace(running, precision=self.precision(variant))

    def precision(self, variant: Variant) -> str:
        if self.format in INT8:
            return "int8"
        in_bf16 = variant.get("dtype") == "bfloat16" or (variant.get("engine") == "openvino" and runs_bf16())
        return "bf16" if in_bf16 else "fp32"


@dataclass(frozen=True)
class OwnPeer:
    """This project's own stack with its default settings, and one engine."""

    name: str
    engine: str
    form: str = "triton"
    is_rival: bool = False
    format: str = ONNX

    def variants(self, cores: int) -> list[Variant]:
        return [{"engine": self.engine}]

    @contextlib.contextmanager
    def serve(self, site: Site, variant: Variant) -> Iterator[Running]:
        site = site.in_format(self.format)
        path = site.work / f"stack-{self.engine}-{len(site.cpus)}"
        own = {"MODEL_REPOSITORY": str(site.repository), "TRITON_CPUS": site.cpu_list, "TRITON_ENGINE": self.engine}
        stack = OwnStack(path, quiet=True, SYSTEMS="embedding", **own)
        with stack.serving():
            precision = "int8" if self.format in INT8 else PRECISIONS[stack.encoder_engine().split()[1]]
            running = Running(stack.url("TRITON_HTTP_PORT"), self.form, stack.leader().pid, precision)
            try:
                yield running
            finally:
                running.resume()


def run_module(name: str) -> tuple[str, ...]:
    return ("python", "-m", f"loadtest.bench.peers.{name}")


def one_by_one(cores: int) -> list[Variant]:
    """Return the ways to keep the cores busy without batches."""
    processes = {"processes": cores}
    threads = {"pool": cores}
    one_run = {"threads": cores}
    return [processes, threads, one_run] if cores > 1 else [{"pool": 1}, {"pool": 2}]


def batches(cores: int) -> list[Variant]:
    """Return batch sizes, with a process for each core. Padded to their longest text, larger batches are slower."""
    return [{"processes": cores, "batch": batch, "wait_ms": batch // 4} for batch in (1, 4, 8)]


def streams(cores: int) -> list[Variant]:
    return [{"engine": "openvino", "threads": cores, "streams": cores}]


def vllm(cores: int) -> list[Variant]:
    return [{"dtype": dtype} for dtype in ("float32", *(["bfloat16"] if runs_bf16() else []))]


def infinity(cores: int) -> list[Variant]:
    return [
        {"engine": "optimum", "dtype": "float32", "batch": 16},
        {"engine": "torch", "dtype": "bfloat16", "batch": 32},
        {"engine": "torch", "dtype": "bfloat16", "batch": 64},
    ]


# infinity passes the whole path of the graph to optimum, which looks for it below the folder: only "." works. From that
# name infinity infers no pooling.
INFINITY = (
    "infinity_emb v2 --model-id . --served-model-name model --port {port} --engine {engine} --dtype {dtype} "
    "--batch-size {batch} --device cpu --no-bettertransformer --no-compile --pooling-method mean --log-level warning"
)
# vLLM reads the pooling from the checkpoint, and binds its threads to CPUs of its own choice if it is not told which.
VLLM = (
    "python -m vllm.entrypoints.openai.api_server --model {weights} --served-model-name embedding --port {port} "
    "--runner pooling --dtype {dtype} --max-num-seqs 64 --no-enable-log-requests"
)
VLLM_VARIABLES = (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "{cpus}"))
# The settings that Ray recommends for throughput. Without them a request passes two more threads.
RAY = (("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),)
PEERS = (
    OwnPeer("this project", "auto"),
    OwnPeer("this project, ONNX Runtime", "onnxruntime"),
    Peer("FastAPI", "fastapi", run_module("fastapi_server"), one_by_one),
    Peer("LitServe", "litserve", run_module("litserve_server"), batches),
    Peer("mosec", "mosec", run_module("mosec_server"), batches),
    Peer("Ray Serve", "ray", run_module("ray_server"), batches, environment=RAY),
    Peer("infinity", "infinity", tuple(INFINITY.split()), infinity, form="openai", in_weights=True),
    Peer("OpenVINO Model Server's policy", "fastapi", run_module("openvino_server"), streams),
    Peer("vLLM", "vllm", tuple(VLLM.split()), vllm, form="gateway", environment=VLLM_VARIABLES),
    OwnPeer("this project", "auto", format="int8"),
    Peer("FastAPI", "fastapi", run_module("fastapi_server"), one_by_one, format="int8"),
    Peer("mosec", "mosec", run_module("mosec_server"), batches, format="int8"),
    Peer(
        "infinity",
        "infinity",
        tuple(INFINITY.split()),
        lambda cores: infinity(cores)[:1],
        form="openai",
        format="onnx-int8",  # it runs ONNX only
        in_weights=True,
    ),
)


def weights_with_graph(weights: Path, path: Path, folder: Path) -> Path:
    """Return a folder with the model's files and this graph without its pooling, which infinity does itself."""
    import onnx

    shutil.copytree(weights, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    graph = onnx.load(path)
    *_, last = (node for node in graph.graph.node if node.op_type == "LayerNormalization")
    before, name = last.output[0], "last_hidden_state"
    for node in graph.graph.node:
        node.output[:] = [name if output == before else output for output in node.output]
        node.input[:] = [name if source == before else source for source in node.input]
    del graph.graph.output[:]
    shape: list[str | int | None] = ["batch", "tokens", DIMENSIONS]
    graph.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    onnx.save(graph, folder / "model.onnx")
    return folder
