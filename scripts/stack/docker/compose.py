"""Docker Compose, as the stack calls it: the settings fill in compose.yaml through the environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from export.added_adapters import requested_adapters
from export.backends import engines, needed
from export.drafts import Draft, requested_draft
from export.sources.source import Folder, Source, place
from scripts.stack.base import certificate
from scripts.stack.docker import preflight, slim
from scripts.stack.docker.containers import CHECKOUT_ID
from scripts.stack.systems import ServedSystems
from triton_transformers.engines import VLLM, TextEngine
from triton_transformers.files import write_atomically
from triton_transformers.settings import ROOT, Settings, UserError, pins

PROXIES = ("http_proxy", "https_proxy", "no_proxy")
# The services that get the Neuron devices.
NEURON_SERVICES = ("triton-neuron", "neuron-monitor", "exporter-neuron")


@dataclass
class Compose:
    """The command `docker compose` with files, profile and environment made of the settings."""

    settings: Settings
    # The tag of the image that Triton runs in. If that holds more than SYSTEMS need, it stays: removing a system must
    # not restart Triton.
    running: str = ""

    @cached_property
    def neuron_target(self) -> str:
        """Return the target of Dockerfile.neuron; Inf1 needs other software than its successors."""
        return "neuron-inf1" if self.settings.neuron_chip == "inf1" else "neuron"

    @cached_property
    def engines(self) -> set[TextEngine]:
        """Return the engines that continue the texts of SYSTEMS."""
        return engines(self.settings.systems, self.settings.model_repository, self.settings.profile)

    @cached_property
    def cuda_target(self) -> str:
        """Return the target of Dockerfile.nvidia for PROFILE=cuda."""
        kept = self.running if self.running == VLLM.image else ""
        return (self.settings.profile == "cuda" and (slim.image_of(self.engines) or kept)) or "cuda"

    @property
    def nvidia_image(self) -> str:
        if self.cuda_target == VLLM.image:
            return pins()["TRITON_VLLM_IMAGE"]
        inf1 = self.settings.profile == "neuron" and self.neuron_target == "neuron-inf1"
        return pins()["TRITON_INF1_IMAGE" if inf1 else "TRITON_IMAGE"]

    @cached_property
    def triton_source(self) -> str:
        if self.settings.triton_source:
            return self.settings.triton_source
        backends = needed(self.settings.systems, self.settings.model_repository, self.settings.profile)
        torch = slim.needs_torch(backends, self.engines) or self.running == "cpu-pypi-transformers"
        return "pypi-transformers" if torch else "pypi"

    @property
    def image_tag(self) -> str:
        tags = {"cpu": f"cpu-{self.triton_source}", "cuda": self.cuda_target, "neuron": self.neuron_target}
        return tags[self.settings.profile]

    @cached_property
    def engine(self) -> dict:
        return preflight.check_engine()

    @cached_property
    def environment(self) -> dict[str, str]:
        """Return the variables that compose.yaml refers to."""
        # The root of a rootless engine is the user who started the engine.
        rootless = any("rootless" in option for option in self.engine.get("SecurityOptions") or [])
        user = "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"
        return {
            **pins(),
            **os.environ,
            **{name: os.environ.get(name) or os.environ.get(name.upper(), "") for name in PROXIES},
            **self.settings,
            # self.settings already holds the values of .env; in tests compose would read the developer's.
            "COMPOSE_DISABLE_ENV_FILE": "1",
            **{name: str(self.settings.value(name).resolve()) for name in ("MODEL_REPOSITORY", "REPORTS")},
            "SOURCE": str(self.settings.source.resolve()) if self.settings.source else "",
            "ADAPTERS": " ".join(f"{name}={place(source)}" for name, source in self.adapters.items()),
            "DRAFT": self.settings.draft if isinstance(self.draft, str) else place(self.draft),
            "TRITON_SOURCE": self.triton_source,
            "TRITON_BASE": slim.base(self.settings.profile, self.triton_source),
            "TRITON_IMAGE": self.nvidia_image,
            "TRITON_IMAGE_BUILT": f"{self.settings.compose_project_name}:{self.image_tag}",
            "NEURON_TARGET": self.neuron_target,
            "CUDA_TARGET": self.cuda_target,
            **dict(zip(("TLS_CERT", "TLS_KEY"), map(str, self.settings.tls() or ()), strict=False)),
            "SHOWN_REPORTS": str(self.settings.reports.resolve()),
            "CERTIFICATE": certificate(self.settings),
            **{name: self.build_secret(name) for name in ("BUILD_PIP_CONF", "BUILD_CA")},
            "BIND_ADDRESS": str(self.settings.bind_address),
            "CHECKOUT": str(ROOT),
            "CHECKOUT_ID": CHECKOUT_ID,
            # Triton gets its systems from a file in this folder, so that a change does not make another container.
            "SERVING": str(ServedSystems(self.settings.local_state.absolute()).folder),
            "SERVED_AT_START": "",
            "TRACES": str(folder.absolute()) if (folder := self.settings.traces()) else "/dev/null",
            "HOST_USER": user,
            # Triton writes no files of the user, so it never runs as root.
            "TRITON_USER": user if os.getuid() else "1000:1000",
            "TRITON_IPC": "host" if self.settings.shares_memory() else "private",
            "TTY": "true" if sys.stdout.isatty() else "false",
            "COLUMNS": str(shutil.get_terminal_size().columns),
            "LOADTEST_BIND": "0.0.0.0:5557" if self.settings.workers else "",
            # With attestations, newer engines make a new image of an unchanged build, and Triton would restart.
            "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
            # Compose grants the build access to its contexts, but forgets the secrets.
            "BUILDX_BAKE_ENTITLEMENTS_FS": "0",
        }

    def build_secret(self, name: str) -> str:
        path = self.settings.value(name)
        if not path:
            return "/dev/null"
        if not path.is_file():
            raise UserError(f"{name}={self.settings[name]}: there is no such file")
        return str(path)

    @cached_property
    def adapters(self) -> dict[str, Source | None]:
        return requested_adapters(self.settings)

    @cached_property
    def draft(self) -> Draft:
        return requested_draft(self.settings, None)

    @property
    def written_file(self) -> Path:
        return self.settings.local_state.absolute() / "compose.yaml"

    @cached_property
    def files(self) -> list[str]:
        """Return the options that name the compose files, none if compose's own choice is right.

        Compose has no loops, so a written file lists as many devices as NEURON_DEVICES, and the folders of ADAPTERS
        and DRAFT.
        """
        lines = []
        if self.settings.profile == "neuron":
            devices = json.dumps([f"{device}:{device}" for device in preflight.neuron_devices(self.settings)])
            lines = [f"  {service}: {{ devices: !override {devices} }}" for service in NEURON_SERVICES]
        sources = [*self.adapters.values(), self.draft]
        folders = [source.path for source in sources if isinstance(source, Folder)]
        if mounts := [f"{folder}:{folder}:ro" for folder in folders]:
            lines.append(f"  exporter: {{ volumes: {json.dumps(mounts)} }}")
        if not lines:
            return []
        self.written_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.written_file, "\n".join(["services:", *lines, ""]))
        paths = [ROOT / "compose.yaml", ROOT / "compose.override.yaml", self.written_file]
        return [word for path in paths if path.exists() for word in ("--file", str(path))]

    def command(self, *arguments: str, profile: str | None = None) -> list[str]:
        profiles = [
            "--profile",
            profile or self.settings.profile,
            *(["--profile", "traces"] if self.settings.traces() else []),
        ]
        return ["docker", "compose", "--project-directory", str(ROOT), *self.files, *profiles, *arguments]

    def run(self, *arguments: str, profile: str | None = None) -> str:
        """Return the output of a command. Raise with the end of its messages if it fails."""
        done = subprocess.run(
            self.command(*arguments, profile=profile),
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,  # newer releases ask questions, such as whether to recreate a volume
            capture_output=True,
            text=True,
        )
        if done.returncode:
            messages = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise UserError(f"docker compose {arguments[0]} failed:\n" + "\n".join(messages[-15:]))
        return done.stdout
