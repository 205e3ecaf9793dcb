"""Write pickled weights as safetensors: `python -m triton_transformers.models.unpickle FILE TARGET ...`.

PyTorch reads the files with `weights_only`, which runs no code of theirs. This is a process of its own, so that a file
can neither take more memory than its size explains, nor leave anything behind in the process that exports the model.
"""

from __future__ import annotations

import re
import resource
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

SLACK = 1 << 29  # bytes that reading any file may take
# Tensors that share memory are written one by one. T5 has its embeddings under four names.
COPIES = 4


class UnreadableError(Exception):
    """A file that is read, but is not what transformers reads. The message completes a sentence about the file."""


def main(paths: list[str]) -> None:
    """Write each file to the target that follows it. Print the first that cannot be read, and the reason."""
    torch.set_num_threads(1)  # each thread would reserve memory
    for source, target in zip(paths[::2], paths[1::2], strict=True):
        try:
            limit_memory(Path(source).stat().st_size)
            save_file(read(Path(source)), target, metadata={"format": "pt"})
        except Exception as error:  # a damaged file makes torch raise anything
            print(source, reason(error), sep="\n")
            return


def limit_memory(size: int) -> None:
    """Let this process take what a file of this size explains, and no more than is free."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) * 1024
    # The file itself is mapped, and needs no memory.
    limit = used + size + min(COPIES * size + SLACK, free)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, without what else its top level may have, such as a count of steps."""
    with path.open("rb") as content:
        start = content.read(64)
    if start.startswith(b"version https://git-lfs"):
        raise UnreadableError("is a pointer of Git LFS instead of the file")
    is_zip = start.startswith(b"PK\3\4")
    if is_zip and any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(path).infolist()):
        raise UnreadableError("is compressed, or a program of TorchScript")  # a mapped file is read as it is stored
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
        raise UnreadableError("has no tensors by name at its top level, where transformers reads them")
    return tensors


def reason(error: Exception) -> str:
    """Return why a file is not read, as the end of a sentence about it."""
    if isinstance(error, UnreadableError):
        return str(error)
    if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"holds code ({code[1]}), which was not run"
    if isinstance(error, MemoryError) or "memory" in str(error):
        return "takes more memory than its size explains, or than is free"
    return f"is damaged, or holds more than tensors, and nothing of it was run ({type(error).__name__})"


if __name__ == "__main__":
    main(sys.argv[1:])
