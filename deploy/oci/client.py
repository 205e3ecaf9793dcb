"""Oracle Cloud's services: who signs what they are asked, and what their errors mean to whoever typed the command."""

from __future__ import annotations

import configparser
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oci
import requests
from oci.auth.signers import SecurityTokenSigner, get_resource_principals_signer
from oci.data_science import DataScienceClient
from oci.exceptions import (
    ClientError,
    ConfigFileNotFound,
    ConnectTimeout,
    InvalidConfig,
    InvalidPrivateKey,
    MissingPrivateKeyPassphrase,
    MultipartUploadError,
    ProfileNotFound,
    RequestException,
    ServiceError,
)
from oci.object_storage import ObjectStorageClient

from deploy.oci.deployment import Account
from scripts.common.cli import err
from scripts.common.settings import UserError

# To connect, and to answer.
TIMEOUT_S = (10, 60)
UPLOAD_TIMEOUT_S = (10, 600)  # a large artifact is taken in before there is an answer
ASKING = "asking Oracle Cloud"
NETWORK = "check the network, a proxy in https_proxy, and account.region"
LIMITS = ("LimitExceeded", "QuotaExceeded", "OutOfHostCapacity")


@dataclass
class Service:
    data_science: DataScienceClient
    object_storage: ObjectStorageClient
    signer: Any
    region: str

    @classmethod
    def of(cls, account: Account) -> Service:
        config, signer = credentials(account)
        region = account.region or config.get("region") or getattr(signer, "region", "")
        if not region:
            raise UserError("account.region is empty, and what signs for you does not say one either")
        common = {"signer": signer, "retry_strategy": oci.retry.DEFAULT_RETRY_STRATEGY}  # some requests have none else
        special = {"service_endpoint": account.endpoint} if account.endpoint else {}
        config = config | {"region": region}
        return cls(
            DataScienceClient(config, timeout=TIMEOUT_S, **common, **special),
            ObjectStorageClient(config, timeout=UPLOAD_TIMEOUT_S, **common),
            signer,
            region,
        )

    @contextlib.contextmanager
    def patient(self) -> Iterator[DataScienceClient]:
        client = self.data_science.base_client
        client.timeout = UPLOAD_TIMEOUT_S
        try:
            yield self.data_science
        finally:
            client.timeout = TIMEOUT_S

    def reach(self) -> None:
        """Whether there is a way to it at all: the SDK would ask for a minute and a half, in silence."""
        address = self.data_science.base_client.endpoint.removesuffix("/20190101")
        try:
            with err.status(ASKING):
                requests.head(address, timeout=TIMEOUT_S[0], allow_redirects=False)
        except requests.RequestException as error:
            raise UserError(f"{address} does not answer ({type(error).__name__}): {NETWORK}") from None


def credentials(account: Account) -> tuple[dict[str, str], Any]:
    """The configuration and the signer. No message holds anything of a key."""
    if account.auth == "resource_principal":
        try:
            return {}, get_resource_principals_signer()
        except OSError:
            raise UserError(
                "account.auth = 'resource_principal': there is none here. Notebook sessions and jobs of OCI's have "
                "one; elsewhere say 'config'"
            ) from None
    where = f"profile {account.profile} of {account.config_file}"
    try:
        config = oci.config.from_file(str(Path(account.config_file).expanduser()), account.profile)
        config |= {"region": account.region} if account.region else {}
        if "security_token_file" in config:  # of `oci session authenticate`
            if "key_file" not in config:
                raise InvalidConfig({"key_file": "missing"})
            token = Path(config["security_token_file"]).expanduser().read_text()
            key = oci.signer.load_private_key_from_file(config["key_file"], config.get("pass_phrase"))
            return config, SecurityTokenSigner(token, key)
        oci.config.validate_config(config)
        return config, oci.signer.Signer.from_config(config)
    except ConfigFileNotFound:
        raise UserError(f"there is no {account.config_file}: `oci setup config` writes one (docs/oci.md)") from None
    except (ProfileNotFound, InvalidConfig) as error:
        there = profiles(account.config_file)
        if account.profile not in there:
            has = ", ".join(there) or "none"
            raise UserError(f"{account.config_file} has no profile {account.profile}; it has {has}") from None
        wrong = ", ".join(f"{name} is {what}" for name, what in sorted(error.args[0].items()))
        raise UserError(f"{where}: {wrong}") from None
    except configparser.Error:
        raise UserError(f"{account.config_file} is no configuration file: `oci setup config` writes one") from None
    except MissingPrivateKeyPassphrase:
        raise UserError(f"{where}: its key wants a pass_phrase, and there is none") from None
    except InvalidPrivateKey:
        raise UserError(f"{where}: its key_file is no private key, or its pass_phrase is another's") from None
    except (OSError, ClientError, RuntimeError) as error:
        named = getattr(error, "filename", None) or "its key_file"
        raise UserError(f"{where}: {named} cannot be read") from None


