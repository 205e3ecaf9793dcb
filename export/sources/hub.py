"""Download models from the Hugging Face Hub: only the files they need, at one commit, resumed after a kill."""

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

from export.checkpoint.adapters import CONFIG as ADAPTER_CONFIG
from export.checkpoint.adapters import FILE as ADAPTERS
from export.checkpoint.adapters import WEIGHTS as ADAPTER_WEIGHTS
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.unsupported import check_files, check_model
from export.sources.pickles import ADAPTER as ADAPTER_PICKLE
from export.sources.pickles import PLACE, pickles_of, safe_name
from triton_transformers.cli import err, out
from triton_transformers.settings import Settings, UserError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import HfApi, ModelInfo, RepoSibling

DOWNLOADS = ".downloads"
# The names that from_pretrained looks for: no other precision (model.fp16), no copy in another format (consolidated).
WEIGHTS = re.compile(PLACE + r"model(-\d{5}-of-\d{5})?\.safetensors")
DESCRIPTIONS = re.compile(
    PLACE + r"[^/.][^/]*\.(json|txt|model|spm|tiktoken|jinja|metadata)|additional_chat_templates/tool_use\.jinja"
)
# The Hub's own conversion to safetensors: a pull request by this author, with this title.
CONVERTER, CONVERSION = "SFconvertbot", "Adding `safetensors` variant of this model"
CODE = re.compile(r"([^/.][^/]*/)*[^/.][^/]*\.py")


@contextlib.contextmanager
def download(
    name: str, revision: str, settings: Settings, repository: Path, is_adapter: bool = False
) -> Iterator[tuple[Path, str]]:
    """Yield a folder with the model's files, or an adapter's, and their commit.

    Keep the folder if the caller fails, else delete it.
    """
    api = hub_api(settings.hf_token)
    with readable_errors(name, revision, api):
        info = api.model_info(name, revision=revision or None, files_metadata=True)
        if not revision and not is_adapter and (converted := find_conversion(api, info)):
            info = api.model_info(name, revision=converted, files_metadata=True)
            out.print(f"{name}: taking the Hub's own conversion to safetensors, HF_REVISION={converted}", markup=False)
        commit = info.sha or ""
        folder = repository / DOWNLOADS / f"{name.replace('/', '--')}@{commit}"
        files = adapter_files(info, settings) if is_adapter else select_files(info, settings)
        fetch(api, name, commit, files, folder, None if is_adapter else settings.trust_remote_code)
    yield folder, commit
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another download is still in it
        folder.parent.rmdir()


def find_conversion(api: HfApi, info: ModelInfo) -> str:
    """Return the revision with which the Hub converted this commit to safetensors, or "" if it did not or need not."""
    from huggingface_hub.errors import HfHubHTTPError

    if not any(file.startswith("pytorch_model") for file in pickles_of(names_of(info))):
        return ""
    with contextlib.suppress(HfHubHTTPError, KeyError, ValueError):  # a mirror may lack this, or answer with a page
        for request in api.get_repo_discussions(info.id, author=CONVERTER):
            if (request.author, request.title, request.status) == (CONVERTER, CONVERSION, "open"):
                commits = api.list_repo_commits(info.id, revision=request.git_reference)
                if info.sha in [commit.commit_id for commit in commits[1:2]]:  # else it is of weights from before
                    return request.git_reference or ""
    return ""


def names_of(info: ModelInfo) -> list[str]:
    return [file.rfilename for file in info.siblings or []]


def select_files(info: ModelInfo, settings: Settings) -> list[RepoSibling]:
    kinds = (WEIGHTS, ADAPTERS, DESCRIPTIONS, *([CODE] if settings.trust_remote_code else []))
    names = names_of(info)
    pickles = pickles_of(names)
    needed = {*pickles, *(name for name in names if any(kind.fullmatch(name) for kind in kinds))}
    check_files(info.id, names)
    has_weights = any(WEIGHTS.fullmatch(name) for name in [*names, *map(safe_name, pickles)])
    if not has_weights or (pickles and not settings.allow_pickles):
        if any(name.endswith(".gguf") for name in names):
            raise UserError(
                f"{info.id} has its weights as GGUF: download one of its *.gguf files into a folder, and set SOURCE to "
                "that folder"
            )
        raise UserError(
            f"{info.id} has no safetensors at {(info.sha or '')[:12]}, and other formats can run code when they are "
            "loaded. Look for a pull request with them on its Community page (HF_REVISION=refs/pr/1), or convert the "
            "model yourself and set SOURCE"
        )
    return [file for file in info.siblings or [] if file.rfilename in needed]


def adapter_files(info: ModelInfo, settings: Settings) -> list[RepoSibling]:
    needed = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    if settings.allow_pickles and ADAPTER_PICKLE in pickles_of(names_of(info)):
        needed.append(ADAPTER_PICKLE)
    files = [file for file in info.siblings or [] if file.rfilename in needed]
    if len(files) < 2:
        raise UserError(f"{info.id} has no {ADAPTER_CONFIG} with {ADAPTER_WEIGHTS}: name a LoRA adapter of peft")
    return files


