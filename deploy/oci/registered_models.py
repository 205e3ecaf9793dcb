"""Pack the models of a deployment, and register the zip in Oracle Cloud's model catalogue: one model per zip."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oci.exceptions import ServiceError
from oci.object_storage import UploadManager
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.oci import limits
from deploy.oci import requests as bodies
from deploy.oci.client import Service, list_all, list_ours, wait_for_work
from deploy.oci.deployment import Deployment
from export.package import assembled_models, package
from triton_transformers.cli import err, out
from triton_transformers.settings import ROOT, Settings, UserError, command_environment

PART_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Artifact:
    path: Path
    sha256: str
    size: int
    identity: tuple[int, int]  # of the file that was hashed: packing again puts another in its place

    @classmethod
    def read(cls, path: Path) -> Artifact:
        with err.status(f"reading {escape(path.name)}"), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            status = os.fstat(file.fileno())
        return cls(path, sha256, status.st_size, identity(status))

    def check_unchanged(self, status: os.stat_result) -> None:
        """Raise if the zip is no longer the one that was hashed: pushing the image takes minutes before the upload."""
        if identity(status) != self.identity:
            raise UserError(f"{self.path} was packed again meanwhile. Run the same command again")


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def assemble(settings: Settings) -> None:
    """Run `make models`, in whichever runtime; it prints its own errors."""
    environment = command_environment(SYSTEMS=settings["SYSTEMS"])
    done = subprocess.run([sys.executable, "-m", "scripts.stack", "models"], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def pack(settings: Settings) -> Artifact:
    package(settings)
    return Artifact.read(settings.package)


def is_assembled(settings: Settings) -> bool:
    try:
        for name in settings.systems:
            assembled_models(name, settings.model_repository)
    except UserError:
        return False
    return True


def register(service: Service, deployment: Deployment, artifact: Artifact) -> str:
    """Return the id of the model with this zip; create it if needed. The service allows no change of an artifact."""
    for model in list_ours(service.data_science.list_models, deployment, ("DELETED",)):
        if model.lifecycle_state != "ACTIVE" or (model.freeform_tags or {}).get(bodies.ARTIFACT) != artifact.sha256:
            continue
        size = size_of(service.data_science.head_model_artifact, model.id)
        if size == artifact.size:
            out.print(f"model       {model.id}, unchanged")
            empty_bucket(service, deployment)
            return model.id
        if size is None:  # an earlier run was interrupted before the upload
            return upload(service, deployment, artifact, model.id)
    model_id = service.data_science.create_model(bodies.create_model(deployment, artifact.sha256)).data.id
    return upload(service, deployment, artifact, model_id)


def size_of(head: Callable, *location: str) -> int | None:
    """Return the size that a HEAD request reports, or None if nothing is there."""
    try:
        return int(head(*location).headers["content-length"])
    except ServiceError as error:
        if error.status == 404:
            return None
        raise


def upload(service: Service, deployment: Deployment, artifact: Artifact, model_id: str) -> str:
    if artifact.size > limits.DIRECT_BYTES:
        upload_by_bucket(service, deployment, artifact, model_id)
    else:
        name = artifact.path.name
        with err.status(f"uploading {escape(name)}, {decimal(artifact.size)}"), artifact.path.open("rb") as file:
            artifact.check_unchanged(os.fstat(file.fileno()))
            with service.with_upload_timeout() as client:
                client.create_model_artifact(model_id, file, content_disposition=f'attachment; filename="{name}"')
    out.print(f"model       {model_id}, {decimal(artifact.size)} uploaded")
    return model_id


def upload_by_bucket(service: Service, deployment: Deployment, artifact: Artifact, model_id: str) -> None:
    """Upload in parts to Object Storage, let the catalogue copy the zip from there, and empty the bucket."""
    storage, bucket = service.object_storage, deployment.models.bucket
    namespace = storage.get_namespace().data
    name = f"{object_prefix(deployment)}{artifact.sha256}.zip"
    empty_bucket(service, deployment, keep=name)
    if size_of(storage.head_object, namespace, bucket, name) != artifact.size:
        upload_parts(service, namespace, bucket, name, artifact)
        try:
            artifact.check_unchanged(artifact.path.stat())  # the parts were read over some minutes
        except (UserError, OSError):
            empty_bucket(service, deployment)
            raise
    source = {"artifactSourceType": "ORACLE_OBJECT_STORAGE", "namespace": namespace, "sourceBucket": bucket}
    source |= {"sourceObjectName": name, "sourceRegion": service.region}
    response = service.data_science.export_model_artifact(model_id, {"artifactExportDetails": source})
    wait_for_work(service, response, "copying the zip to the model catalogue", deployment.wait)
    empty_bucket(service, deployment)


def empty_bucket(service: Service, deployment: Deployment, keep: str = "") -> None:
    """Delete all objects and unfinished uploads of this deployment, also those of an earlier run that was killed."""
    storage, bucket = service.object_storage, deployment.models.bucket
    if not bucket:
        return
    namespace, prefix = storage.get_namespace().data, object_prefix(deployment)
    for unfinished in list_all(storage.list_multipart_uploads, namespace, bucket):
        if unfinished.object.startswith(prefix) and unfinished.object != keep:
            storage.abort_multipart_upload(namespace, bucket, unfinished.object, unfinished.upload_id)
    for stored in storage.list_objects(namespace, bucket, prefix=prefix).data.objects:
        if stored.name != keep:
            storage.delete_object(namespace, bucket, stored.name)


def object_prefix(deployment: Deployment) -> str:
    return f"{bodies.PROJECT}/{deployment.name}/"


def upload_parts(service: Service, namespace: str, bucket: str, name: str, artifact: Artifact) -> None:
    """Upload the parts that an interrupted run has not uploaded yet."""
    storage = service.object_storage
    columns = (TextColumn(f"uploading to {escape(bucket)}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=artifact.size)
        options = {"part_size": PART_BYTES, "progress_callback": lambda sent: bar.advance(task, sent)}
        manager, target = UploadManager(storage), (namespace, bucket, name, str(artifact.path))
        for unfinished in list_all(storage.list_multipart_uploads, namespace, bucket):
            if unfinished.object == name:
                manager.resume_upload_file(*target, unfinished.upload_id, **options)
                return
        manager.upload_file(*target, **options)
