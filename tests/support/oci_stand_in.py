"""A stand-in for Oracle Cloud: the parts of Data Science, Object Storage and a deployment's endpoints that we use.

It accepts the bodies that the SDK's own models allow, signatures of its key, and the changes that the service's
documentation allows. With `launch`, a deployment is real: its /predict and /health are those of a Triton.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from oci.data_science import models as sdk

from triton_transformers.http import opener

API = "/20190101"
SHAPES = [
    {"name": name, "coreCount": 64, "memoryInGBs": 1024, "shapeSeries": "AMD_ROME"}
    for name in ("VM.Standard.E4.Flex", "VM.GPU.A10.1")
]
WORK_POLLS = 2  # a work request ends at this poll
# An active deployment takes changes of one of these groups at a time.
GROUPS = (
    ("description", "freeformTags"),
    ("categoryLogDetails",),
    ("instanceConfiguration", "scalingPolicy"),
    ("bandwidthMbps",),
    ("modelId",),
    ("environmentConfigurationDetails",),
)


class RefusedRequest(Exception):
    def __init__(self, status: int, code: str, message: str = "", headers: dict[str, str] | None = None) -> None:
        self.answer = status, headers or {}, {"code": code, "message": message or code}


@dataclass
class Work:
    kind: str
    end: Callable[[], str | None]  # runs at the end, and returns a text if the work failed
    polls: int = 0
    status: str = "IN_PROGRESS"
    error: str = ""


@dataclass
class OciStandIn:
    folder: Path
    launch: Callable[[OciStandIn, dict], str] = lambda cloud, deployment: ""  # returns the address of a Triton
    url: str = ""
    key: rsa.RSAPrivateKey = field(default_factory=lambda: private_key("usual"))
    models: dict[str, dict] = field(default_factory=dict)
    deployments: dict[str, dict] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    tritons: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict] = field(default_factory=dict)
    received: list[tuple[str, str, dict | None]] = field(default_factory=list)  # method, path, body
    # (pattern of a request's "METHOD path", the answer instead), used once.
    faults: list[tuple[str, int, str, str, dict[str, str]]] = field(default_factory=list)
    proxy_answer: bytes | None = None  # the answer to every request, as if from a proxy
    hangs_at: str = ""  # pattern of a request that gets no answer, used once
    container_error: str = ""  # the next container fails to start with this message
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def fault(
        self, match: str, status: int, code: str = "Fault", message: str = "injected fault", **headers: str
    ) -> None:
        self.faults.append((match, status, code, message, headers))

    def bodies(self, pattern: str) -> list[dict | None]:
        """Return the bodies of the requests whose "METHOD path" matches."""
        return [body for method, path, body in self.received if re.search(pattern, f"{method} {path}")]

    def config_file(self) -> Path:
        """Write what `oci setup config` writes, and return its path."""
        pem = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.folder / "key.pem").write_bytes(pem)
        (self.folder / "key.pem").chmod(0o600)
        path = self.folder / "config"
        path.write_text(
            "[DEFAULT]\nuser=ocid1.user.oc1..tests\ntenancy=ocid1.tenancy.oc1..tests\nregion=us-ashburn-1\n"
            f"fingerprint={':'.join(['ab'] * 16)}\nkey_file={self.folder}/key.pem\n"
        )
        path.chmod(0o600)
        return path

    def identifier(self, kind: str) -> str:
        return f"ocid1.{kind}.oc1.iad.tests{next(self.numbers):04d}"

    def begin(self, kind: str, end: Callable[[], str | None]) -> dict[str, str]:
        name = self.identifier("datascienceworkrequest")
        self.work[name] = Work(kind, end)
        return {"opc-work-request-id": name}

    def poll(self, name: str) -> Work:
        work = self.work[name]
        work.polls += 1
        if work.status == "IN_PROGRESS" and work.polls >= WORK_POLLS:
            work.error = work.end() or ""
            work.status = "FAILED" if work.error else "SUCCEEDED"
        return work


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # One packet per answer, at once: Nagle's algorithm would add 40 ms to each.
    wbufsize = -1
    disable_nagle_algorithm = True

    @property
    def cloud(self) -> OciStandIn:
        return self.server.cloud

    def handle_any(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        try:
            body = json.loads(content) if is_json and content else None
            line = f"{self.command} {url.path}"
            self.cloud.received.append((self.command, url.path, body))
            if self.cloud.hangs_at and re.search(self.cloud.hangs_at, line):
                self.cloud.hangs_at = ""
                self.close_connection = True
                while self.connection.recv(1024):  # until the client disconnects
                    pass
                return
            self.check_signature(content)
            for fault in self.cloud.faults:
                if re.search(fault[0], line):
                    self.cloud.faults.remove(fault)
                    raise RefusedRequest(*fault[1:])
            if self.cloud.proxy_answer is not None:
                self.answer(200, {}, self.cloud.proxy_answer)
                return
            status, headers, answer = self.route(url.path, query, body, content)
        except RefusedRequest as error:
            status, headers, answer = error.answer
        except ValueError as error:  # of check_fields
            status, headers, answer = RefusedRequest(400, "InvalidParameter", str(error)).answer
        self.answer(status, headers, answer)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

    def answer(self, status: int, headers: dict[str, str], answer: object) -> None:
        content = answer if isinstance(answer, bytes) else b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "opc-request-id": "TESTS/1/2"} | headers
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass

    # --- signatures ---------------------------------------------------------------------------------------------------

    def check_signature(self, content: bytes) -> None:
        parts = dict(re.findall(r'(\w+)="([^"]*)"', self.headers.get("Authorization", "")))
        lines = []
        for name in parts.get("headers", "").split():
            target = f"{self.command.lower()} {self.path}"
            lines.append(f"{name}: {target if name == '(request-target)' else self.headers[name]}")
        if "(request-target)" not in parts.get("headers", ""):
            raise RefusedRequest(401, "NotAuthenticated")
        if "x-content-sha256" in parts["headers"]:
            digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
            if digest != self.headers["x-content-sha256"]:
                raise RefusedRequest(401, "NotAuthenticated", "the body is not the signed one")
        try:
            self.cloud.key.public_key().verify(
                base64.b64decode(parts["signature"]), "\n".join(lines).encode(), padding.PKCS1v15(), hashes.SHA256()
            )
        except InvalidSignature:
            raise RefusedRequest(401, "NotAuthenticated", "The required information was not provided.") from None

    # --- Data Science -------------------------------------------------------------------------------------------------

    def route(self, path: str, query: dict, body: dict | None, content: bytes) -> tuple[int, dict, object]:
        for method, pattern, function in ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                parts = {name: urllib.parse.unquote(value) for name, value in match.groupdict().items()}
                return function(self, query=query, body=body, content=content, **parts)
        raise RefusedRequest(404, "NotAuthorizedOrNotFound", f"{self.command} {path}")

    def list_models(self, query: dict, **_: object) -> tuple[int, dict, object]:
        return paged(named(self.cloud.models, query), query)

    def create_model(self, body: dict, **_: object) -> tuple[int, dict, object]:
        check_fields(body, sdk.CreateModelDetails)
        model = body | {"id": self.cloud.identifier("datasciencemodel"), "lifecycleState": "ACTIVE"}
        model["timeCreated"] = now()
        self.cloud.models[model["id"]] = model
        return 200, {}, without_artifact(model)

    def delete_model(self, id: str, **_: object) -> tuple[int, dict, object]:
        model = find(self.cloud.models, id)
        live = [record for record in self.cloud.deployments.values() if record["lifecycleState"] != "DELETED"]
        if any(model_id(deployment) == id for deployment in live):
            raise RefusedRequest(409, "Conflict", "the model is deployed")
        model["lifecycleState"] = "DELETED"
        return 204, {}, None

    def create_artifact(self, id: str, content: bytes, **_: object) -> tuple[int, dict, object]:
        model = find(self.cloud.models, id)
        if "artifact" in model:
            raise RefusedRequest(409, "Conflict", "the model has an artifact, which cannot be changed")
        model["artifact"] = content
        return 204, {}, None

    def head_artifact(self, id: str, **_: object) -> tuple[int, dict, object]:
        model = find(self.cloud.models, id)
        if "artifact" not in model:
            raise RefusedRequest(404, "NotAuthorizedOrNotFound")
        return 200, {"Content-Length": str(len(model["artifact"]))}, None

    def export_artifact(self, id: str, body: dict, **_: object) -> tuple[int, dict, object]:
        check_fields(body, sdk.ExportModelArtifactDetails)
        model, source = find(self.cloud.models, id), body["artifactExportDetails"]
        check_fields(source, sdk.ArtifactExportDetailsObjectStorage)

        def end() -> None:
            model["artifact"] = self.cloud.objects[f"{source['sourceBucket']}/{source['sourceObjectName']}"]

        return 202, self.cloud.begin("EXPORT_MODEL_ARTIFACT", end), None

    def list_deployments(self, query: dict, **_: object) -> tuple[int, dict, object]:
        return paged(named(self.cloud.deployments, query), query)

    def get_deployment(self, id: str, **_: object) -> tuple[int, dict, object]:
        for name in self.cloud.work:  # work continues, whichever request the client polls
            self.cloud.poll(name)
        return 200, {}, find(self.cloud.deployments, id)

    def create_deployment(self, body: dict, **_: object) -> tuple[int, dict, object]:
        check_fields(body, sdk.CreateModelDeploymentDetails)
        if "artifact" not in find(self.cloud.models, model_id(body)):
            raise RefusedRequest(400, "InvalidParameter", "the model has no artifact")
        live = json.loads(json.dumps(body))
        live |= {"id": self.cloud.identifier("datasciencemodeldeployment"), "timeCreated": now()}
        live |= {"modelDeploymentUrl": f"{self.cloud.url}/{live['id']}", "lifecycleState": "CREATING"}
        live["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]["maximumBandwidthMbps"] = 10
        self.cloud.deployments[live["id"]] = live
        return 201, self.cloud.begin("MODEL_DEPLOYMENT_CREATE", lambda: self.launch(live)), live

    def update_deployment(self, id: str, body: dict, **_: object) -> tuple[int, dict, object]:
        check_fields(body, sdk.UpdateModelDeploymentDetails)
        live = find(self.cloud.deployments, id)
        if live["lifecycleState"] not in ("ACTIVE", "INACTIVE", "NEEDS_ATTENTION"):
            raise RefusedRequest(409, "IncorrectState", f"it is {live['lifecycleState']}")
        before, after = flat(live), flat(body)
        changes = [
            group for group in GROUPS if any(name in after and after[name] != before.get(name) for name in group)
        ]
        if live["lifecycleState"] != "INACTIVE" and len(changes) > 1:
            raise RefusedRequest(400, "InvalidParameter", "an active deployment takes one change at a time")
        stopped = live["lifecycleState"] == "INACTIVE"
        merge(live, body)
        live["lifecycleState"] = "UPDATING"

        def end() -> str | None:
            if not stopped:
                return self.launch(live)
            live["lifecycleState"] = "INACTIVE"
            return None

        return 202, self.cloud.begin("MODEL_DEPLOYMENT_UPDATE", end), None

    def activate(self, id: str, **_: object) -> tuple[int, dict, object]:
        live = find(self.cloud.deployments, id)
        live["lifecycleState"] = "UPDATING"
        return 202, self.cloud.begin("MODEL_DEPLOYMENT_ACTIVATE", lambda: self.launch(live)), None

    def deactivate(self, id: str, **_: object) -> tuple[int, dict, object]:
        return self.stop(id, "UPDATING", "INACTIVE", "MODEL_DEPLOYMENT_DEACTIVATE")

    def delete_deployment(self, id: str, **_: object) -> tuple[int, dict, object]:
        return self.stop(id, "DELETING", "DELETED", "MODEL_DEPLOYMENT_DELETE")

    def stop(self, id: str, passing: str, final: str, kind: str) -> tuple[int, dict, object]:
        live = find(self.cloud.deployments, id)
        if live["lifecycleState"] in ("CREATING", "UPDATING", "DELETING"):
            raise RefusedRequest(409, "IncorrectState", f"it is {live['lifecycleState']}")
        live["lifecycleState"] = passing
        self.cloud.tritons.pop(id, None)
        return 202, self.cloud.begin(kind, lambda: live.update(lifecycleState=final)), None

    def launch(self, live: dict) -> str | None:
        message, self.cloud.container_error = self.cloud.container_error, ""
        try:
            if message:
                raise RuntimeError(message)
            self.cloud.tritons[live["id"]] = self.cloud.launch(self.cloud, live)
            live["lifecycleState"] = "ACTIVE"
        except Exception as error:
            live["lifecycleState"] = "FAILED" if live["lifecycleState"] == "CREATING" else "NEEDS_ATTENTION"
            return str(error)
        return None

    def get_work(self, id: str, **_: object) -> tuple[int, dict, object]:
        if id not in self.cloud.work:
            raise RefusedRequest(404, "NotAuthorizedOrNotFound")
        work = self.cloud.poll(id)
        progress = {"percentComplete": 100.0 if work.status != "IN_PROGRESS" else 50.0, "status": work.status}
        return 200, {}, progress | {"id": id, "operationType": work.kind, "timeAccepted": now(), "resources": []}

    def work_logs(self, id: str, **_: object) -> tuple[int, dict, object]:
        return 200, {}, [{"message": f"{self.cloud.work[id].kind}: a step", "timestamp": now()}]

    def work_errors(self, id: str, **_: object) -> tuple[int, dict, object]:
        return 200, {}, [{"code": "Failed", "message": self.cloud.work[id].error, "timestamp": now()}]

    # --- Object Storage -----------------------------------------------------------------------------------------------

    def head_object(self, bucket: str, name: str, **_: object) -> tuple[int, dict, object]:
        if f"{bucket}/{name}" not in self.cloud.objects:
            raise RefusedRequest(404, "ObjectNotFound")
        return 200, {"Content-Length": str(len(self.cloud.objects[f"{bucket}/{name}"]))}, None

    def list_objects(self, bucket: str, query: dict, **_: object) -> tuple[int, dict, object]:
        names = [path.partition("/")[2] for path in self.cloud.objects if path.startswith(f"{bucket}/")]
        return 200, {}, {"objects": [{"name": name} for name in names if name.startswith(query.get("prefix", ""))]}

    def abort_upload(self, query: dict, **_: object) -> tuple[int, dict, object]:
        del self.cloud.uploads[query["uploadId"]]
        return 204, {}, None

    def delete_object(self, bucket: str, name: str, **_: object) -> tuple[int, dict, object]:
        del self.cloud.objects[f"{bucket}/{name}"]
        return 204, {}, None

    def list_uploads(self, bucket: str, **_: object) -> tuple[int, dict, object]:
        names = ("namespace", "bucket", "object", "uploadId", "timeCreated")
        return 200, {}, [{name: upload[name] for name in names} for upload in self.cloud.uploads.values()]

    def create_upload(self, bucket: str, body: dict, **_: object) -> tuple[int, dict, object]:
        upload = {"namespace": "tests", "bucket": bucket, "object": body["object"], "timeCreated": now()}
        upload |= {"uploadId": f"upload{next(self.cloud.numbers)}", "parts": {}}
        self.cloud.uploads[upload["uploadId"]] = upload
        return 200, {}, {name: value for name, value in upload.items() if name != "parts"}

    def put_part(self, query: dict, content: bytes, **_: object) -> tuple[int, dict, object]:
        number = int(query["uploadPartNum"])
        self.cloud.uploads[query["uploadId"]]["parts"][number] = content
        stored = part(number, content)
        return 200, {"ETag": stored["etag"], "opc-content-md5": stored["md5"]}, None

    def list_parts(self, query: dict, **_: object) -> tuple[int, dict, object]:
        parts = sorted(self.cloud.uploads[query["uploadId"]]["parts"].items())
        return 200, {}, [part(number, content) for number, content in parts]

    def commit_upload(self, bucket: str, name: str, query: dict, body: dict, **_: object) -> tuple[int, dict, object]:
        upload = self.cloud.uploads.pop(query["uploadId"])
        numbers = [part["partNum"] for part in body["partsToCommit"]]
        self.cloud.objects[f"{bucket}/{name}"] = b"".join(upload["parts"][number] for number in sorted(numbers))
        return 200, {}, None

    # --- a deployment's endpoints -------------------------------------------------------------------------------------

    def predict(self, id: str, content: bytes, **_: object) -> tuple[int, dict, object]:
        model, version = self.headers.get("model_name"), self.headers.get("model_version")
        if id not in self.cloud.tritons or not model or not version:
            raise RefusedRequest(404, "NotAuthorizedOrNotFound", "Authorization failed or resource not found.")
        return forward(f"{self.cloud.tritons[id]}/v2/models/{model}/versions/{version}/infer", content)

    def health(self, id: str, **_: object) -> tuple[int, dict, object]:
        return forward(f"{self.cloud.tritons[id]}/v2/health/ready")


MODEL, DEPLOYMENT, WORK = (f"{API}/{kind}/(?P<id>[^/]+)" for kind in ("models", "modelDeployments", "workRequests"))
BUCKET = "/n/tests/b/(?P<bucket>[^/]+)"
OBJECT, UPLOAD = f"{BUCKET}/o/(?P<name>.+)", f"{BUCKET}/u/(?P<name>.+)"
ROUTES = (
    ("GET", f"{API}/models", Handler.list_models),
    ("POST", f"{API}/models", Handler.create_model),
    ("DELETE", MODEL, Handler.delete_model),
    ("POST", f"{MODEL}/artifact", Handler.create_artifact),
    ("HEAD", f"{MODEL}/artifact/content", Handler.head_artifact),
    ("POST", f"{MODEL}/actions/exportArtifact", Handler.export_artifact),
    ("GET", f"{API}/modelDeployments", Handler.list_deployments),
    ("POST", f"{API}/modelDeployments", Handler.create_deployment),
    ("GET", DEPLOYMENT, Handler.get_deployment),
    ("PUT", DEPLOYMENT, Handler.update_deployment),
    ("DELETE", DEPLOYMENT, Handler.delete_deployment),
    ("POST", f"{DEPLOYMENT}/actions/activate", Handler.activate),
    ("POST", f"{DEPLOYMENT}/actions/deactivate", Handler.deactivate),
    ("GET", WORK, Handler.get_work),
    ("GET", f"{WORK}/logs", Handler.work_logs),
    ("GET", f"{WORK}/errors", Handler.work_errors),
    ("GET", f"{API}/modelDeploymentShapes", lambda *_, **__: (200, {}, SHAPES)),
    ("GET", "/n/?", lambda *_, **__: (200, {}, "tests")),
    ("HEAD", OBJECT, Handler.head_object),
    ("DELETE", OBJECT, Handler.delete_object),
    ("GET", f"{BUCKET}/o/?", Handler.list_objects),
    ("DELETE", UPLOAD, Handler.abort_upload),
    ("GET", f"{BUCKET}/u/?", Handler.list_uploads),
    ("POST", f"{BUCKET}/u/?", Handler.create_upload),
    ("PUT", UPLOAD, Handler.put_part),
    ("GET", UPLOAD, Handler.list_parts),
    ("POST", UPLOAD, Handler.commit_upload),
    ("POST", "/(?P<id>ocid1[^/]+)/predict", Handler.predict),
    ("GET", "/(?P<id>ocid1[^/]+)/health", Handler.health),
)


def now() -> str:
    return datetime.now(UTC).isoformat()


def part(number: int, content: bytes) -> dict:
    md5 = hashlib.md5(content)
    digest = base64.b64encode(md5.digest()).decode()
    return {"partNumber": number, "etag": md5.hexdigest(), "md5": digest, "size": len(content)}


def without_artifact(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "artifact"}


def find(records: dict[str, dict], id: str) -> dict:
    if id not in records:
        raise RefusedRequest(404, "NotAuthorizedOrNotFound")
    return records[id]


def named(records: dict[str, dict], query: dict) -> Iterator[dict]:
    for record in sorted(records.values(), key=lambda record: record["id"], reverse=query.get("sortOrder") == "DESC"):
        if record["compartmentId"] == query["compartmentId"] and record["displayName"] == query.get("displayName"):
            yield without_artifact(record)


def paged(records: Iterator[dict], query: dict) -> tuple[int, dict, object]:
    """Return one record per page, so that short lists have several pages too."""
    start, records = int(query.get("page", 0)), list(records)
    more = {"opc-next-page": str(start + 1)} if len(records) > start + 1 else {}
    return 200, more, records[start : start + 1]


def model_id(deployment: dict) -> str:
    return deployment["modelDeploymentConfigurationDetails"]["modelConfigurationDetails"]["modelId"]


def flat(body: dict) -> dict:
    configuration = body.get("modelDeploymentConfigurationDetails") or {}
    return body | configuration | (configuration.get("modelConfigurationDetails") or {})


def merge(into: dict, body: dict) -> None:
    """Replace what the update holds; merge only the objects that hold several groups."""
    for name, value in body.items():
        if name in ("modelDeploymentConfigurationDetails", "modelConfigurationDetails"):
            merge(into[name], value)
        else:
            into[name] = value


def check_fields(body: dict, kind: type, path: str = "") -> None:
    """Raise ValueError if the body has a field that the SDK's model lacks, or lacks one that is [Required] there."""
    if hasattr(kind, "get_subtype"):
        kind = getattr(sdk, kind.get_subtype(body))
    types = {key: kind().swagger_types[name] for name, key in kind().attribute_map.items()}
    if unknown := body.keys() - types.keys():
        raise ValueError(f"{path or kind.__name__}: no field {', '.join(sorted(unknown))}")
    for name, key in kind().attribute_map.items():
        if "[Required]" in (getattr(kind, name).__doc__ or "") and body.get(key) is None:
            raise ValueError(f"{path or kind.__name__}: {key} is required")
    for name, value in body.items():
        check_type(value, types[name], f"{path}.{name}".lstrip("."))


