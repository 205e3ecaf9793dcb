"""The composed stack: containers of compose.yaml."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from dotenv import dotenv_values

from scripts.common.cli import err, out
from scripts.common.files import exclusive, write_atomically
from scripts.common.ports import check_free
from scripts.common.settings import DOTENV, PROFILES, ROOT, UserError
from scripts.models.assemble import all_in_place, remove_all
from scripts.models.backends import needed
from scripts.neuron.target import CHIPS
from scripts.stack.base import PORTS, Process, Stack
from scripts.stack.docker import preflight, slim

SOURCES = ("pypi", "pypi-transformers", "ngc")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
# Who gets the Neuron devices.
NEURON_SERVICES = ("triton-neuron", "neuron-monitor", "exporter-neuron")
LOCKS = ("models.lock", "loadtest.lock")
# Brought back so often without staying up: it will not.
HOPELESS_AFTER = 3


@dataclass
class DockerStack(Stack):
    @cached_property
    def pins(self) -> dict[str, str]:
        pins = dotenv_values(ROOT / "versions.env")
        own = dotenv_values(DOTENV) if DOTENV.exists() else {}
        return {name: os.environ.get(name) or own.get(name) or value or "" for name, value in pins.items()}

    @cached_property
    def profile(self) -> str:
        return self.settings.choice("PROFILE", PROFILES)

    @cached_property
    def neuron_target(self) -> str:
        """The target of images/triton/Dockerfile: Inf1 is another world than its successors."""
        return "neuron-inf1" if self.settings.choice("NEURON_CHIP", CHIPS) == "inf1" else "neuron"

    @property
    def nvidia_image(self) -> str:
        inf1 = self.profile == "neuron" and self.neuron_target == "neuron-inf1"
        return self.pins["TRITON_INF1_IMAGE" if inf1 else "TRITON_IMAGE"]

    @property
    def exporter(self) -> str:
        compiling = self.profile == "neuron" and self.settings["LIST"] != "1"
        return "exporter-neuron" if compiling else "exporter"

    @cached_property
    def engine(self) -> dict:
        return preflight.check_engine()

    @property
    def workers(self) -> int:
        return self.settings.integer("WORKERS") if self.settings["WORKERS"] else 0

    @cached_property
    def environment(self) -> dict[str, str]:
        """What compose.yaml is filled in with."""
        # A rootless engine's root is whoever started it.
        rootless = any("rootless" in option for option in self.engine.get("SecurityOptions") or [])
        user = "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"
        places = {name: str(self.settings.path(name).resolve()) for name in ("MODEL_REPOSITORY", "REPORTS")}
        return {
            **self.pins,
            **os.environ,
            **{name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in PROXIES},
            **self.settings,
            **places,
            "SOURCE": str(self.settings.path("SOURCE").resolve()) if self.settings["SOURCE"] else "",
            "TRITON_SOURCE": self.triton_source,
            "TRITON_IMAGE": self.nvidia_image,
            "NEURON_TARGET": self.neuron_target,
            **{name: self.build_secret(name) for name in ("BUILD_PIP_CONF", "BUILD_CA")},
            "BIND_ADDRESS": str(self.settings.bind_address()),
            "CHECKOUT": str(ROOT),
            "HOST_USER": user,
            "TTY": "true" if sys.stdout.isatty() else "false",
            "COLUMNS": str(shutil.get_terminal_size().columns),
            # It only reads; and never as root, whoever runs make.
            "TRITON_USER": user if os.getuid() else "1000:1000",
            "LOADTEST_BIND": "0.0.0.0:5557" if self.workers else "",
            # Else a build that changed nothing makes a new image on newer engines, and Triton is started anew.
            "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
            # compose says that it may read the contexts, and forgets the secrets.
            "BUILDX_BAKE_ENTITLEMENTS_FS": "0",
            "TRITON_IMAGE_BUILT": f"triton-transformers:{self.image_tag}",
        }

    def build_secret(self, name: str) -> str:
        if not self.settings[name]:
            return "/dev/null"
        path = self.settings.path(name)
        if not path.is_file():
            raise UserError(f"{name}={self.settings[name]}: there is no such file")
        return str(path)

    @property
    def image_tag(self) -> str:
        return {"cpu": f"cpu-{self.triton_source}", "neuron": self.neuron_target}.get(self.profile, self.profile)

    @cached_property
    def triton_source(self) -> str:
        if self.settings["TRITON_SOURCE"]:
            return self.settings.choice("TRITON_SOURCE", SOURCES)
        backends = needed(self.settings.words("SYSTEMS"), self.settings.path("MODEL_REPOSITORY"))
        return "pypi-transformers" if backends & slim.TORCH else "pypi"

    def command(self, *arguments: str, profile: str | None = None) -> list[str]:
        compose = ["docker", "compose", "--project-directory", str(ROOT), *self.files]
        return [*compose, "--profile", profile or self.profile, *arguments]

    @cached_property
    def files(self) -> list[str]:
        """compose's own choice; with PROFILE=neuron, with as many devices as there are to be, for it knows no loops."""
        if self.profile != "neuron":
            return []
        devices = json.dumps([f"{device}:{device}" for device in preflight.neuron_devices(self.settings)])
        lines = [f"  {service}: {{ devices: !override {devices} }}" for service in NEURON_SERVICES]
        self.state.mkdir(parents=True, exist_ok=True)
        write_atomically(self.devices_file, "\n".join(["services:", *lines, ""]))
        own = [ROOT / name for name in ("compose.yaml", "compose.override.yaml")]
        return [word for path in (*own, self.devices_file) if path.exists() for word in ("--file", str(path))]

    @property
    def devices_file(self) -> Path:
        return self.state / "neuron.yaml"

    def compose(self, *arguments: str, profile: str | None = None) -> str:
        """Its output; where it fails, the end of what it said is the error."""
        done = subprocess.run(
            self.command(*arguments, profile=profile), env=self.environment, cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise UserError(f"docker compose {arguments[0]} failed:\n" + "\n".join(said[-15:]))
        return done.stdout

    def service(self, program: str) -> str:
        return f"triton-{self.profile}" if program == "triton" else program

    # --- up and down ------------------------------------------------------------------------------------------------

    def running(self) -> bool:
        return bool(self.compose("ps", "--quiet", profile="*").strip())

    def start(self) -> bool:
        preflight.check_device(self.settings, preflight.check_build(self.settings, self.nvidia_image))
        preflight.check_readable(ROOT / "monitoring")
        repository = self.settings.path("MODEL_REPOSITORY")
        if self.environment["TRITON_USER"] != self.environment["HOST_USER"]:
            preflight.check_readable(repository)
        self.build_quietly(self.service("triton"))
        # Another profile's Triton has the ports and the name.
        others = [f"triton-{profile}" for profile in PROFILES if profile != self.profile]
        if self.profile != "neuron":
            others.append("neuron-monitor")
        self.compose("rm", "--stop", "--force", *others, profile="*")
        check_free(self.settings, [name for names in PORTS.values() for name in names], self.published())
        before = self.started_at("triton")
        with err.status("starting"):
            self.compose("up", "--detach", "--remove-orphans")
        same = self.started_at("triton") == before
        if before and not same:
            out.print("settings changed: restarted Triton")
        return bool(before) and same

    def stop(self) -> None:
        self.compose("down", "--remove-orphans", profile="*")

    def clean(self) -> None:
        self.compose("down", "--remove-orphans", "--volumes", profile="*")
        built = preflight.run("docker", "image", "ls", "--quiet", "--filter", "reference=triton-transformers*").stdout
        if images := sorted(set(built.split())):
            preflight.run("docker", "image", "rm", "--force", *images, timeout=None)
        remove_all(self.settings)
        for lock in LOCKS:
            (self.state / lock).unlink(missing_ok=True)
        self.devices_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the local runtime's things are in it, or it is not there
            self.state.rmdir()

    # --- building ---------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """make build: everything this profile needs, with Docker's own progress."""
        preflight.check_build(self.settings, self.nvidia_image)
        if self.settings["TAG"]:
            slim.build(self.settings, self.environment | {"DOCKER_BUILDKIT": "1"})
            return
        services = [self.service("triton"), "loadtest"]
        if self.image_tag != "neuron-inf1":  # nothing is compiled for it
            services.append(self.exporter)
        done = subprocess.run(self.command("build", *services, profile="*"), env=self.environment, cwd=ROOT)
        if done.returncode:
            raise UserError("the build failed; what it said is above")

    def build_quietly(self, service: str) -> None:
        with err.status(f"building the image of {service} (minutes, the first time; `make build` shows more)"):
            self.compose("build", service, profile="*")

    # --- one-shot services ------------------------------------------------------------------------------------------

    def models(self) -> None:
        repository = self.settings.path("MODEL_REPOSITORY").resolve()
        self.state.mkdir(parents=True, exist_ok=True)
        with exclusive(self.state / LOCKS[0], "another `make models` is at work here"):
            if self.settings["LIST"] != "1" and all_in_place(self.settings):
                return
            preflight.check_compose()
            image = "triton-transformers-exporter"
            if self.exporter == "exporter-neuron":
                preflight.check_compiling(self.settings)
                preflight.check_build(self.settings, self.nvidia_image)
                image += ":neuron"
            preflight.warn_of_torch_index(self.settings["TORCH_INDEX"], image)
            if self.settings["SOURCE"] and not self.settings.path("SOURCE").is_dir():
                raise UserError(f"SOURCE={self.settings['SOURCE']}: there is no such folder")
            repository.mkdir(parents=True, exist_ok=True)
            self.build_quietly(self.exporter)
            self.run_service(self.exporter, "another `make models` is at work here")

    def loadtest(self) -> None:
        running = "another comparison is running against this stack"
        with exclusive(self.state / LOCKS[1], running, wait=False):
            self.settings.path("REPORTS").mkdir(parents=True, exist_ok=True)
            self.build_quietly("loadtest")
            if self.workers:
                # They look for the comparison until it is there, and end with it.
                scale = ["--force-recreate", "--scale", f"loadtest-worker={self.workers}", "loadtest-worker"]
                self.compose("up", "--detach", "--no-deps", *scale, profile="*")
            self.run_service("loadtest", running)

    def locust(self) -> None:
        self.build_quietly("loadtest")
        self.run_service("locust", "another `make locust` is running")

    def dashboards(self) -> None:
        self.settings.path("REPORTS").mkdir(parents=True, exist_ok=True)
        self.build_quietly("loadtest")
        self.run_service("dashboards", "another `make dashboards` is at work here")

    def run_service(self, service: str, taken: str) -> None:
        """Show what it says until it ends, and end with its exit code.

        Signals go to the container, and what it says after them is still shown: docker's own attach and compose's run
        leave at the first one.
        """
        record = self.inspect(service)
        if record and record["State"]["Running"]:
            raise UserError(f"{taken}: wait for it, or stop it")
        self.compose("create", "--no-build", "--force-recreate", service, profile="*")
        container = self.inspect(service)["Id"]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _: preflight.run("docker", "kill", "--signal", str(n), container))
        started = preflight.run("docker", "start", container)
        if started.returncode:
            raise UserError(f"{service} did not start: {started.stderr.strip()}")
        # In a session of its own, out of Ctrl-C's reach.
        subprocess.run(["docker", "logs", "--follow", container], start_new_session=True)
        code = preflight.run("docker", "wait", container, timeout=None).stdout.strip()
        if not code:
            raise UserError(f"{service} was removed before it ended")
        sys.exit(int(code))

    # --- looking ----------------------------------------------------------------------------------------------------

    def programs(self) -> list[str]:
        return list(PORTS)

    def inspect(self, program: str) -> dict | None:
        """Docker's record of the program's container; None where it has none."""
        found = self.compose("ps", "--all", "--quiet", self.service(program), profile="*").split()
        if not found:
            return None
        records = json.loads(preflight.run("docker", "inspect", found[0]).stdout or "[]")
        return records[0] if records else None  # gone since

    def published(self) -> set[int]:
        """The ports on this machine that our running containers hold."""
        records = [record for program in self.programs() if (record := self.inspect(program))]
        bindings = [b for record in records for b in record["NetworkSettings"]["Ports"].values() if b]
        return {int(each["HostPort"]) for binding in bindings for each in binding}

    def started_at(self, program: str) -> str:
        record = self.inspect(program)
        return record["State"]["StartedAt"] if record and record["State"]["Running"] else ""

    def process(self, program: str) -> Process:
        record = self.inspect(program)
        if not record:
            return Process("not there", running=False, lost=True, seconds=0, crashes=0)
        state, restarts = record["State"], record["RestartCount"]
        health = state.get("Health", {}).get("Status", "")
        started = datetime.fromisoformat(state["StartedAt"][:19]).replace(tzinfo=UTC)
        return Process(
            state=health if state["Running"] and health not in ("", "healthy") else state["Status"],
            running=state["Running"] and health in ("", "healthy"),
            lost=state["Status"] in ("exited", "dead")
            or (state["Status"] == "restarting" and restarts >= HOPELESS_AFTER),
            seconds=(datetime.now(UTC) - started).total_seconds(),
            crashes=restarts,
        )

    def log_tail(self, program: str, lines: int) -> str:
        return self.compose("logs", "--no-log-prefix", "--no-color", "--tail", str(lines), self.service(program))

    def logs(self, follow: bool) -> None:
        if self.running():
            line = self.command("logs", "--tail", "100", *(["--follow"] if follow else []))
            os.chdir(ROOT)
            os.execvpe(line[0], line, self.environment)
