"""The stack in containers, those of compose.yaml."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.markup import escape

from export.removal import remove_all
from export.selection import all_in_place
from loadtest.server.machine import STACK_CONTAINERS
from scripts.stack.base import PORTS, WOULD_RESTART, Process, Stack
from scripts.stack.docker import containers, preflight, slim
from scripts.stack.docker.compose import Compose
from scripts.stack.docker.containers import DEFINITION, Container
from triton_transformers.cli import OUT_OF_MEMORY, err, out, without_codes
from triton_transformers.files import ANOTHER_COMPARISON, exclusive
from triton_transformers.ports import check_free
from triton_transformers.settings import PROFILES, ROOT, UserError, restarting

# How far back to look for crashes.
EVENTS = "10m"
# The exit code of a container that the kernel killed.
KILLED = 137
DRAIN = "serving.watchdog.drain"
MODELS_LOCK = "models.lock"
LOADTEST_LOCK = "loadtest.lock"
# Only other containers reach these ports, in the stack's own network.
UNPUBLISHED = {"GATEWAY_METRICS_PORT", "TRACE_PORT"}
# These services run only with TRACE=1 and without a TRACE_URL.
TRACING = ("traces", "jaeger")
# A container that Docker restarted this often without success has given up.
MAX_RESTARTS = 3


@dataclass
class DockerStack(Stack):
    """The composed stack."""

    @cached_property
    def compose(self) -> Compose:
        return self.compose_for(self.settings.systems)

    def compose_for(self, systems: list[str]) -> Compose:
        """Return compose with these systems in its environment, and the images that they need."""
        return Compose(self.settings.replace(SYSTEMS=" ".join(systems)), self.recorded().get("image_tag", ""))

    @property
    def exporter(self) -> str:
        return "exporter-neuron" if self.settings.profile == "neuron" else "exporter"

    def service(self, program: str) -> str:
        return f"triton-{self.settings.profile}" if program == "triton" else program

    # --- up and down ------------------------------------------------------------------------------------------------

    @property
    def project(self) -> str:
        return self.settings.compose_project_name

    def containers(self, *options: str) -> list[Container]:
        return containers.containers(self.project, *options)

    def tritons(self, *options: str) -> list[str]:
        """Return the ids of the running Tritons, or of those that options of `docker ps` select, of any profile."""
        return [container.id for container in self.containers(*options) if container.is_triton]

    def running(self) -> bool:
        return not self.other_checkout() and bool(self.containers())

    def other_checkout(self) -> str:
        """Return the folder of another checkout whose servers run under this project's name, or nothing.

        If that folder was moved or deleted, its stack is this checkout's.
        """
        servers = [container for container in self.containers() if container.is_triton or container.service in PORTS]
        folders = (Path(server.folder) for server in servers)
        return next((str(folder) for folder in folders if folder.is_dir() and folder.resolve() != ROOT), "")

    def check_checkout(self) -> None:
        if other := self.other_checkout():
            raise UserError(
                f"the stack {self.project} that runs here belongs to the checkout {other}: run `make down` there, or "
                "set another COMPOSE_PROJECT_NAME and other ports (GATEWAY_PORT, TRITON_HTTP_PORT, ...) in .env"
            )

    started_with = restarting("stack", "docker")

    @property
    def comparison_lock(self) -> Path:
        return self.state / LOADTEST_LOCK

    @property
    def comparison_note(self) -> Path:
        return self.settings.reports / ".lock-triton-8000"  # of the container that measures

    def check(self, systems: list[str]) -> None:
        self.compose = self.compose_for(systems)  # what was assembled since the last check may need another image
        preflight.check_device(self.settings, preflight.check_build(self.settings, self.compose.nvidia_image))
        self.check_checkout()
        preflight.check_readable(ROOT / "monitoring")
        if self.compose.environment["TRITON_USER"] != self.compose.environment["HOST_USER"]:
            preflight.check_readable(self.settings.model_repository)
            preflight.check_tls(self.settings, int(self.compose.environment["TRITON_USER"].partition(":")[0]))
        self.check_gateway()
        self.state.mkdir(parents=True, exist_ok=True)
        programs = [name for name in PORTS if name not in TRACING or self.settings.traces()]
        ports = [port for name in programs for port in PORTS[name] if port not in UNPUBLISHED]
        check_free(self.settings, ports, self.published())
        if self.running() and (self.changed_settings() or self.changed_gateway()):
            self.check_no_comparison(WOULD_RESTART)

    def check_comparison(self) -> None:
        self.check_no_comparison(ANOTHER_COMPARISON)

    def start(self, systems: list[str]) -> None:
        self.check(systems)
        folder = self.settings.traces()
        if folder:
            folder.mkdir(mode=0o700, exist_ok=True)  # Docker would make it as root
        self.settings.reports.mkdir(parents=True, exist_ok=True)
        # Everything that may fail comes before the running Triton is touched.
        pulled = ("PROMETHEUS_IMAGE", "GRAFANA_IMAGE", *(["JAEGER_IMAGE"] if folder else []))
        containers.pull(self.compose.environment[name] for name in pulled)
        self.build_services(*map(self.service, ("triton", "gateway", *(["traces"] if folder else []))))
        if self.started_at("gateway") and (changed_gateway := self.changed_gateway()):
            out.print(f"settings changed ({', '.join(changed_gateway)}): restarting the gateway")
        self.replace_triton()
        others = [f"triton-{profile}" for profile in PROFILES if profile != self.settings.profile]
        if self.settings.profile != "neuron":
            others.append("neuron-monitor")
        others += [] if folder else TRACING
        self.compose.run("rm", "--stop", "--force", *others, profile="*")
        with err.status("starting"):
            self.compose.run("up", "--detach", "--remove-orphans")
        self.write_record(image_tag=self.compose.image_tag)

    def replace_triton(self) -> None:
        """Replace the running Triton, perhaps of another profile, if its settings or its image changed.

        It serves until its successor is created, and again if the successor does not start.
        """
        if not (running := self.tritons()):
            return
        if leftovers := {*self.tritons("--all")}.difference(running):  # of an interrupted `make up`
            preflight.run("docker", "rm", *leftovers)
        service = self.service("triton")
        number = sum(container.service == service for container in self.containers()) + 1
        self.compose.run("create", "--no-build", "--no-recreate", "--scale", f"{service}={number}", service)
        (successor,) = {*self.tritons("--all")}.difference(running)
        old, new = json.loads(preflight.run("docker", "inspect", running[0], successor).stdout)
        image = ["image"] if old["Image"] != new["Image"] else []
        if not image and old["Config"]["Labels"][DEFINITION] == new["Config"]["Labels"][DEFINITION]:
            preflight.run("docker", "rm", successor)
            return
        changed = self.changed_settings() + image or ["compose.yaml"]
        out.print(f"settings changed ({', '.join(changed)}): restarting Triton")
        try:
            self.drain_triton()
            preflight.run("docker", "stop", *running)
            started = preflight.run("docker", "start", successor)
            if started.returncode:
                raise UserError(f"the new Triton did not start, so the old one goes on: {started.stderr.strip()}")
        except BaseException:
            preflight.run("docker", "rm", "--force", successor)
            preflight.run("docker", "restart", *running)
            raise
        preflight.run("docker", "rm", *running)

    def stop(self) -> None:
        # Compose would stop all services at once, and the gateway has requests that Triton must answer.
        self.compose.run("stop", "gateway")
        self.drain_triton()
        self.compose.run("down", "--remove-orphans", profile="*")
        self.record.unlink(missing_ok=True)

    def drain_triton(self) -> None:
        """Wait until Triton has answered what it accepted. Its profile may differ from that of this command."""
        for container in self.tritons():
            drained = preflight.run("docker", "exec", container, "python3", "-m", DRAIN, timeout=None)
            if drained.returncode:
                err.print(f"[yellow]{escape(drained.stderr.strip())}[/]")

    def clean(self) -> None:
        if other := self.other_checkout():
            out.print(f"kept the containers of {self.project}, because they belong to the checkout {other}")
        else:
            self.compose.run("down", "--remove-orphans", profile="*")
        if kept := containers.remove_volumes(self.project):
            out.print(f"kept volumes of another checkout: {' '.join(kept)} (`docker volume rm` removes them)")
        containers.remove_images(self.project)
        if (cache := containers.build_cache()) not in ("", "0B"):
            out.print(
                f"kept Docker's build cache of {cache}, which all projects share (`docker builder prune` frees it)"
            )
        remove_all(self.settings)
        files = (MODELS_LOCK, LOADTEST_LOCK, self.compose.written_file, self.record, *self.served.files)
        for path in (self.state / file for file in files):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.state / "traces", ignore_errors=True)
        for folder in (self.record.parent, self.served.folder, self.state):
            with contextlib.suppress(OSError):  # files of the local runtime are in it, or it does not exist
                folder.rmdir()
        out.print("removed the containers, volumes and images of the stack, and the assembled models")

    # --- building ---------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Build the images of the profile, and print their names."""
        preflight.check_build(self.settings, self.compose.nvidia_image)
        if self.settings.tag:
            slim.build(self.settings, self.compose.environment | {"DOCKER_BUILDKIT": "1"})
            return
        services = [self.service("triton"), "gateway", "loadtest"]
        if self.compose.image_tag != "neuron-inf1":  # `make models` does not compile for Inf1
            services.append(self.exporter)
        self.build_services(*services)
        composed = self.composed()
        out.print(*(f"built {composed[name]['image']}" for name in services), sep="\n")

    def composed(self) -> dict[str, Any]:
        """Return the services as compose reads them with the settings."""
        return json.loads(self.compose.run("config", "--format", "json", profile="*"))["services"]

    def build_services(self, *services: str) -> None:
        """Build the services' images, and show Docker's own progress."""
        command = self.compose.command("build", *services, profile="*")
        if subprocess.run(command, env=self.compose.environment, cwd=ROOT).returncode:
            raise UserError("the build failed; Docker's message is above")

    # --- one-shot services ------------------------------------------------------------------------------------------

    def models_lock(self) -> AbstractContextManager[None]:
        return exclusive(self.state / MODELS_LOCK, "another `make models` is at work here")

    def models(self, systems: list[str]) -> None:
        with self.models_lock():
            if all_in_place(self.settings, systems):
                return
            self.compose = self.compose_for(systems)
            preflight.check_compose()
            if self.exporter == "exporter-neuron":
                preflight.check_compiling(self.settings)
                preflight.check_build(self.settings, self.compose.nvidia_image)
            preflight.warn_of_torch_index(self.settings.torch_index, self.composed()[self.exporter]["image"])
            if self.settings.source and not self.settings.source.is_dir():
                raise UserError(f"SOURCE={self.settings['SOURCE']}: there is no such folder")
            self.settings.model_repository.resolve().mkdir(parents=True, exist_ok=True)
            self.build_services(self.exporter)
            if code := self.run_service(self.exporter, "another `make models` is at work here"):
                if code == KILLED:
                    err.print(f"[red]error:[/] the exporter was killed. {OUT_OF_MEMORY}: raise EXPORTER_MEMORY in .env")
                sys.exit(code)

    def run(self, program: str) -> int:
        measures = program in ("loadtest", "tune")
        conflict = ANOTHER_COMPARISON if measures else f"another `make {program}` is running"
        with self.no_comparison(conflict) if measures else nullcontext():
            self.settings.reports.mkdir(parents=True, exist_ok=True)
            self.build_services("loadtest")
            if measures and (workers := self.settings.workers):
                # They connect to the comparison once it runs, and end with it.
                scale = ["--force-recreate", "--scale", f"loadtest-worker={workers}", "loadtest-worker"]
                self.compose.run("up", "--detach", "--no-deps", *scale, profile="*")
            if measures:
                ours = self.compose.run("ps", "--quiet", profile="*").split()
                self.compose.environment[STACK_CONTAINERS] = " ".join(ours)
            return self.run_service(program, conflict)

    def run_service(self, service: str, conflict: str) -> int:
        """Run a one-shot service, print its output, and return its exit code.

        Signals are passed to the container, and its output after them is still printed. Docker's `attach` and compose's
        `run` would leave at the first signal.
        """
        container = self.inspect(service)
        if container and container["State"]["Running"]:
            raise UserError(f"{conflict}: wait for it, or stop it")
        self.compose.run("create", "--no-build", "--force-recreate", service, profile="*")
        container = self.inspect(service)
        assert container
        name = container["Id"]
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(
                number, lambda n, _: preflight.run("docker", "kill", "--signal", str(n), name)
            )
        started = preflight.run("docker", "start", name)
        if started.returncode:
            raise UserError(f"{service} did not start: {started.stderr.strip()}")
        # Ctrl-C does not reach another session.
        subprocess.run(["docker", "logs", "--follow", name], start_new_session=True)
        code = preflight.run("docker", "wait", name, timeout=None).stdout.strip()
        if not code:
            raise UserError(f"{service} was removed before it ended")
        for number, handler in before.items():
            signal.signal(number, handler)
        return int(code)

    # --- looking ----------------------------------------------------------------------------------------------------

    def programs(self) -> list[str]:
        tracing = self.settings.replace(**self.recorded()["settings"]).traces()
        return [program for program in PORTS if program not in TRACING or tracing]

    def inspect(self, program: str) -> dict | None:
        """Return Docker's record of the program's container; None if it has none."""
        containers = self.compose.run("ps", "--all", "--quiet", self.service(program), profile="*").split()
        if not containers:
            return None
        records = json.loads(preflight.run("docker", "inspect", containers[0]).stdout or "[]")
        return records[0] if records else None  # removed in between

    def published(self) -> set[int]:
        """Return the ports of this machine that our running containers hold."""
        containers = [container for program in self.programs() if (container := self.inspect(program))]
        bindings = [b for container in containers for b in container["NetworkSettings"]["Ports"].values() if b]
        return {int(address["HostPort"]) for binding in bindings for address in binding}

    def started_at(self, program: str) -> str:
        container = self.inspect(program)
        return container["State"]["StartedAt"] if container and container["State"]["Running"] else ""

    def process(self, program: str) -> Process:
        container = self.inspect(program)
        if not container:
            return Process("missing", running=False, gave_up=True, seconds=0, crashes=0)
        state, restarts = container["State"], container["RestartCount"]
        health = state.get("Health", {}).get("Status", "")
        started = datetime.fromisoformat(state["StartedAt"][:19]).replace(tzinfo=UTC)
        return Process(
            state=health if state["Running"] and health not in ("", "healthy") else state["Status"],
            running=state["Running"] and health in ("", "healthy"),
            gave_up=state["Status"] in ("exited", "dead")
            or (state["Status"] == "restarting" and restarts >= MAX_RESTARTS),
            seconds=(datetime.now(UTC) - started).total_seconds(),
            crashes=restarts,
            cause=self.cause(program, container) if restarts else "",
        )

    def cause(self, program: str, container: dict[str, Any]) -> str:
        """Return why a container crashed, if its memory ran out; nothing otherwise."""
        # Docker clears the exit code in a container's state when it restarts the container.
        since = ["docker", "events", "--since", EVENTS, "--until", "0s", "--filter", f"container={container['Id']}"]
        crashes = preflight.run(*since, "--filter", "event=die", "--format", "{{.Actor.Attributes.exitCode}}").stdout
        if str(KILLED) not in crashes.split() and not container["State"]["OOMKilled"]:
            return ""
        limit = f"its limit is {decimal(container['HostConfig']['Memory'])}"
        if program == "triton":
            limit += f", TRITON_MEMORY={self.recorded()['settings'].get('TRITON_MEMORY')}: raise it in .env"
        return f"It was killed (exit code {KILLED}). {OUT_OF_MEMORY}: {limit}"

    def full_shared_memory(self) -> str:
        if self.settings.triton_shared_memory:
            return "/dev/shm of this machine is full, which Triton uses with TRITON_SHARED_MEMORY=1: `ls -lS /dev/shm`"
        return (
            f"/dev/shm of Triton's container, TRITON_SHM_SIZE={self.settings['TRITON_SHM_SIZE']}, is full of the "
            "tensors of its models: set a larger TRITON_SHM_SIZE, or serve fewer systems"
        )

    def log_tail(self, program: str, lines: int) -> str:
        service = self.service(program)
        return without_codes(self.compose.run("logs", "--no-log-prefix", "--no-color", "--tail", str(lines), service))

    def log_command(self, follow: bool) -> list[str]:
        if not self.running():
            out.print(
                "no logs: the stack is not running, and Docker keeps no logs of containers that `make down` removed"
            )
            return []
        os.chdir(ROOT)
        os.environ.update(self.compose.environment)
        return self.compose.command("logs", "--tail", "100", *(["--follow"] if follow else []))
