"""Profiles, keys and sessions that sign requests to Oracle Cloud, and the message for each that cannot."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization

from deploy.oci.client import Service, credentials
from deploy.oci.deployment import Account
from tests.support.oci_stand_in import OciStandIn, private_key
from triton_transformers.settings import UserError


@pytest.fixture
def account(tmp_path):
    """Return a function that writes a profile with one text replaced, and returns an account with it."""

    def write(old: str = "", new: str = "", **settings: str) -> Account:
        path = OciStandIn(tmp_path).config_file()
        path.write_text(path.read_text().replace(old, new) if old else path.read_text())
        return Account(**{"config_file": str(path), **settings})

    return write


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[DEFAULT]", "[PROD]", "/config has no profile DEFAULT; it has PROD"),
        ("user=ocid1.user.oc1..tests\ntenancy", "tenant", "tenancy is missing, user is missing"),
        ("[DEFAULT]", "", "has no profiles"),
        ("user=ocid1.user.oc1..tests\n", "", "user is missing"),
        ("tenancy=ocid1.tenancy.oc1..tests", "tenancy=x", "tenancy is malformed"),
        ("key.pem", "nothing.pem", "its key_file cannot be read"),
        ("key.pem", "config", "key_file is not a private key"),
        ("region=us-ashburn-1\n", "", "region is missing"),
        ("region=", "security_token_file=/nowhere\nregion=", "/nowhere cannot be read"),
        ("key_file=", "security_token_file=/nowhere\nother=", "key_file is missing"),
    ],
)
def test_wrong_profile_is_refused(account, old, new, message):
    with pytest.raises(UserError) as error:
        credentials(account(old, new))
    assert message in str(error.value)
    assert "PRIVATE" not in str(error.value)


@pytest.mark.parametrize(
    ("phrase", "message"),
    [
        ("", "its key is encrypted. Set pass_phrase there"),
        ("pass_phrase=wrong\n", "or pass_phrase is not its pass phrase"),
    ],
)
def test_encrypted_key_needs_its_pass_phrase(account, tmp_path, phrase, message):
    encrypted = account("[DEFAULT]\n", f"[DEFAULT]\n{phrase}")
    encryption = serialization.BestAvailableEncryption(b"right")
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "key.pem").write_bytes(private_key("usual").private_bytes(*formats, encryption))
    with pytest.raises(UserError, match=message):
        credentials(encrypted)


def test_session_token_signs(account, tmp_path):
    """`oci session authenticate` writes such a profile."""
    (tmp_path / "token").write_text("a.token.b")
    session = account("region=", f"security_token_file={tmp_path}/token\nregion=")
    assert credentials(session)[1].api_key == "ST$a.token.b"


def test_missing_configuration_or_profile_is_refused(account):
    with pytest.raises(UserError, match="config has no profile OTHER; it has DEFAULT"):
        credentials(account(profile="OTHER"))
    with pytest.raises(UserError, match="/nowhere/config: no such file\\. Write one with `oci setup config`"):
        credentials(Account(config_file="/nowhere/config"))


def test_missing_resource_principal_is_refused(monkeypatch):
    monkeypatch.delenv("OCI_RESOURCE_PRINCIPAL_VERSION", raising=False)
    with pytest.raises(UserError, match=r"account\.auth = 'resource_principal': this machine has none"):
        credentials(Account(auth="resource_principal"))


def test_region_of_deployment_toml_is_used(account):
    service = Service.connect(account("region=us-ashburn-1\n", region="eu-frankfurt-1"))
    assert service.data_science.base_client.endpoint.startswith("https://datascience.eu-frankfurt-1.")