def check_type(value: object, kind: str, path: str) -> None:
    simple = {"str": str, "int": int, "float": (int, float), "object": object}
    if kind in simple:
        if not isinstance(value, simple[kind]):
            raise ValueError(f"{path}: {value!r} is not of type {kind}")
    elif match := re.fullmatch(r"list\[(.*)\]", kind):
        for item in value:
            check_type(item, match[1], path)
    elif match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        for item in value.values():
            check_type(item, match[1], path)
    else:
        check_fields(value, getattr(sdk, kind), path)


def forward(url: str, content: bytes | None = None) -> tuple[int, dict, object]:
    try:
        with opener.open(urllib.request.Request(url, data=content), timeout=120) as response:
            return response.status, {}, response.read()
    except urllib.error.HTTPError as error:
        return error.code, {}, error.read()


@functools.cache
def private_key(name: str) -> rsa.RSAPrivateKey:
    """Return a key; the same one for each name, because generating a key takes a while."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Server(ThreadingHTTPServer):
    """Serves one stand-in at a time; `new_cloud` replaces it by an empty one."""

    daemon_threads = True
    cloud: OciStandIn

    def new_cloud(self, folder: Path, **options: object) -> OciStandIn:
        self.cloud = OciStandIn(folder, url=f"http://127.0.0.1:{self.server_port}", **options)
        return self.cloud


@contextlib.contextmanager
def oci_server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
