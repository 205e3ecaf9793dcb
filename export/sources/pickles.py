"""Convert pickled weights to safetensors, before anything else sees them, in a process that runs no code of theirs."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from export.checkpoint.checkpoint import INDEX, read_json
from triton_transformers.cli import err, out
from triton_transformers.settings import ROOT, Settings, UserError
from triton_transformers.torch_messages import is_out_of_memory, refused_global

if TYPE_CHECKING:
    import torch

# Begins the names of folders in the model repository that a killed run leaves, and the next one deletes.
WORK = ".assembling-"
ADAPTER, PICKLED_INDEX = "adapter_model.bin", "pytorch_model.bin.index.json"
# At the top, or in the folder of a sentence-transformers module: 1_Pooling, or query_0_Dense of a Router.
PLACE = r"((\w+_)?\d+_[A-Za-z]+/){0,2}"
PICKLES = re.compile(
    rf"({PLACE}|vocoder/)pytorch_model(-\d{{5}}-of-\d{{5}})?\.bin|(sparse|colbert)_linear\.pt|"
    rf"(?!(.*/)?checkpoint-\d)([^/.][^/]*/)*{re.escape(ADAPTER)}"
)
SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
# Reading a file may take this much memory, and more by its size: tensors that share memory are written one by one, and
# T5 has its embeddings under four names.
SLACK, COPIES = 1 << 29, 4
SAVE = "choose another model or, if it is yours, save model.state_dict() alone"
SECONDS, BYTES_PER_SECOND = 300, 5_000_000  # of the processor


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
    paths = [path for path in sorted(weights.rglob("*")) if path.is_file() or path.is_symlink()]
    files = [path.relative_to(weights).as_posix() for path in paths]
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
            for file in pickles:
                convert(name, file, weights / file, folder / safe_name(file))
        for index in {(folder / file).with_name(PICKLED_INDEX) for file in pickles if SHARD.search(file)}:
            content = read_json(name, index)
            if isinstance(places := content.get("weight_map"), dict):
                content["weight_map"] = {key: safe_name(str(file)) for key, file in places.items()}
            index.with_name(INDEX).write_text(json.dumps(content))
        more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
        out.print(f"{name}: {pickles[0]}{more} converted to safetensors, tensors only", markup=False)
        yield folder


def convert(name: str, file: str, source: Path, target: Path) -> None:
    """Write a pickle as safetensors, in a process of its own. Raise UserError if it is not what transformers reads."""
    done = run_apart(source, target)
    if done.stdout:
        raise UserError(f"{name}: {file} {done.stdout}")
    if done.returncode:
        raise UserError(
            f"{name}: the process that converts {file} ended with {done.returncode}: make room in memory and on "
            "the disk, or choose another model"
        )


def run_apart(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "export.sources.pickles", str(source), str(target)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# --- in the process of its own ----------------------------------------------------------------------------------------


class UnreadableError(Exception):
    """A file that PyTorch reads, but not as transformers does. The message completes a sentence about the file."""


def main(source: Path, target: Path) -> None:
    """Write the tensors of a file as safetensors, or print why not."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)  # each thread would reserve memory
    limit(source.stat().st_size)
    try:
        tensors = read(source)
    except Exception as error:  # a damaged file makes torch raise anything
        print(reason(error), end="")
    else:
        save_file(tensors, target, metadata={"format": "pt"})


def limit(size: int) -> None:
    """Let this process take the memory and time that a file of this size explains, and no more memory than is free."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) * 1024
    # The file itself is mapped, and needs no memory.
    most = used + size + min(COPIES * size + SLACK, free)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + size // BYTES_PER_SECOND,) * 2)


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, without what else its top level may have, such as a count of steps."""
    import torch

    with path.open("rb") as content:
        start = content.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise UnreadableError("is a pointer of Git LFS instead of the file: download the file")
    is_zip = start.startswith(b"PK\3\4")
    if is_zip and any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(path).infolist()):
        # A mapped file is read as it is stored.
        raise UnreadableError(f"is compressed, or a program of TorchScript: {SAVE}")
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    tensors, memories = {}, set()
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            tensor, memory = value.detach(), value.untyped_storage().data_ptr()
            # safetensors takes no two tensors of one memory. Which of them a model ties again, only the model knows.
            shared = memory in memories or not tensor.is_contiguous()
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor
            memories.add(memory)
    if not tensors:
        raise UnreadableError(f"has no tensors by name at its top level, where transformers reads them: {SAVE}")
    return tensors


def reason(error: Exception) -> str:
    """Return why a file is not read, as the end of a sentence about it."""
    if isinstance(error, UnreadableError):
        return str(error)
    if code := refused_global(str(error)):
        return f"holds code ({code}), which was not run: {SAVE}"
    if isinstance(error, MemoryError) or is_out_of_memory(str(error)):
        return "takes more memory than its size explains, or than is free: choose another model"
    kind = type(error).__name__
    return f"is damaged, or holds more than tensors, and nothing of it was run ({kind}): download it again, or {SAVE}"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
