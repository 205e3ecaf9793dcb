"""Call Oracle Cloud: sign requests, list resources, wait for work, and turn errors into messages for users."""

from __future__ import annotations

import configparser
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import oci
import requests
from oci.auth.signers import SecurityTokenSigner, get_resource_principals_signer
from oci.data_science import DataScienceClient
from oci.data_science.models import ModelDeployment, WorkRequest
from oci.exceptions import (
    ClientError,
    ConfigFileNotFound,
    ConnectTimeout,
    InvalidConfig,
    InvalidPrivateKey,
    MaximumWaitTimeExceeded,
    MissingPrivateKeyPassphrase,
    MultipartUploadError,
    ProfileNotFound,
    RequestException,
    ServiceError,
)
from oci.object_storage import ObjectStorageClient
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.oci import requests as bodies
from deploy.oci.deployment import Account, Deployment, Wait
from triton_transformers.cli import err
from triton_transformers.settings import UserError

# To connect, and to answer.
TIMEOUT_S = (10, 60)
UPLOAD_TIMEOUT_S = (10, 600)  # the service answers once it has stored the whole artifact
CONTACTING = "contacting Oracle Cloud"
NETWORK = "Check the network, the proxy in https_proxy, and account.region"
WORK_REQUEST_HEADER = "opc-work-request-id"
PASSING_STATES = ("CREATING", "UPDATING", "DELETING")
FINAL_STATUSES = ("SUCCEEDED", "FAILED", "CANCELED")
CONTINUES = "It continues in Oracle Cloud, and the same command waits for it again"
LIMITS = ("LimitExceeded", "QuotaExceeded", "OutOfHostCapacity")


@dataclass
class Service:
    data_science: DataScienceClient
    object_storage: ObjectStorageClient
    signer: Any
    region: str

    @classmethod
    def connect(cls, account: Account) -> Service:
        config, signer = credentials(account)
        region = account.region or config.get("region") or getattr(signer, "region", "")
        if not region:
            raise UserError("account.region is empty, and your credentials name no region: set it")
        # Set here, because some operations have no retry strategy of their own.
        common = {"signer": signer, "retry_strategy": oci.retry.DEFAULT_RETRY_STRATEGY}
        special = {"service_endpoint": account.endpoint} if account.endpoint else {}
        config = config | {"region": region}
        return cls(
            DataScienceClient(config, timeout=TIMEOUT_S, **common, **special),
            ObjectStorageClient(config, timeout=UPLOAD_TIMEOUT_S, **common),
            signer,
            region,
        )

    @contextlib.contextmanager
    def with_upload_timeout(self) -> Iterator[DataScienceClient]:
        client = self.data_science.base_client
        client.timeout = UPLOAD_TIMEOUT_S
        try:
            yield self.data_science
        finally:
            client.timeout = TIMEOUT_S

    def check_connection(self) -> None:
        """Raise at once if nothing answers: the SDK would retry for a minute and a half, in silence."""
        address = self.data_science.base_client.endpoint.removesuffix("/20190101")
        try:
            with err.status(CONTACTING):
                requests.head(address, timeout=TIMEOUT_S[0], allow_redirects=False)
        except requests.RequestException as error:
            raise UserError(f"{address} does not answer ({type(error).__name__}). {NETWORK}") from None


def credentials(account: Account) -> tuple[dict[str, str], Any]:
    """Return the SDK's configuration and the signer. Messages quote nothing from a key."""
    if account.auth == "resource_principal":
        try:
            return {}, get_resource_principals_signer()
        except OSError:
            raise UserError(
                "account.auth = 'resource_principal': this machine has none. Notebook sessions and jobs of OCI have "
                "one; elsewhere, set account.auth = 'config'"
            ) from None
    where = f"profile {account.profile} of {account.config_file}"
    try:
        config = oci.config.from_file(str(Path(account.config_file).expanduser()), account.profile)
        config |= {"region": account.region} if account.region else {}
        if "security_token_file" in config:  # `oci session authenticate` writes it
            if "key_file" not in config:
                raise InvalidConfig({"key_file": "missing"})
            token = Path(config["security_token_file"]).expanduser().read_text()
            key = oci.signer.load_private_key_from_file(config["key_file"], config.get("pass_phrase"))
            return config, SecurityTokenSigner(token, key)
        oci.config.validate_config(config)
        return config, oci.signer.Signer.from_config(config)
    except ConfigFileNotFound:
        raise UserError(f"{account.config_file}: no such file. Write one with `oci setup config`") from None
    except (ProfileNotFound, InvalidConfig) as error:
        known = profiles(account.config_file)
        if account.profile not in known:
            has = ", ".join(known) or "none"
            raise UserError(f"{account.config_file} has no profile {account.profile}; it has {has}") from None
        wrong = ", ".join(f"{name} is {problem}" for name, problem in sorted(error.args[0].items()))
        raise UserError(f"{where}: {wrong}. `oci setup config` writes a new one") from None
    except configparser.Error:
        raise UserError(f"{account.config_file} has no profiles. Write one with `oci setup config`") from None
    except MissingPrivateKeyPassphrase:
        raise UserError(f"{where}: its key is encrypted. Set pass_phrase there") from None
    except InvalidPrivateKey:
        raise UserError(f"{where}: key_file is not a private key, or pass_phrase is not its pass phrase") from None
    except (OSError, ClientError, RuntimeError) as error:
        file = getattr(error, "filename", None) or "its key_file"
        raise UserError(f"{where}: {file} cannot be read. Check its path and permissions") from None


