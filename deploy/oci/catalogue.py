"""The model catalogue: an entry of ours for each zip, found again by the zip's hash."""

from __future__ import annotations

from oci.data_science.models import (
    ArtifactExportDetailsObjectStorage,
    ExportModelArtifactDetails,
    ModelSummary,
)
from oci.exceptions import ServiceError
from oci.object_storage import UploadManager
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.oci import bodies, limits, waiting
from deploy.oci.artifact import Artifact
from deploy.oci.config import Deployment
from deploy.oci.service import Service, every
from scripts.cli import err, out

WORK = "opc-work-request-id"
PART_BYTES = 128 * 2**20


def put(service: Service, deployment: Deployment, artifact: Artifact) -> str:
    """The model of this zip: one that is there, or one that is made. An artifact is never changed once it is there."""
    for model in ours(service, deployment):
        if model.lifecycle_state != "ACTIVE" or (model.freeform_tags or {}).get(bodies.ARTIFACT) != artifact.sha256:
            continue
        size = artifact_size(service, model.id)
        if size == artifact.size:
            out.print(f"model       {model.id}, as it was")
            return model.id
        if size is None:  # interrupted before it was uploaded
            return upload(service, deployment, artifact, model.id)
    model_id = service.data_science.create_model(bodies.create_model(deployment, artifact.sha256)).data.id
    return upload(service, deployment, artifact, model_id)


def ours(service: Service, deployment: Deployment) -> list[ModelSummary]:
    """Newest first."""
    found = every(
        service.data_science.list_models,
        deployment.deployment.compartment_id,
        display_name=deployment.name,
        sort_by="timeCreated",
        sort_order="DESC",
    )
    return [model for model in found if is_ours(model, deployment) and model.lifecycle_state != "DELETED"]


def is_ours(made, deployment: Deployment) -> bool:
    tags = made.freeform_tags or {}
    return tags.get(bodies.MADE_BY) == bodies.US and tags.get(bodies.DEPLOYED_AS) == deployment.name


def artifact_size(service: Service, model_id: str) -> int | None:
    """None where it has none."""
    try:
        return int(service.data_science.head_model_artifact(model_id).headers["content-length"])
    except ServiceError as error:
        if error.status == 404:
            return None
        raise


def upload(service: Service, deployment: Deployment, artifact: Artifact, model_id: str) -> str:
    if artifact.size > limits.DIRECT_BYTES:
        by_bucket(service, deployment, artifact, model_id)
    else:
        with err.status(f"uploading {artifact.path.name}, {decimal(artifact.size)}"), artifact.path.open("rb") as file:
            service.data_science.create_model_artifact(
                model_id, file, content_disposition=f'attachment; filename="{artifact.path.name}"'
            )
    out.print(f"model       {model_id}, {decimal(artifact.size)} uploaded")
    return model_id


def by_bucket(service: Service, deployment: Deployment, artifact: Artifact, model_id: str) -> None:
    """In parts to Object Storage, from where the catalogue takes it itself; then the bucket is as it was."""
    storage, bucket = service.object_storage, deployment.models.bucket
    namespace = storage.get_namespace().data
    name = f"{bodies.US}-{artifact.sha256[:16]}.zip"
    if stored_size(service, namespace, bucket, name) != artifact.size:
        upload_parts(service, namespace, bucket, name, artifact)
    source = ArtifactExportDetailsObjectStorage(
        namespace=namespace, source_bucket=bucket, source_object_name=name, source_region=service.region
    )
    moved = service.data_science.export_model_artifact(
        model_id, ExportModelArtifactDetails(artifact_export_details=source)
    )
    waiting.done(service, moved.headers[WORK], "moving it into the model catalogue", deployment.wait)
    storage.delete_object(namespace, bucket, name)


def upload_parts(service: Service, namespace: str, bucket: str, name: str, artifact: Artifact) -> None:
    """Those that an interrupted run had uploaded already stay."""
    storage = service.object_storage
    columns = (TextColumn(f"uploading to {bucket}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=artifact.size)
        how = {"part_size": PART_BYTES, "progress_callback": lambda sent: bar.advance(task, sent)}
        upload, where = UploadManager(storage), (namespace, bucket, name, str(artifact.path))
        for each in every(storage.list_multipart_uploads, namespace, bucket):
            if each.object == name:
                upload.resume_upload_file(*where, each.upload_id, **how)
                return
        upload.upload_file(*where, **how)


def stored_size(service: Service, namespace: str, bucket: str, name: str) -> int | None:
    try:
        found = service.object_storage.head_object(namespace, bucket, name)
    except ServiceError as error:
        if error.status == 404:
            return None
        raise
    return int(found.headers["content-length"])
