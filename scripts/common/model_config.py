"""Which models of a repository belong together, as their config.pbtxt say."""

from __future__ import annotations

import re
from pathlib import Path

COMMENT = re.compile(r"#.*")
STEP = re.compile(r"""\bmodel_name\s*:\s*["']([^"']+)""")


def with_steps(model: str, *repositories: Path) -> list[str]:
    """The model, and where it is an ensemble those that it asks, and so on."""
    found = [model]
    for each in found:  # which grows
        found += [step for step in steps(each, repositories) if step not in found]
    return found


def steps(model: str, repositories: tuple[Path, ...]) -> list[str]:
    """By name alone: Triton's schema, which would read the whole config, is not on every machine that packs a model."""
    config = config_of(model, *repositories)
    return list(dict.fromkeys(STEP.findall(COMMENT.sub("", config.read_text())))) if config else []


def config_of(model: str, *repositories: Path) -> Path | None:
    """In the first repository that has one."""
    paths = (repository / model / "config.pbtxt" for repository in repositories)
    return next((path for path in paths if path.is_file()), None)
