"""Load and unload systems on the running server through model control, and keep the list of those that it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from triton_transformers.cli import err, out
from triton_transformers.files import write_atomically
from triton_transformers.protocol import REQUESTED
from triton_transformers.settings import UserError
from triton_transformers.tasks.kinds import listed_names
from triton_transformers.triton import TimedOutError, Triton, TritonError
from triton_transformers.triton_messages import is_full_memory, is_unreadable_model, is_unreported, polling_error

# How often to load a model whose Python process did not report to Triton in time.
ATTEMPTS = 3


class StillLoadingError(UserError):
    """Triton is still loading a system when the command stops waiting for it."""


class ServedSystems:
    """The file that lists the systems of the running server. After a crash, the watchdog loads them again.

    A second file lists what was requested: those systems, and others that are not loaded yet or failed to load. The
    gateway reads it. A third one lists the systems whose load began and was not seen to end, because the command was
    interrupted.
    """

    def __init__(self, state: Path) -> None:
        self.folder = state / "serving"
        self.path = self.folder / "systems"
        self.requested_path = self.folder / REQUESTED
        self.unfinished_path = self.folder / "unfinished"
        self.files = (self.path, self.requested_path, self.unfinished_path)
        # The local runtime's TRITON_ENGINE_CACHE.
        self.engines = self.folder / "engines"

    def read(self) -> list[str] | None:
        """Return the systems of the running server; None if the list is missing or damaged."""
        return listed_names(self.path)

    def requested(self) -> list[str] | None:
        """Return the systems that the server is to serve; None if the list is missing or damaged."""
        return listed_names(self.requested_path)

    def damaged(self) -> list[Path]:
        """Return the lists that are missing or damaged."""
        return [path for path in (self.path, self.requested_path) if listed_names(path) is None]

    def unfinished(self) -> list[str]:
        return listed_names(self.unfinished_path) or []

    def begin(self, system: str) -> None:
        """Note that the load of a system begins."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_names(self.unfinished_path, [*self.unfinished(), system])

    def end(self, systems: Collection[str]) -> None:
        """Note that no load of these systems goes on."""
        if not set(systems).isdisjoint(unfinished := self.unfinished()):
            _write_names(self.unfinished_path, [name for name in unfinished if name not in systems])

    def write(self, systems: Iterable[str]) -> None:
        self._write(self.path, systems)

    def request(self, systems: Iterable[str]) -> None:
        """List the systems that the server is to serve."""
        self._write(self.requested_path, systems)

    def _write(self, path: Path, systems: Iterable[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_names(path, systems)
        # The containers run as another user, whatever the umask is.
        self.folder.chmod(0o755)
        path.chmod(0o644)


def _write_names(path: Path, names: Iterable[str]) -> None:
    write_atomically(path, "".join(f"{name}\n" for name in dict.fromkeys(names)))


@dataclass
class ModelControl:
    """The systems of a running server: load, refresh and unload them."""

    triton: Triton
    served: ServedSystems
    repository: Path
    timeout: int  # seconds for each system
    log: Callable[[], str]  # the end of Triton's log
    wait_until_live: Callable[[], None]
    full_memory: Callable[[], str]  # what fills the memory that Triton shares with its Python processes, and the remedy
    # Returns the models of a system on disk, an ensemble before its steps. Raises UserError for a wrong configuration.
    assembled: Callable[[str], list[str]]
    cause: Callable[[], str] = str  # of the server's last crash, if it is known

    def listed(self) -> list[str]:
        """Return the systems of the running server; if their list is missing or damaged, those that Triton has loaded.

        A list of names that are no models is damaged too.
        """
        names = self.served.read()
        if names is None or not all((self.repository / name).is_dir() for name in names):
            return self._loaded()
        return names

    def _loaded(self) -> list[str]:
        """Return the loaded models that are no steps of others; none if Triton does not answer."""
        try:
            models = [model for model, (state, _) in self.triton.index().items() if state == "READY"]
            steps = {step for model in models for step in self._models(model)[1:]}
        except TritonError:
            return []
        return [model for model in models if model not in steps]

    def serve(self, systems: list[str], refresh: Collection[str]) -> None:
        """Load each system, one after the other; refresh some of those that are loaded. Raise UserError at the end.

        So each answers while the next one loads, and a model that fails does not keep the others from loading.
        """
        errors = []
        for number, system in enumerate(systems, 1):
            progress = f" ({number} of {len(systems)})" if len(systems) > 1 else ""
            try:
                if self.triton.index().get(system, ("", ""))[0] == "READY":
                    if system in refresh:
                        with err.status(f"{system}: loading what changed{progress}"):
                            self._refresh(system)
                else:
                    start = time.monotonic()
                    self.served.begin(system)
                    with err.status(f"{system}: loading{progress}"):
                        try:
                            self.assembled(system)  # Triton names neither the file nor the line
                        except UserError as error:
                            raise UserError(f"{system} did not load: {error}") from None
                        try:
                            self._load(system, system)
                        except KeyboardInterrupt:
                            err.print(f"{system}: Triton goes on loading it. Repeat the command to serve it")
                            raise
                    out.print(f"{system}: loaded in {time.monotonic() - start:.1f} s{progress}")
            except StillLoadingError as error:
                errors.append(str(error))
            except UserError as error:
                errors.append(str(error))
                self.served.end([system])
            else:
                self.served.write([*self.listed(), system])
                self.served.end([system])
        if errors:
            raise UserError("\n".join(errors))

    def unload(self, systems: Iterable[str]) -> None:
        """Unload the systems with all their models, except models that another served system runs too."""
        systems = list(systems)
        for system in set(systems).intersection(self.served.unfinished()):
            self._wait_for_load(system)
        stay = [system for system in self.listed() if system not in systems]
        # Write the list first: after a crash from here on, the watchdog must not load them again.
        self.served.write(stay)
        requested = self.served.requested() or self.served.read() or []
        self.served.request(name for name in requested if name not in systems)
        used = {model for system in stay for model in self._models(system)}
        for system in systems:
            models = self._models(system)
            for model in models:
                if model not in used:
                    self.triton.unload(model)
            if models:
                out.print(f"{system}: unloaded")
        self.served.end(systems)

    def _wait_for_load(self, system: str) -> None:
        """Wait until a load ends that an interrupted command began: Triton lets a second one wait for the first."""
        if any(state == "LOADING" for state, _ in self.triton.index().values()):
            try:
                with err.status(f"{system}: waiting for a load that an interrupted command began"):
                    self.triton.load(system, timeout=self.timeout)
            except TimedOutError:
                raise self._still_loading(system) from None
            except TritonError as error:
                if error.status is None:
                    raise

    def _still_loading(self, system: str) -> StillLoadingError:
        """Return the error for a load that takes longer than READY_TIMEOUT. Name what Triton is loading."""
        try:
            index = self.triton.index()
        except TritonError:
            index = {}
        models = ", ".join(sorted(model for model, (state, _) in index.items() if state == "LOADING"))
        return StillLoadingError(
            f"{system} is not loaded within READY_TIMEOUT={self.timeout}: Triton goes on loading {models or system}. "
            "`make status` shows when it is ready, `make logs` what it does"
        )

    def _models(self, system: str) -> list[str]:
        """Return the system's loaded models, an ensemble before its steps; none if it is not loaded."""
        try:
            return list(self.triton.composing(system))
        except TritonError as error:
            if error.status is None:
                raise
            return []

    def _refresh(self, system: str) -> None:
        """Load the models of a loaded system again; Triton reloads only those whose config.pbtxt or weights changed.

        Load the steps of an ensemble one by one: loading the ensemble reloads them too, but does not report when one
        of them fails.
        """
        loaded, assembled = list(self.triton.composing(system)), self.assembled(system)
        for model in reversed(assembled):
            self._load(model, system, ", the previous version stays loaded")
        dropped = [model for model in loaded if model not in assembled]
        used = {model for other in self.listed() for model in self._models(other)} if dropped else ()
        for model in dropped:
            if model not in used:
                self.triton.unload(model)

    def _load(self, model: str, system: str, consequence: str = "") -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self.triton.load(model, timeout=self.timeout)
            except TimedOutError:
                raise self._still_loading(system) from None
            except TritonError as error:
                repeatable = attempt < ATTEMPTS
                if repeatable and error.status is None:
                    err.print(f"[yellow]{system}:[/] the server crashed and is restarted. Loading the system again")
                    self.wait_until_live()
                    continue
                if repeatable and is_unreported(str(error)):
                    # The watchdog ends such a process.
                    late = f"a process of model '{model}' did not report to Triton in time"
                    err.print(f"[yellow]{system}:[/] {late}. Loading the system again")
                    continue
                reason = str(error)
                if is_unreadable_model(reason):
                    reason += f" ({polling_error(self.log(), model) or '`make logs` shows why'})"
                elif is_full_memory(reason):
                    reason = self.full_memory()
                elif error.status is None:
                    reason = self.cause() or reason
                raise UserError(f"model '{model}' did not load{consequence}: {reason}") from None
