"""deployment.toml: the committed file, and the message for each wrong or missing value."""

from __future__ import annotations

from typing import get_args

import pytest

from deploy.oci.deployment import TO_ASK, TO_FIND, Container, read
from scripts.stack.docker.slim import PROFILES
from tests.support.oci import COMMITTED, REQUIRED, write_deployment
from triton_transformers.settings import UserError


def lines_of(error: pytest.ExceptionInfo[UserError]) -> list[str]:
    first, *lines = str(error.value).splitlines()
    assert first.endswith("deployment.toml cannot be used as it is:")
    return [line.removeprefix("  ") for line in lines]


@pytest.mark.parametrize(
    ("needed", "keys"), [(("",), list(REQUIRED)), (TO_FIND, ["deployment.compartment_id"])], ids=["deploy", "destroy"]
)
def test_committed_file_lacks_what_only_the_user_knows(needed, keys):
    with pytest.raises(UserError) as error:
        read(COMMITTED, needed)
    assert [line.split()[0] for line in lines_of(error)] == keys


def test_empty_file_lacks_the_required_keys_of_all_sections(tmp_path):
    (tmp_path / "deployment.toml").write_text("")
    with pytest.raises(UserError) as error:
        read(tmp_path / "deployment.toml")
    required = "deployment.name deployment.compartment_id deployment.project_id models.systems container.image"
    assert [line.split()[0] for line in lines_of(error)] == [*required.split(), "instances.shape"]


def test_committed_file_is_enough_to_send_requests():
    deployment = read(COMMITTED, TO_ASK)
    assert deployment.models.systems == ["gpt2_ensemble"]
    assert (deployment.instances.count, deployment.tags, deployment.wait.poll_seconds) == (1, {}, 10)


def test_misspelled_key_names_the_right_one(tmp_path):
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, instances__ocpus=None, instances__ocpu=2, wait__nothing=1))
    assert lines_of(error) == [
        "instances.ocpu is unknown: did you mean instances.ocpus?",
        "wait.nothing is unknown: remove it",
    ]


def test_complete_file_is_read(tmp_path):
    changes = {"tags__team": "search", "container__environment": {"TRITON_LOG_VERBOSE": "1"}}
    changes |= {"container__profile": "cuda", "instances__shape": "VM.GPU.A10.1", "instances__ocpus": 0}
    changes |= {"container__image": "ocir.us-ashburn-1.oci.oraclecloud.com/tests/triton:1.0"}  # its second address
    path = write_deployment(tmp_path, **changes)
    kept = [part for part in path.read_text().split("[") if not part.startswith(("account", "logs", "wait"))]
    path.write_text("[".join(kept))
    deployment = read(path)
    assert (deployment.account.profile, deployment.instances.flexible) == ("DEFAULT", False)
    assert deployment.name == "triton-transformers"
    assert deployment.models.systems == ["gpt2_ensemble"]
    assert deployment.container.environment == {"TRITON_LOG_VERBOSE": "1"}
    assert (deployment.tags, deployment.wait.minutes) == ({"team": "search"}, 60)


def test_profiles_are_those_of_slim_images():
    assert get_args(Container.model_fields["profile"].annotation) == PROFILES


NAME = "must be 1 to 255 letters, digits, blanks, '_', '-' and '.', the first a letter, a digit or '_'"
IMAGE = "must be <region>.ocir.io/<namespace>/<repository>:<tag>"
SHAPES = "must be one that `oci data-science model-deployment-shape list` lists"


@pytest.mark.parametrize(
    ("key", "value", "message"),  # the message follows the key and the value, unless it has another key
    [
        ("deployment.compartment_id", None, "must be an identifier like ocid1.compartment..."),
        ("deployment.compartment_id", "mine", "must be an identifier like ocid1.compartment..."),
        ("deployment.project_id", "ocid1.project.oc1..x", "must be an identifier like ocid1.datascienceproject..."),
        *[("deployment.name", name, NAME) for name in ("", "x" * 256, "gpt2 [/prod]", "  ", "gpt\u00e9")],
        ("deployment.name", 3, "must be a valid string"),
        ("deployment.title", "x", "deployment.title is unknown: remove it"),
        ("models.systems", [], "must be a list of systems, as in SYSTEMS (docs/models.md)"),
        ("models.systems", "gpt2", "must be a valid list"),
        ("models.systems", ["a b"], "'a b' cannot be the name of a system"),
        ("models.systems", ["own", "own"], "must name each system once"),
        *[("container.image", image, IMAGE) for image in ("triton:1.0", "iad.ocir.io/tests/Triton:1.0")],
        ("container.profile", "neuron", "must be 'cpu' or 'cuda'"),
        (
            "container.profile",
            "cuda",
            "instances.shape = 'VM.Standard.E4.Flex': has no GPU, which container.profile = ",
        ),
        ("container.cmd", [1], "container.cmd.0 = 1: must be a valid string"),
        ("container.environment", {"A_B": 1}, "container.environment.A_B = 1: must be a valid string"),
        ("account.auth", "key", "must be 'config' or 'resource_principal'"),
        ("instances.shape", "", SHAPES),
        ("instances.ocpus", 0, "must be at least 1"),
        ("instances.ocpus", "2", "must be a valid number"),
        ("instances.memory_gb", None, "instances.memory_gb = 0: must be at least 1"),
        ("instances.count", 0, "must be at least 1"),
        ("instances.count", 1.5, "must be a valid integer"),
        ("instances.count", True, "must be a valid integer"),
        ("instances.bandwidth_mbps", 5, "must be at least 10"),
        ("instances.subnet_id", "x", "must be an identifier like ocid1.subnet..."),
        ("logs.access_id", "ocid1.log.oc1.iad.x", "logs.group_id is empty: set it to the group of logs.access_id and"),
        ("logs.group_id", "ocid1.loggroup.oc1.iad.x", "set logs.access_id or logs.predict_id too, or leave all empty"),
        ("wait.minutes", 0, "must be at least 1"),
        ("wait.minutes", float("nan"), "must be a finite number"),
        ("wait.poll_seconds", 0, "must be at least 0.1"),
        ("wait.poll_seconds", float("inf"), "must be a finite number"),
        ("tags", {"team": 1}, "tags.team = 1: must be a valid string"),
        ("tags", 1, "[tags] = 1: must be a section"),
        ("logs", 1, "[logs] = 1: must be a section"),
        ("spare", {}, "[spare] is unknown: remove it"),
    ],
)
def test_wrong_value_is_one_line(tmp_path, key, value, message):
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, **{key.replace(".", "__"): value}))
    (line,) = lines_of(error)
    shown = "is empty" if value in (None, "", []) else f"= {value!r}"
    assert line.startswith((message, f"{key} {shown}: {message}"))


def test_wrong_type_is_reported_where_the_value_is_not_needed(tmp_path):
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, container__cmd=[1], container__image="x"), TO_ASK)
    assert lines_of(error) == ["container.cmd.0 = 1: must be a valid string"]


def test_all_problems_are_reported_at_once(tmp_path):
    wrong = {"instances__count": 0, "container__image": "x", "deployment__name": 1, "models__systems": ["/"]}
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, container__profile="cuda", **wrong))
    assert len(lines_of(error)) == 5


@pytest.mark.parametrize("text", ["[a", "a = \xff"])
def test_missing_file_or_invalid_toml_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "deployment.toml")
    (tmp_path / "deployment.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="is not valid TOML: "):
        read(tmp_path / "deployment.toml")