def hub_api(token: str) -> HfApi:
    from huggingface_hub import HfApi, constants, utils

    # The library reads the environment only when it is imported, and an earlier recipe may have set it offline.
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_DISABLE_TELEMETRY = True
    utils.logging.set_verbosity_error()  # each attempt to reach the Hub logs a warning of many lines
    utils.close_session()
    return HfApi(token=token or None)


def fetch(
    api: HfApi, name: str, commit: str, files: list[RepoSibling], folder: Path, trust_remote_code: bool | None
) -> None:
    """Download the files. Check the model's before its weights; `trust_remote_code` is None if it is an adapter."""
    total = sum(file.size or 0 for file in files)
    resumed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    repository = folder.parents[1]
    if total - resumed > (free := shutil.disk_usage(repository).free):
        raise UserError(
            f"{name}: {decimal(total - resumed)} are left to download, but the disk of {repository} has only "
            f"{decimal(free)} free. Make room there, or set MODEL_REPOSITORY to a folder on another disk"
        )
    already = f", {decimal(resumed)} of it are already here" if resumed else ""
    out.print(f"{name}: downloading {decimal(total)}, commit {commit[:12]}{already}")
    weights = [file for file in files if file.rfilename.endswith((".safetensors", ".bin", ".pt"))]
    # One file at a time: with several, Ctrl-C would wait for all of them.
    for file in (file for file in files if file not in weights):
        fetch_file(api, name, commit, file, folder / file.rfilename)
    if trust_remote_code is not None:
        check_model(Checkpoint(name, folder, trust_remote_code))  # before gigabytes are downloaded for nothing
    for file in weights:
        fetch_file(api, name, commit, file, folder / file.rfilename)
    with err.status(f"{name}: verifying the download"):
        for file in files:
            verify_file(name, file, folder / file.rfilename)


def fetch_file(api: HfApi, name: str, commit: str, file: RepoSibling, path: Path) -> None:
    """Download the missing part of a file. The library's own download begins an interrupted file again."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    total = decimal(file.size or 0)
    url = hf_hub_url(name, file.rfilename, revision=commit, endpoint=api.endpoint)
    part = path.with_name(f"{path.name}.incomplete")
    with part.open("ab") as content:
        err.step(lambda: f"downloading {file.rfilename}, {decimal(size_of(part, path))} of {total}")
        headers = build_hf_headers(token=api.token)
        http_get(url, content, resume_size=content.tell(), headers=headers, expected_size=file.size)
    part.rename(path)


def size_of(*paths: Path) -> int:
    """Return the size of the first of these files that exists: a complete download gets another name at any time."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
    return 0


def verify_file(name: str, file: RepoSibling, path: Path) -> None:
    with path.open("rb") as content:
        intact = not file.lfs or hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
    if not intact:
        path.unlink()
        raise UserError(
            f"{name}: the download of {file.rfilename} does not match the Hub's hash, and was deleted: run this again"
        )


@contextlib.contextmanager
def readable_errors(name: str, revision: str, api: HfApi) -> Iterator[None]:
    """Replace the library's errors by one sentence. Never show its own messages: they may quote the token."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError:
        message = f"HF_MODEL={name}: models on the Hub are named organisation/name; set SOURCE for a folder"
        raise UserError(message) from None
    except Exception as error:
        if not (isinstance(error, OSError) or is_of_transport(error)):
            raise
        raise UserError(f"{explain(error, name, revision, api)}. What is in place stays") from None


def is_of_transport(error: BaseException) -> bool:
    """Return whether HTTP failed. The library's releases differ in the packages that they use for it."""
    return type(error).__module__.partition(".")[0] in ("requests", "httpx", "httpx2")


def explain(error: Exception, name: str, revision: str, api: HfApi) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    match error:
        case errors.GatedRepoError():
            return (
                f"{name} is gated: accept its licence on {api.endpoint}/{name}, then set HF_TOKEN in .env "
                "to a token of the same account"
            )
        case errors.RepositoryNotFoundError():
            private = "HF_TOKEN may not read it" if api.token else "it is private: then set HF_TOKEN in .env"
            return f"{name}: the Hub has no such model, or {private}"
        case errors.RevisionNotFoundError():
            return f"{name} has no revision {revision}: set HF_REVISION to one of its commits, branches or tags"
        case _ if status == 401:
            return "the Hub does not accept HF_TOKEN: create a new token with the right to read, and set it in .env"
        case _ if status:
            return f"{api.endpoint} answered {status} for {name}: run this again later to resume the download"
        case _ if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return (
                f"{api.endpoint} has a certificate that this machine does not trust: set SSL_CERT_FILE to the file of "
                "its certificate authority"
            )
        case _ if "LocalProtocolError" in type(error).__name__:
            return "HF_TOKEN cannot be sent: it has a character that no token has"
        case _ if is_of_transport(error) or isinstance(error, errors.LocalEntryNotFoundError):
            return (
                f"{api.endpoint} cannot be reached for {name}: check the network, the proxy (https_proxy) or the "
                "mirror (HF_ENDPOINT) and run this again, or set SOURCE to a folder"
            )
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return f"the disk is full: make room, then run this again to resume the download of {name}"
        case _:
            return f"{name} could not be downloaded ({getattr(error, 'strerror', '') or 'incomplete'}): run this again"
