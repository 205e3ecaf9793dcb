"""Wait until the model repository has all systems of SYSTEMS, while `make models` fills it elsewhere.

Kubernetes runs this before Triton (deploy/kubernetes/base/models.yaml). Only the standard library: it runs in every
image.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

POLL_S = 1.0


def missing(system: str, repository: Path) -> str:
    """Return what the repository lacks of a system; empty if it is complete (export/record.py)."""
    record = repository / system / "1/assembled.json"
    try:
        content = json.loads(record.read_text())
    except (OSError, ValueError):
        return str(record)
    if content["recipe"] == "unfinished":
        return f"the export that {record} lists as unfinished"
    return next((str(repository / file) for file in content["files"] if not (repository / file).exists()), "")


def main() -> None:
    repository = Path(os.environ.get("MODEL_REPOSITORY", "/models"))
    for system in os.environ["SYSTEMS"].split():
        reported = ""
        while lacking := missing(system, repository):
            if lacking != reported:
                print(f"waiting for {lacking}, which the Job `models` writes: see its log", flush=True)
                reported = lacking
            time.sleep(POLL_S)
        print(f"system '{system}' is complete", flush=True)


if __name__ == "__main__":
    main()