def profiles(path: str) -> list[str]:
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(Path(path).expanduser())
    return [*(["DEFAULT"] if parsed.defaults() else []), *parsed.sections()]


def every(listing: Callable, *arguments: Any, **options: Any) -> Iterator[Any]:
    """What a list of the service holds, page after page; the SDK's own paging repeats what is repeated already."""
    page: dict[str, str] = {}
    while True:
        answer = listed(listing, *arguments, **options, **page)
        yield from answer.data
        if not answer.has_next_page:
            return
        page = {"page": answer.next_page}


def listed(listing: Callable, *arguments: Any, **options: Any) -> oci.Response:
    """What is between here and Oracle Cloud may answer in its place, such as a proxy with a page to log in."""
    try:
        answer = listing(*arguments, **options)
        if all(any(getattr(each, name) is not None for name in each.attribute_map) for each in answer.data):
            return answer
    except (AttributeError, TypeError, ValueError):
        pass
    raise UserError("what answered is not Oracle Cloud: check account.endpoint, and a proxy in https_proxy")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What goes wrong in there, as a sentence."""
    try:
        yield
    except ServiceError as error:
        raise UserError(sentence(error)) from None
    except MultipartUploadError:
        raise UserError("a part of the zip could not be uploaded: the same command goes on with the others") from None
    except (ConnectTimeout, RequestException) as error:
        raise UserError(
            f"Oracle Cloud does not answer ({type(error).__name__}): {NETWORK}. What was begun is found again by the "
            "same command"
        ) from None


def sentence(error: ServiceError) -> str:
    said = (error.message or "").strip().rstrip(".")
    doing = (error.operation_name or "a request").replace("_", " ")
    told = f" (opc-request-id {error.request_id or 'unknown'})"
    if error.code in LIMITS:
        return (
            f"a limit of your tenancy is reached at {doing}: {said}. Take a smaller instances.shape or count, or "
            f"ask for more under Governance, Limits in the console{told}"
        )
    match error.status:
        case 401:
            what = (
                "Oracle Cloud does not take the signature (401): check user, tenancy, fingerprint and key_file of your "
                "profile, that the public key is uploaded, and this machine's clock; a session that has ended goes on "
                "with `oci session refresh`"
            )
        case 404:
            what = (
                f"not there, or not allowed to you, at {doing} (404): check the identifiers and the region in "
                "deployment.toml, and the policies of docs/oci.md"
            )
        case 409:
            what = f"something is in the way of {doing} (409): {said}. Run the same command again when it is done"
        case 429:
            what = f"too many requests at {doing} (429), also after waiting: run the same command again in a minute"
        case status if status >= 500:
            what = f"Oracle Cloud failed at {doing} ({status}): run the same command again in a few minutes"
        case status:
            what = f"Oracle Cloud refused {doing} ({status} {error.code}): {said}"
    return what + told
