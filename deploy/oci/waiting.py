"""Wait for what Oracle Cloud does in the background, and show its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import oci
from oci.data_science.models import ModelDeployment, WorkRequest
from oci.exceptions import MaximumWaitTimeExceeded, ServiceError
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.oci.client import Service, list_all
from deploy.oci.deployment import Wait
from triton_transformers.cli import err
from triton_transformers.settings import UserError

WORK_REQUEST_HEADER = "opc-work-request-id"
PASSING_STATES = ("CREATING", "UPDATING", "DELETING")
FINAL_STATUSES = ("SUCCEEDED", "FAILED", "CANCELED")
CONTINUES = "It continues in Oracle Cloud, and the same command waits for it again"


def wait_for_work(service: Service, response: oci.Response, action: str, wait: Wait) -> None:
    """Wait until the work request that a response names has succeeded, and print the messages of its log."""
    work_id = response.headers.get(WORK_REQUEST_HEADER)
    if not work_id:
        raise UserError(f"{action}: Oracle Cloud named no work request. Run the same command again in a few minutes")
    printed = 0

    def is_final(request: WorkRequest) -> bool:
        nonlocal printed
        show(request.percent_complete)
        with suppress(ServiceError):  # the wait does not depend on the log
            entries = sorted(list_all(service.data_science.list_work_request_logs, work_id), key=lambda e: e.timestamp)
            for entry in entries[printed:]:
                err.print(f"  [dim]{escape(entry.message)}[/]")
            printed = len(entries)
        return request.status in FINAL_STATUSES

    with progress(action) as show:
        request = wait_until(service, partial(service.data_science.get_work_request, work_id), is_final, action, wait)
    if request.status != "SUCCEEDED":
        errors = service.data_science.list_work_request_errors(work_id).data
        reason = "; ".join(error.message.rstrip(".") for error in errors) or "Oracle Cloud gives no reason"
        raise UserError(
            f"{action} {request.status.lower()}: {reason}. The container's output is in the log that logs.predict_id "
            "names, if it is set (docs/oci.md)"
        )


def wait_until_settled(service: Service, deployment_id: str, action: str, wait: Wait) -> ModelDeployment:
    """Return a deployment once it is in a state that does not change by itself."""

    def is_settled(deployment: ModelDeployment) -> bool:
        return deployment.lifecycle_state not in PASSING_STATES

    get = partial(service.data_science.get_model_deployment, deployment_id)
    if is_settled(deployment := get().data):
        return deployment
    with progress(action):
        return wait_until(service, get, is_settled, action, wait)


def wait_until(
    service: Service, get: Callable[[], oci.Response], is_over: Callable[[Any], bool], action: str, wait: Wait
) -> Any:
    """Repeat a request until `is_over` is true of the data that it returns, and return the data."""
    try:
        return oci.wait_until(
            service.data_science,
            get(),
            fetch_func=lambda response: get(),
            evaluate_response=lambda answer: is_over(answer.data),
            max_interval_seconds=wait.poll_seconds,
            max_wait_seconds=wait.minutes * 60,
        ).data
    except MaximumWaitTimeExceeded:
        raise UserError(f"{action}: not finished after {wait.minutes:g} minutes (wait.minutes). {CONTINUES}") from None


@contextmanager
def progress(action: str) -> Iterator[Callable[[float | None], None]]:
    """Show a progress bar, and yield a function that takes the percentage done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    if not err.is_terminal:
        err.print(action)
    try:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task(action, total=None)
            yield lambda percent: bar.update(task, total=100, completed=percent or 0)
    except KeyboardInterrupt:
        err.print(f"\n{CONTINUES}.")
        raise
