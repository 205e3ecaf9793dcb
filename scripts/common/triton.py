"""A small client for what the commands ask of Triton's HTTP API: readiness, the repository, model control."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from scripts.common.http import answers, opener

ADMIN_HEADER = "triton-admin-key"
# The parameter of models that have accelerator cores which no other process may have: AWS Neuron's.
CORES = "NEURON_CORE_START_INDEX"
UNLOAD_S = 60


class TritonError(Exception):
    """What Triton answered, or why it did not."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def reason(text: str) -> str:
    """Triton's message without the Python stack that its Python backend appends."""
    return re.sub(r"\s*At:\n.*?(\n\s*;|$)", "", text, flags=re.DOTALL).strip().rstrip(";").strip()


class Triton:
    def __init__(self, url: str, admin_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.admin_key = admin_key

    @property
    def name(self) -> str:
        """Its address as part of a file name."""
        return re.sub(r"\W+", "-", self.url.partition("://")[2])

    def live(self) -> bool:
        return answers(f"{self.url}/v2/health/live")

    def metadata(self) -> dict:
        return self._call("/v2")

    def index(self) -> dict[str, tuple[str, str]]:
        """model -> (state, reason) of its newest version, of every model that was ever asked for."""
        entries = self._call("/v2/repository/index", {})
        return {e["name"]: (e["state"], e.get("reason", "")) for e in entries if "state" in e}

    def config(self, model: str) -> dict:
        return self._call(f"/v2/models/{model}/config")

    def load(self, model: str, config: dict | None = None) -> None:
        """Load or reload; with a config, that one instead of the model's config.pbtxt.

        Triton loads the new one beside the old. Where the old one has its cores to itself, that fails: it goes first.
        """
        try:
            self._load(model, config)
        except TritonError as error:
            before = self._with_cores(model) if error.status else None
            if not before:
                raise
            self.unload(model)
            try:
                self._load(model, config)
            except TritonError:
                self._load(model, before)
                raise

    def unload(self, model: str) -> None:
        """Until it is gone; ensembles that ask it are gone until it is back."""
        self._call(f"/v2/repository/models/{model}/unload", {})
        deadline = time.monotonic() + UNLOAD_S
        while self.index().get(model, ("", ""))[0] == "UNLOADING":
            if time.monotonic() > deadline:
                raise TritonError(f"'{model}' is not unloaded within {UNLOAD_S} s: requests are still going on")
            time.sleep(0.1)

    def _load(self, model: str, config: dict | None) -> None:
        parameters = {} if config is None else {"config": json.dumps(config)}
        self._call(f"/v2/repository/models/{model}/load", {"parameters": parameters}, timeout=600)

    def _with_cores(self, model: str) -> dict | None:
        """Its configuration, if it is loaded and has cores of its own."""
        try:
            config = self.config(model)
        except TritonError:
            return None
        return config if CORES in config.get("parameters", {}) else None

    def composing(self, system: str) -> dict[str, dict]:
        """name -> configuration of the system and of all that it is made of, the ensemble before its steps."""
        config = self.config(system)
        found = {system: config}
        for step in config.get("ensemble_scheduling", {}).get("step", []):
            if step["model_name"] not in found:
                found |= self.composing(step["model_name"])
        return found

    def statistics(self) -> dict[str, dict]:
        return {entry["name"]: entry for entry in self._call("/v2/models/stats")["model_stats"]}

    def infer(self, model: str, request: dict, timeout: float = 30) -> dict:
        return self._call(f"/v2/models/{model}/infer", request, timeout)

    def stream(self, model: str, fields: dict) -> list[dict]:
        """What a model that answers piece by piece says, all of it."""
        events = self._call(f"/v2/models/{model}/generate_stream", fields, read=bytes.decode)
        return [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]

    def _call(self, path: str, body: Any = None, timeout: float = 30, read: Callable[[bytes], Any] = json.loads) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={ADMIN_HEADER: self.admin_key})
        try:
            with opener.open(request, timeout=timeout) as response:
                return read(response.read() or b"null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                text = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                text = text or error.reason
            raise TritonError(reason(str(text)), error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise TritonError(f"{self.url} does not answer: {getattr(error, 'reason', error)}") from None
        except ValueError:
            raise TritonError(f"{self.url} is not a Triton server: it answered {path} with something else") from None
