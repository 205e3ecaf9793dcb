"""Load the systems that the server lacks, as after a crash: TRITON-FAULTS.md#endless-loads."""

import contextlib
import os
import time
from pathlib import Path

from serving.watchdog.tritonserver import TIMEOUT_S, log
from triton_transformers.protocol import REQUESTED
from triton_transformers.tasks.kinds import listed_names
from triton_transformers.triton import Triton, TritonError
from triton_transformers.triton_messages import is_unreported

# How often to load a system whose Python process did not report in time.
ATTEMPTS = 3
# How often to look for a change of the files of a system that did not load.
CHANGE_POLL_S = 2.0


def required_systems() -> list[str]:
    """Return the systems of SYSTEMS_FILE, or those of SYSTEMS without that setting.

    If the file is damaged, return those of the file beside it, which lists what the user asked for.
    """
    if not (file := os.environ.get("SYSTEMS_FILE")):
        return os.environ.get("SYSTEMS", "").split()
    lists = (listed_names(path) for path in (Path(file), Path(file).with_name(REQUESTED)))
    return next((names for names in lists if names is not None), [])


def wait_until_live(triton: Triton) -> None:
    while not triton.live():
        time.sleep(0.2)


def load_systems(triton: Triton) -> bool:
    """Load the systems that the server lacks, one after the other, once it answers. Return whether it has all.

    Without SYSTEMS_FILE it loads them itself, but does not try again if a process does not report in time.
    """
    try:
        wait_until_live(triton)
        index = triton.index()
    except TritonError as error:
        log(f"could not find the systems to load: {error}")
        return False
    if not os.environ.get("SYSTEMS_FILE") and not any(is_unreported(reason) for _, reason in index.values()):
        return True
    systems = [system for system in required_systems() if index.get(system, ("",))[0] != "READY"]
    # A list: each system is tried, also after one that failed.
    return all([load_system(triton, system, f"({n} of {len(systems)})") for n, system in enumerate(systems, 1)])


def load_system(triton: Triton, system: str, progress: str) -> bool:
    """Load a system, and return whether it is loaded."""
    for _ in range(ATTEMPTS):
        try:
            wait_until_live(triton)
            log(f"loading system '{system}' {progress}")
            triton.load(system, timeout=TIMEOUT_S)
            log(f"system '{system}' is loaded")
            return True
        except TritonError as error:
            log(f"system '{system}' did not load: {error}")
            if not is_unreported(str(error)):
                break
    return False


def keep_loading(triton: Triton) -> None:
    """Load the systems. If one does not load, or their list is damaged, try again after each change of a file.

    So a config.pbtxt that is restored by hand needs no command. Without SYSTEMS_FILE, try once.
    """
    if not (file := os.environ.get("SYSTEMS_FILE")):
        load_systems(triton)
        return
    while True:
        before = versions_of_files()
        loaded = load_systems(triton)
        if damaged := listed_names(Path(file)) is None:
            log(f"{file} is missing or damaged. `make up` writes it again")
        if loaded and not damaged:
            return
        log("waiting until a file of the systems changes")
        wait_for_change(before)


def wait_for_change(before: dict[str, tuple[int, int]]) -> None:
    """Wait until files differ from their versions before, and are no longer being written."""
    last = before
    while (now := versions_of_files()) == before or now != last:
        last = now
        time.sleep(CHANGE_POLL_S)


def versions_of_files() -> dict[str, tuple[int, int]]:
    """Return the time of the last change, and the size, of the list of systems and of the files of models."""
    repository = Path(os.environ.get("MODEL_REPOSITORY", "/models"))
    versions = {}
    for file in (Path(os.environ["SYSTEMS_FILE"]), *repository.glob("*/*"), *repository.glob("*/*/*")):
        with contextlib.suppress(OSError):  # it was deleted meanwhile
            state = file.stat()
            versions[str(file)] = state.st_mtime_ns, state.st_size
    return versions
