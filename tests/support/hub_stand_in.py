"""Stand in for the Hugging Face Hub, which tests cannot reach: the part of its API that downloads a model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.http_servers import serving

LFS = (".safetensors", ".bin", ".pt", ".onnx")
TOKEN = "hf_a_token_of_the_tests"
CHUNK = 1 << 12
DATE = "2026-01-02T03:04:05.000Z"


@dataclass
class Published:
    """A model on the stand-in: a folder at one commit, and other names of that commit."""

    folder: Path
    commit: str = "c0ffee" * 6 + "c0ff"
    refs: tuple[str, ...] = ("main",)
    gated: bool = False
    private: bool = False
    # A pull request that converts a commit to safetensors.
    conversion: Conversion | None = None

    def files(self) -> dict[str, Path]:
        return {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*")) if path.is_file()}


@dataclass
class Conversion:
    published: Published
    parent: str
    author: str = "SFconvertbot"
    status: str = "open"
    number: int = 7


@dataclass
class HubStandIn:
    models: dict[str, Published]
    # Files whose names end like this stop after that many bytes, until this is cleared.
    held: str = ""
    held_after: int = 0
    # Every GET of a file, in order: its name and the first requested byte.
    served: list[tuple[str, int]] = field(default_factory=list)
    requests: int = 0
    # The parts of the API beside models and files; a mirror may lack them.
    parts: tuple[str, ...] = ("discussions", "commits")
    url: str = ""


class HubError(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubStandIn:
        return self.server.hub

    def do_GET(self) -> None:
        self.hub.requests += 1
        path = unquote(urlsplit(self.path).path).strip("/")
        try:
            if path.startswith("api/models/"):
                organisation, model, *rest = path.removeprefix("api/models/").split("/", 3)
                self.send_part(f"{organisation}/{model}", *rest)
            else:
                name, _, rest = path.partition("/resolve/")
                revision, _, file = rest.partition("/")
                self.send_file(self.model(name, revision), file)
        except HubError as error:
            self.send(error.status, error.headers)
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            self.close_connection = True

    do_HEAD = do_GET

    def model(self, name: str, revision: str) -> Published:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            raise HubError(401, message="Invalid credentials in Authorization header")
        model = self.hub.models.get(name)
        if model is None or (model.private and not token):
            raise HubError(404 if token else 401, "RepoNotFound")
        versions = [model, *([model.conversion.published] if model.conversion else [])]
        for version in versions:
            if revision in (version.commit, *version.refs):
                return version
        raise HubError(404, "RevisionNotFound")

    def send_part(self, name: str, part: str = "revision", revision: str = "main") -> None:
        conversion = self.model(name, "main").conversion
        if part == "revision":
            self.send_info(name, self.model(name, revision))
        elif part not in self.hub.parts:
            raise HubError(404)
        elif part == "discussions":
            requests = [discussion(name, conversion)] if conversion else []
            self.send(200, body=json.dumps({"count": len(requests), "start": 0, "discussions": requests}).encode())
        else:
            ids = [self.model(name, revision).commit, *([conversion.parent] if conversion else [])]
            commits = [{"id": id, "authors": [], "date": DATE, "title": "", "message": ""} for id in ids]
            self.send(200, body=json.dumps(commits).encode())

    def send_info(self, name: str, model: Published) -> None:
        files = [describe(file, path) for file, path in model.files().items()]
        self.send(200, body=json.dumps({"id": name, "sha": model.commit, "siblings": files}).encode())

    def send_file(self, model: Published, name: str) -> None:
        if model.gated and not self.headers.get("Authorization"):
            raise HubError(401, "GatedRepo")
        if name not in model.files():
            raise HubError(404, "EntryNotFound")
        content = model.files()[name].read_bytes()
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{etag(name, content)}"', "X-Repo-Commit": model.commit, "Accept-Ranges": "bytes"}
        if name.endswith(LFS):
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": headers["ETag"]}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.hub.served.append((name, first))
        held = bool(self.hub.held) and name.endswith(self.hub.held)
        self.send(206 if first else 200, headers, content[first:], held)

    def send(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", held: bool = False) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(body), CHUNK):
            self.wfile.write(body[start : start + CHUNK])
            while held and self.hub.held and start + CHUNK > self.hub.held_after:
                time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        pass


def discussion(name: str, conversion: Conversion) -> dict:
    return {
        "num": conversion.number,
        "title": "Adding `safetensors` variant of this model",
        "author": {"name": conversion.author},
        "status": conversion.status,
        "isPullRequest": True,
        "createdAt": DATE,
        "repo": {"name": name, "type": "model"},
    }


def describe(name: str, path: Path) -> dict:
    content = path.read_bytes()
    entry = {"rfilename": name, "size": len(content), "blobId": etag("", content)}
    if name.endswith(LFS):
        entry["lfs"] = {"sha256": etag(name, content), "size": len(content), "pointerSize": 135}
    return entry


def etag(name: str, content: bytes) -> str:
    """Return git's hash of a file, or the SHA-256 of a file in Git LFS."""
    if name.endswith(LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def hub_stand_in(models: dict[str, Published]) -> Iterator[HubStandIn]:
    hub = HubStandIn(models)
    with serving(Handler, hub=hub) as hub.url:
        yield hub
