"""Load the systems that the server lacks, as after a crash: docs/triton-faults.md#endless-loads."""

import contextlib
import os
import re
import time
import urllib.error
from pathlib import Path

from serving.watchdog.tritonserver import Triton, log

# How often to load a system whose Python process did not report in time, and Triton's words for that.
ATTEMPTS, NOT_REPORTED = 3, ("is not healthy", "health mutex")
# Names of systems.
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
# The file beside SYSTEMS_FILE that lists what the server is to serve, loaded or not.
REQUESTED = "requested"
# How often to look for a change of the files of a system that did not load.
CHANGE_POLL_S = 2.0


def listed_systems(path: Path) -> list[str] | None:
    """Return the systems that a file lists; None if it is missing or damaged, as kinds.py does."""
    try:
        names = path.read_text(encoding="utf-8").split()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return None
    return names if all(map(NAME.fullmatch, names)) else None


def required_systems() -> list[str]:
    """Return the systems of SYSTEMS_FILE, or those of SYSTEMS without that setting.

    If the file is damaged, return those of the file beside it, which lists what the user asked for.
    """
    if not (file := os.environ.get("SYSTEMS_FILE")):
        return os.environ.get("SYSTEMS", "").split()
    lists = (listed_systems(path) for path in (Path(file), Path(file).with_name(REQUESTED)))
    return next((names for names in lists if names is not None), [])


def load_systems(triton: Triton) -> bool:
    """Load the systems that the server lacks, one after the other, once it answers. Return whether it has all.

    Without SYSTEMS_FILE it loads them itself, but does not try again if a process does not report in time.
    """
    try:
        triton.wait_until_live()
        index = triton.call("/v2/repository/index", {})
    except (OSError, ValueError) as error:
        log(f"could not find the systems to load: {error}")
        return False
    reasons = "\n".join(entry.get("reason", "") for entry in index)
    if not os.environ.get("SYSTEMS_FILE") and not any(text in reasons for text in NOT_REPORTED):
        return True
    ready = {entry["name"] for entry in index if entry.get("state") == "READY"}
    systems = [system for system in required_systems() if system not in ready]
    # A list: each system is tried, also after one that failed.
    return all([load_system(triton, system, f"({n} of {len(systems)})") for n, system in enumerate(systems, 1)])


def load_system(triton: Triton, system: str, progress: str) -> bool:
    """Load a system, and return whether it is loaded."""
    for _ in range(ATTEMPTS):
        try:
            triton.wait_until_live()
            log(f"loading system '{system}' {progress}")
            triton.load(system)
            log(f"system '{system}' is loaded")
            return True
        except OSError as error:
            answer = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
            message = answer or str(error)
            log(f"system '{system}' did not load: {message}")
            if not any(text in message for text in NOT_REPORTED):
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
        if damaged := listed_systems(Path(file)) is None:
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
