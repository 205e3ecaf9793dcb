"""Waiting for what Oracle Cloud does by itself, with what it says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from oci import Response
from oci.data_science.models import ModelDeployment, WorkRequest
from oci.exceptions import ServiceError
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.oci.client import Service, every
from deploy.oci.deployment import Wait
from scripts.common.cli import err
from scripts.common.settings import UserError

WORK = "opc-work-request-id"
UNSETTLED = ("CREATING", "UPDATING", "DELETING")
ENDED = ("SUCCEEDED", "FAILED", "CANCELED")
GOES_ON = "It goes on in Oracle Cloud, and the same command waits for it again"


def done(service: Service, begun: Response, what: str, wait: Wait) -> None:
    """Until the work request of an answer has succeeded."""
    work = begun.headers.get(WORK)
    if not work:
        raise UserError(f"{what}: Oracle Cloud does not say how it goes. Run the same command again in a few minutes")
    with progress(what) as show:
        told = 0
        for _ in polls(what, wait):
            request: WorkRequest = service.data_science.get_work_request(work).data
            show(request.percent_complete)
            with suppress(ServiceError):  # what it says on the way is not what is waited for
                logs = list(every(service.data_science.list_work_request_logs, work))
                for entry in sorted(logs, key=lambda entry: entry.timestamp)[told:]:
                    err.print(f"  [dim]{escape(entry.message)}[/]")
                told = len(logs)
            if request.status in ENDED:
                break
    if request.status != "SUCCEEDED":
        raise UserError(f"{what} {failure(service, request)}")


def failure(service: Service, request: WorkRequest) -> str:
    errors = service.data_science.list_work_request_errors(request.id).data
    said = "; ".join(error.message.rstrip(".") for error in errors) or "Oracle Cloud says no more than that"
    return (
        f"{request.status.lower()}: {said}. The container's own words are in the log that logs.predict_id names, if it "
        "names one (docs/oci.md)"
    )


def settled(service: Service, deployment_id: str, what: str, wait: Wait) -> ModelDeployment:
    """Until a deployment is in no state that passes by itself."""
    found: ModelDeployment = service.data_science.get_model_deployment(deployment_id).data
    if found.lifecycle_state in UNSETTLED:
        with progress(what):
            for _ in polls(what, wait):
                found = service.data_science.get_model_deployment(deployment_id).data
                if found.lifecycle_state not in UNSETTLED:
                    break
    return found


def polls(what: str, wait: Wait) -> Iterator[None]:
    deadline = time.monotonic() + wait.minutes * 60
    while True:
        yield
        if time.monotonic() + wait.poll_seconds > deadline:
            raise UserError(f"{what}: not within {wait.minutes:g} minutes (wait.minutes). {GOES_ON}")
        time.sleep(wait.poll_seconds)


@contextmanager
def progress(what: str) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    if not err.is_terminal:
        err.print(what)
    try:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task(what, total=None)
            yield lambda percent: bar.update(task, total=100, completed=percent or 0)
    except KeyboardInterrupt:
        err.print(f"\n{GOES_ON}.")
        raise
