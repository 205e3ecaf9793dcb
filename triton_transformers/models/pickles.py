"""Convert weights that PyTorch pickled to safetensors, before anything else sees them: ALLOW_PICKLES."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.filesize import decimal
from rich.markup import escape

from triton_transformers.cli import err, out
from triton_transformers.models.adapters import WEIGHTS as ADAPTER_WEIGHTS
from triton_transformers.models.adapters import in_folders
from triton_transformers.models.tasks import HEADS, PLACE, VOCODER
from triton_transformers.models.unsupported import INDEX, read_json
from triton_transformers.settings import ROOT, Settings, UserError

# Begins the names of folders in the model repository that a killed run leaves, and the next one deletes.
WORK = ".assembling-"
ADAPTER = f"{Path(ADAPTER_WEIGHTS).stem}.bin"
PICKLES = re.compile(
    "|".join(
        (
            rf"({PLACE}|{VOCODER}/)pytorch_model(-\d{{5}}-of-\d{{5}})?\.bin",
            *(re.escape(f"{Path(head).stem}.pt") for head in HEADS),
            re.escape(ADAPTER),
            in_folders(ADAPTER),
        )
    )
)
PICKLED_INDEX = "pytorch_model.bin.index.json"
SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
SECONDS, BYTES_PER_SECOND = 300, 5_000_000  # how long reading may take, also from a slow disk


def pickles_of(files: Iterable[str]) -> list[str]:
    """Return the pickled weights among the files of a model or an adapter, unless safetensors have the same weights."""
    names = sorted(files)
    whole = {SHARD.sub("", name) for name in names if name.endswith(".safetensors") or not SHARD.search(name)}
    return [
        name
        for name in names
        if PICKLES.fullmatch(name)
        and SHARD.sub("", safe_name(name)) not in whole
        and not (SHARD.search(name) and SHARD.sub("", name) in whole)
    ]


def safe_name(pickle: str) -> str:
    """Return the name that the same weights have as safetensors."""
    return re.sub(r"(pytorch_)?([^/]*)\.(bin|pt)$", r"\2.safetensors", pickle)


@contextlib.contextmanager
def as_safetensors(name: str, weights: Path, settings: Settings, repository: Path) -> Iterator[Path]:
    """Yield a folder with the same weights as safetensors: this one, or a new one with links to the other files."""
    files = [path.relative_to(weights).as_posix() for path in sorted(weights.rglob("*")) if path.is_file()]
    if not (pickles := pickles_of(files)):
        yield weights
        return
    if not settings.allow_pickles:
        raise UserError(
            f"{name} has no {safe_name(pickles[0])}, and its {pickles[0]} is not read, because other formats can run "
            "code or need other libraries (ALLOW_PICKLES=0). To convert a model that you trust: load it with "
            "from_pretrained(folder), then call save_pretrained(another_folder)"
        )
    with tempfile.TemporaryDirectory(dir=repository, prefix=WORK) as work:
        folder = Path(work)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            if file not in pickles:
                (folder / file).symlink_to((weights / file).resolve())
        with err.status(f"{escape(name)}: converting {pickles[0]} to safetensors"):
            convert(name, weights, folder, pickles)
        more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
        out.print(f"{name}: {pickles[0]}{more} converted to safetensors; only tensors were read", markup=False)
        yield folder


def convert(name: str, weights: Path, folder: Path, pickles: list[str]) -> None:
    """Write the pickles of `weights` as safetensors into the folder. Raise UserError if one holds more than tensors."""
    size = sum((weights / file).stat().st_size for file in pickles)
    if size > (free := shutil.disk_usage(folder).free):
        raise UserError(
            f"{name}: its weights take {decimal(size)} as safetensors, but the disk of {folder.parent} has only "
            f"{decimal(free)} free. Make room there, or set MODEL_REPOSITORY to a folder on another disk"
        )
    paths = [str(path) for file in pickles for path in (weights / file, folder / safe_name(file))]
    command = [sys.executable, "-m", "triton_transformers.models.unpickle", *paths]
    seconds = SECONDS + size // BYTES_PER_SECOND
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"{name}: reading {pickles[0]} took more than {seconds} s: choose another model") from None
    if done.stdout:
        file, reason = done.stdout.splitlines()
        raise UserError(
            f"{name}: {Path(file).relative_to(weights)} {reason}: download it again, or choose another model"
        )
    if done.returncode:
        raise UserError(
            f"{name}: the process that reads {pickles[0]} ended with {done.returncode}, perhaps because the memory was "
            "full: make room, or choose another model"
        )
    for place in {(folder / file).parent for file in pickles if SHARD.search(file)}:
        index = read_json(name, place / PICKLED_INDEX)
        if isinstance(files := index.get("weight_map"), dict):
            index["weight_map"] = {key: safe_name(str(file)) for key, file in files.items()}
        (place / INDEX).write_text(json.dumps(index))
