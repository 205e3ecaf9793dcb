"""The model catalogue: an entry of ours for each zip, found again by the zip's hash."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from oci.data_science.models import (
    ArtifactExportDetailsObjectStorage,
    ExportModelArtifactDetails,
    ModelSummary,
)
from oci.exceptions import ServiceError
from oci.object_storage import UploadManager
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.oci import limits, waiting
from deploy.oci import requests as bodies
from deploy.oci.artifact import Artifact
from deploy.oci.client import ASKING, Service, every
from deploy.oci.deployment import Deployment
from scripts.common.cli import err, out
from scripts.common.settings import UserError

PART_BYTES = 128 * 2**20


def put(service: Service, deployment: Deployment, artifact: Artifact) -> str:
    """The model of this zip: one that is there, or one that is made. An artifact is never changed once it is there."""
    for model in ours(service, deployment):
        if model.lifecycle_state != "ACTIVE" or (model.freeform_tags or {}).get(bodies.ARTIFACT) != artifact.sha256:
            continue
        size = size_of(service.data_science.head_model_artifact, model.id)
        if size == artifact.size:
            out.print(f"model       {model.id}, as it was")
            clear(service, deployment)
            return model.id
        if size is None:  # interrupted before it was uploaded
            return upload(service, deployment, artifact, model.id)
    model_id = service.data_science.create_model(bodies.create_model(deployment, artifact.sha256)).data.id
    return upload(service, deployment, artifact, model_id)


def ours(service: Service, deployment: Deployment) -> list[ModelSummary]:
    """Newest first."""
    found = named(service.data_science.list_models, deployment, gone=("DELETED",))
    return [model for model in found if is_ours(model, deployment)]


def named(listing: Callable, deployment: Deployment, gone: tuple[str, ...]) -> list[Any]:
    """Of the deployment's name, the newest first, whoever made them."""
    place = deployment.deployment
    order = {"sort_by": "timeCreated", "sort_order": "DESC"}
    with err.status(ASKING):
        found = every(listing, place.compartment_id, display_name=place.name, **order)
        return [each for each in found if each.lifecycle_state not in gone]


def is_ours(made, deployment: Deployment) -> bool:
    tags = made.freeform_tags or {}
    return tags.get(bodies.MADE_BY) == bodies.US and tags.get(bodies.DEPLOYED_AS) == deployment.name


def size_of(head: Callable, *what: str) -> int | None:
    """None where there is nothing."""
    try:
        return int(head(*what).headers["content-length"])
    except ServiceError as error:
        if error.status == 404:
            return None
        raise


def upload(service: Service, deployment: Deployment, artifact: Artifact, model_id: str) -> str:
    if artifact.size > limits.DIRECT_BYTES:
        by_bucket(service, deployment, artifact, model_id)
    else:
        shown = escape(artifact.path.name)
        with err.status(f"uploading {shown}, {decimal(artifact.size)}"), artifact.path.open("rb") as file:
            artifact.check(os.fstat(file.fileno()))
            with service.patient() as client:
                client.create_model_artifact(
                    model_id, file, content_disposition=f'attachment; filename="{artifact.path.name}"'
                )
    out.print(f"model       {model_id}, {decimal(artifact.size)} uploaded")
    return model_id


def by_bucket(service: Service, deployment: Deployment, artifact: Artifact, model_id: str) -> None:
    """In parts to Object Storage, from where the catalogue takes it itself; then the bucket is as it was."""
    storage, bucket = service.object_storage, deployment.models.bucket
    namespace = storage.get_namespace().data
    name = f"{objects(deployment)}{artifact.sha256}.zip"
    clear(service, deployment, keep=name)
    if size_of(storage.head_object, namespace, bucket, name) != artifact.size:
        upload_parts(service, namespace, bucket, name, artifact)
        check_stored(service, deployment, artifact)
    source = ArtifactExportDetailsObjectStorage(
        namespace=namespace, source_bucket=bucket, source_object_name=name, source_region=service.region
    )
    moved = service.data_science.export_model_artifact(
        model_id, ExportModelArtifactDetails(artifact_export_details=source)
    )
    waiting.done(service, moved, "moving it into the model catalogue", deployment.wait)
    clear(service, deployment)


def check_stored(service: Service, deployment: Deployment, artifact: Artifact) -> None:
    """Its parts were read one after the other."""
    try:
        artifact.check(artifact.path.stat())
    except (UserError, OSError):
        clear(service, deployment)
        raise


def clear(service: Service, deployment: Deployment, keep: str = "") -> None:
    """The bucket is a way: nothing of this deployment stays there, be it of an earlier run that was killed."""
    storage, bucket = service.object_storage, deployment.models.bucket
    if not bucket:
        return
    namespace, prefix = storage.get_namespace().data, objects(deployment)
    for each in every(storage.list_multipart_uploads, namespace, bucket):
        if each.object.startswith(prefix) and each.object != keep:
            storage.abort_multipart_upload(namespace, bucket, each.object, each.upload_id)
    for each in storage.list_objects(namespace, bucket, prefix=prefix).data.objects:
        if each.name != keep:
            storage.delete_object(namespace, bucket, each.name)


def objects(deployment: Deployment) -> str:
    """What their names begin with."""
    return f"{bodies.US}/{deployment.name}/"


def upload_parts(service: Service, namespace: str, bucket: str, name: str, artifact: Artifact) -> None:
    """Those that an interrupted run had uploaded already stay."""
    storage = service.object_storage
    columns = (TextColumn(f"uploading to {escape(bucket)}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=artifact.size)
        how = {"part_size": PART_BYTES, "progress_callback": lambda sent: bar.advance(task, sent)}
        upload, where = UploadManager(storage), (namespace, bucket, name, str(artifact.path))
        for each in every(storage.list_multipart_uploads, namespace, bucket):
            if each.object == name:
                upload.resume_upload_file(*where, each.upload_id, **how)
                return
        upload.upload_file(*where, **how)
