"""Downloads from the Hugging Face Hub: what a model needs and no more, at one commit, going on after a kill."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from scripts.common.cli import err, out
from scripts.common.settings import Settings, UserError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import HfApi, ModelInfo, RepoSibling

DOWNLOADS = ".downloads"
# At the top, or in a module's folder of sentence-transformers (1_Pooling).
PLACE = r"(\d+_[A-Za-z]+/)?"
# As from_pretrained looks for them: no other precision (model.fp16), no copy in the author's format (consolidated).
WEIGHTS = re.compile(PLACE + r"model(-\d{5}-of-\d{5})?\.safetensors")
DESCRIPTIONS = re.compile(PLACE + r"[^/.][^/]*\.(json|txt|model|tiktoken|jinja)")
CODE = re.compile(r".*\.py")


@contextlib.contextmanager
def downloaded(name: str, revision: str, settings: Settings, place: Path) -> Iterator[tuple[Path, str]]:
    """A folder under `place` with the files, and their commit. It goes when the block ends well, else it stays."""
    api = library(settings["HF_TOKEN"])
    with plain_errors(name, revision, api):
        info = api.model_info(name, revision=revision or None, files_metadata=True)
        files = needed(info, settings.flag("TRUST_REMOTE_CODE"))
        folder = place / DOWNLOADS / f"{name.replace('/', '--')}@{info.sha}"
        check_space(name, files, folder, place)
        fetch(api, info, files, folder)
    yield folder, info.sha
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another's, cut off
        folder.parent.rmdir()


def needed(info: ModelInfo, code: bool) -> list[RepoSibling]:
    kinds = (WEIGHTS, DESCRIPTIONS, CODE) if code else (WEIGHTS, DESCRIPTIONS)
    files = [file for file in info.siblings if any(kind.fullmatch(file.rfilename) for kind in kinds)]
    if not any(WEIGHTS.fullmatch(file.rfilename) for file in files):
        raise UserError(
            f"{info.id} has no safetensors at {info.sha[:12]}, and other formats may run code when they are loaded: "
            "its Community page may have a pull request with them (HF_REVISION=refs/pr/1), or convert it and say SOURCE"
        )
    return files


def library(token: str) -> HfApi:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import logging, reset_sessions

    # It reads the environment once, when it is imported, and a recipe before us may have sent it offline.
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_DISABLE_TELEMETRY = True
    # Over Xet a file that was cut off starts anew.
    constants.HF_HUB_DISABLE_XET = True
    logging.set_verbosity_error()  # each try to reach the Hub is a warning of many lines
    reset_sessions()
    return HfApi(token=token or None)


def check_space(name: str, files: list[RepoSibling], folder: Path, place: Path) -> None:
    missing = sum(file.size or 0 for file in files) - size_on_disk(folder)
    free = shutil.disk_usage(place).free
    if missing > free:
        raise UserError(
            f"{name} is another {decimal(missing)} to download, and the disk of {place} has {decimal(free)} free: "
            "make room there, or say MODEL_REPOSITORY=folder on another disk"
        )


def fetch(api: HfApi, info: ModelInfo, files: list[RepoSibling], folder: Path) -> None:
    had = size_on_disk(folder)
    out.print(
        f"{info.id}: downloading {decimal(sum(file.size or 0 for file in files))}, commit {info.sha[:12]}"
        + (f", {decimal(had)} of it here from before" if had else "")
    )
    # One by one: of several at once, Ctrl-C would wait for each to end.
    for file in files:
        api.hf_hub_download(info.id, file.rfilename, revision=info.sha, local_dir=folder)
    with err.status(f"{info.id}: checking what has arrived"):
        for file in files:
            check_arrived(info.id, file, folder / file.rfilename)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes; without them it goes by the hashes


def check_arrived(name: str, file: RepoSibling, path: Path) -> None:
    with path.open("rb") as content:
        whole = not file.lfs or hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
    if not whole:
        path.unlink()
        raise UserError(f"{name}: {file.rfilename} is not what the Hub says it is, and was removed: run this again")


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def plain_errors(name: str, revision: str, api: HfApi) -> Iterator[None]:
    """The library's errors in a sentence of ours. Theirs are never shown, for they may quote the token."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except OSError as error:  # every one of requests' and of the library's is
        raise UserError(f"{sentence(error, name, revision, api)}; what is in place stays") from None
    except HFValidationError:
        raise UserError(f"HF_MODEL={name}: the Hub's models are called organisation/name") from None


def sentence(error: OSError, name: str, revision: str, api: HfApi) -> str:
    import requests
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    status = error.response.status_code if getattr(error, "response", None) is not None else None
    match error:
        case errors.GatedRepoError():
            return (
                f"{name} is gated: accept its licence on {api.endpoint}/{name}, and set HF_TOKEN in .env "
                "to a token of the account that did"
            )
        case errors.RepositoryNotFoundError():
            private = "HF_TOKEN may not see it" if api.token else "it is private and wants HF_TOKEN in .env"
            return f"{name}: the Hub has no such model, or {private}"
        case errors.RevisionNotFoundError():
            return f"{name} has no revision {revision}: HF_REVISION is a commit, branch or tag of it"
        case _ if status == 401:
            return "the Hub does not accept HF_TOKEN: make a new one (its right to read will do) and set it in .env"
        case _ if status:
            return f"{api.endpoint} answered {status} for {name}: run this again later, and it goes on where it was"
        case requests.exceptions.SSLError():
            return f"{api.endpoint} has a certificate that is not trusted here: REQUESTS_CA_BUNDLE=file says which is"
        case requests.RequestException() | errors.LocalEntryNotFoundError():
            return (
                f"{api.endpoint} cannot be reached for {name}: see to the network, its proxy (https_proxy) or a mirror "
                "(HF_ENDPOINT) and run this again, or say SOURCE=folder"
            )
        case _ if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk is full: make room and run this again, and {name} goes on where it was"
        case _:
            return f"{name} could not be downloaded ({error.strerror or 'incomplete'}): run this again"