def profiles(path: str) -> list[str]:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(Path(path).expanduser())
    return [*(["DEFAULT"] if parsed.defaults() else []), *parsed.sections()]


def list_all(operation: Callable, *arguments: Any, **options: Any) -> list[Any]:
    """Return all that a list operation has, page after page.

    Raise if another server answered in Oracle Cloud's place, such as a proxy with its login page. The SDK's own paging
    is not used, because it retries what the client has already retried.
    """
    records: list[Any] = []
    while True:
        try:
            response = operation(*arguments, **options)
            records += response.data
            if not all(any(getattr(record, name) is not None for name in record.attribute_map) for record in records):
                break
        except (AttributeError, TypeError, ValueError):
            break
        if not response.has_next_page:
            return records
        options["page"] = response.next_page
    raise UserError(
        "Another server answered in Oracle Cloud's place. Check account.endpoint and the proxy in https_proxy"
    )


def list_named(operation: Callable, deployment: Deployment, ignored_states: tuple[str, ...]) -> list[Any]:
    """Return the resources with the deployment's name, newest first, also those that others created."""
    place = deployment.deployment
    order = {"sort_by": "timeCreated", "sort_order": "DESC"}
    with err.status(CONTACTING):
        resources = list_all(operation, place.compartment_id, display_name=place.name, **order)
    return [resource for resource in resources if resource.lifecycle_state not in ignored_states]


def list_ours(operation: Callable, deployment: Deployment, ignored_states: tuple[str, ...]) -> list[Any]:
    resources = list_named(operation, deployment, ignored_states)
    return [resource for resource in resources if bodies.is_ours(resource, deployment)]


# --- work in the background -------------------------------------------------------------------------------------------


def wait_for_work(service: Service, response: oci.Response, action: str, wait: Wait) -> None:
    """Wait until the work request that a response names has succeeded, and print the messages of its log."""
    work_id = response.headers.get(WORK_REQUEST_HEADER)
    if not work_id:
        raise UserError(f"{action}: Oracle Cloud named no work request. Run the same command again in a few minutes")
    printed = 0

    def is_final(request: WorkRequest) -> bool:
        nonlocal printed
        show(request.percent_complete)
        with contextlib.suppress(ServiceError):  # the wait does not depend on the log
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


@contextlib.contextmanager
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


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def service_errors() -> Iterator[None]:
    """Turn an error of the service or of the network into a UserError."""
    try:
        yield
    except ServiceError as error:
        raise UserError(sentence(error)) from None
    except MultipartUploadError:
        raise UserError(
            "part of the zip could not be uploaded. Run the same command again: it uploads the rest"
        ) from None
    except (ConnectTimeout, RequestException) as error:
        raise UserError(
            f"Oracle Cloud does not answer ({type(error).__name__}). {NETWORK}. Then run the same command again: it "
            "continues what it began"
        ) from None


def sentence(error: ServiceError) -> str:
    reason = (error.message or "").strip().rstrip(".")
    operation = (error.operation_name or "a request").replace("_", " ")
    request_id = f" (opc-request-id {error.request_id or 'unknown'})"
    if error.code in LIMITS:
        return (
            f"{operation}: your tenancy has reached a limit: {reason}. Choose a smaller instances.shape or "
            f"instances.count, or request more under Governance, Limits in the console{request_id}"
        )
    match error.status:
        case 401:
            problem = (
                "Oracle Cloud rejects the signature (401). Check user, tenancy, fingerprint and key_file of your "
                "profile, that its public key is uploaded, and this machine's clock. Renew an expired session with "
                "`oci session refresh`"
            )
        case 404:
            problem = (
                f"{operation}: not found, or you have no permission (404). Check the identifiers and the region in "
                "deployment.toml, and the policies in docs/oci.md"
            )
        case 409:
            problem = f"{operation}: another operation is in the way (409): {reason}. Run the same command again later"
        case 429:
            problem = f"{operation}: too many requests (429), despite retries. Run the same command again in a minute"
        case status if status >= 500:
            problem = f"{operation}: Oracle Cloud failed ({status}). Run the same command again in a few minutes"
        case status:
            problem = f"{operation}: Oracle Cloud refused the request ({status} {error.code}): {reason}"
    return problem + request_id
