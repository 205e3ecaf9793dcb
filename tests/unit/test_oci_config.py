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


def test_committed_file_needs_three_values():
    with pytest.raises(UserError) as error:
        read(COMMITTED)
    assert [line.split()[0] for line in lines_of(error)] == list(REQUIRED)


def test_committed_file_is_enough_to_send_requests():
    deployment = read(COMMITTED, TO_ASK)
    assert deployment.models.systems == ["gpt2_ensemble"]
    assert (deployment.instances.count, deployment.tags, deployment.wait.poll_seconds) == (1, {}, 10)


def test_finding_a_deployment_needs_its_compartment():
    with pytest.raises(UserError) as error:
        read(COMMITTED, TO_FIND)
    assert [line.split()[0] for line in lines_of(error)] == ["deployment.compartment_id"]


def test_misspelled_key_names_the_right_one(tmp_path):
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, instances__ocpus=None, instances__ocpu=2, wait__nothing=1))
    assert lines_of(error) == [
        "instances.ocpu is unknown: did you mean instances.ocpus?",
        "wait.nothing is unknown: remove it",
    ]


def test_complete_file_is_read(tmp_path):
    path = write_deployment(tmp_path, tags__team="search", container__environment={"TRITON_LOG_VERBOSE": "1"})
    deployment = read(path)
    assert deployment.name == "triton-transformers"
    assert deployment.models.systems == ["gpt2_ensemble"]
    assert deployment.container.environment == {"TRITON_LOG_VERBOSE": "1"}
    assert (deployment.tags, deployment.wait.minutes) == ({"team": "search"}, 60)


def test_sections_with_defaults_may_be_left_out(tmp_path):
    path = write_deployment(tmp_path)
    kept = [part for part in path.read_text().split("[") if not part.startswith(("account", "logs", "tags", "wait"))]
    path.write_text("[".join(kept))
    assert read(path).account.profile == "DEFAULT"


def test_missing_sections_report_their_required_keys(tmp_path):
    (tmp_path / "deployment.toml").write_text("")
    with pytest.raises(UserError) as error:
        read(tmp_path / "deployment.toml")
    keys = [line.split()[0] for line in lines_of(error)]
    assert keys == [
        "deployment.name",
        "deployment.compartment_id",
        "deployment.project_id",
        "models.systems",
        "container.image",
        "instances.shape",
    ]


def test_profiles_are_those_of_slim_images():
    assert get_args(Container.model_fields["profile"].annotation) == PROFILES


NAME = "must be 1 to 255 letters, digits, blanks, '_', '-' and '.', the first a letter, a digit or '_'"
IMAGE = "<region>.ocir.io/<namespace>/<repository>:<tag>"
SHAPES = "`oci data-science model-deployment-shape list`"
WRONG = [
    (
        {"deployment__compartment_id": None},
        "deployment.compartment_id is empty: must be an identifier like ocid1.compartment...",
    ),
    (
        {"deployment__compartment_id": "mine"},
        "deployment.compartment_id = 'mine': must be an identifier like ocid1.compartment...",
    ),
    (
        {"deployment__project_id": "ocid1.project.oc1..x"},
        "deployment.project_id = 'ocid1.project.oc1..x': must be an identifier like ocid1.datascienceproject...",
    ),
    ({"deployment__name": ""}, f"deployment.name is empty: {NAME}"),
    *[
        ({"deployment__name": name}, f"deployment.name = '{name}': {NAME}")
        for name in ("x" * 256, "gpt2 [/prod]", "  ", "gpt\u00e9")
    ],
    ({"deployment__name": 3}, "deployment.name = 3: must be a valid string"),
    ({"deployment__title": "x"}, "deployment.title is unknown: remove it"),
    ({"models__systems": []}, "models.systems is empty: must be a list of systems, as in SYSTEMS (docs/models.md)"),
    ({"models__systems": "gpt2"}, "models.systems = 'gpt2': must be a valid list"),
    ({"models__systems": ["a b"]}, "models.systems = ['a b']: 'a b' cannot be the name of a system"),
    ({"models__systems": ["own", "own"]}, "models.systems = ['own', 'own']: must name each system once"),
    ({"container__image": "triton:1.0"}, f"container.image = 'triton:1.0': must be {IMAGE}"),
    (
        {"container__image": "iad.ocir.io/tests/Triton:1.0"},
        f"container.image = 'iad.ocir.io/tests/Triton:1.0': must be {IMAGE}",
    ),
    ({"container__profile": "neuron"}, "container.profile = 'neuron': must be 'cpu' or 'cuda'"),
    (
        {"container__profile": "cuda"},
        "instances.shape = 'VM.Standard.E4.Flex': has no GPU, which container.profile = 'cuda' requires",
    ),
    ({"container__cmd": [1]}, "container.cmd.0 = 1: must be a valid string"),
    ({"container__environment": {"A_B": 1}}, "container.environment.A_B = 1: must be a valid string"),
    ({"account__auth": "key"}, "account.auth = 'key': must be 'config' or 'resource_principal'"),
    ({"instances__shape": ""}, f"instances.shape is empty: must be one that {SHAPES} lists"),
    ({"instances__ocpus": 0}, "instances.ocpus = 0: must be at least 1"),
    ({"instances__ocpus": "2"}, "instances.ocpus = '2': must be a valid number"),
    ({"instances__memory_gb": None}, "instances.memory_gb = 0: must be at least 1"),
    ({"instances__count": 0}, "instances.count = 0: must be at least 1"),
    ({"instances__count": 1.5}, "instances.count = 1.5: must be a valid integer"),
    ({"instances__count": True}, "instances.count = True: must be a valid integer"),
    ({"instances__bandwidth_mbps": 5}, "instances.bandwidth_mbps = 5: must be at least 10"),
    ({"instances__subnet_id": "x"}, "instances.subnet_id = 'x': must be an identifier like ocid1.subnet..."),
    (
        {"logs__access_id": "ocid1.log.oc1.iad.x"},
        "logs.group_id is empty: set it to the group of logs.access_id and logs.predict_id, ocid1.loggroup...",
    ),
    (
        {"logs__group_id": "ocid1.loggroup.oc1.iad.x"},
        "logs.group_id = 'ocid1.loggroup.oc1.iad.x': set logs.access_id or logs.predict_id too, or leave all empty",
    ),
    ({"wait__minutes": 0}, "wait.minutes = 0: must be at least 1"),
    ({"wait__minutes": float("nan")}, "wait.minutes = nan: must be a finite number"),
    ({"wait__poll_seconds": 0}, "wait.poll_seconds = 0: must be at least 0.1"),
    ({"wait__poll_seconds": float("inf")}, "wait.poll_seconds = inf: must be a finite number"),
    ({"tags": {"team": 1}}, "tags.team = 1: must be a valid string"),
    ({"tags": 1}, "[tags] = 1: must be a section"),
    ({"logs": 1}, "[logs] = 1: must be a section"),
    ({"spare": {}}, "[spare] is unknown: remove it"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[f"{next(iter(s))}-{n}" for n, (s, _) in enumerate(WRONG)])
def test_wrong_value_is_one_line(tmp_path, settings, message):
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, **settings))
    assert lines_of(error) == [message]


def test_wrong_type_is_reported_where_the_value_is_not_needed(tmp_path):
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, container__cmd=[1], container__image="x"), TO_ASK)
    assert lines_of(error) == ["container.cmd.0 = 1: must be a valid string"]


def test_registrys_second_address_is_accepted(tmp_path):
    image = "ocir.us-ashburn-1.oci.oraclecloud.com/tests/triton:1.0"
    assert read(write_deployment(tmp_path, container__image=image)).container.image == image


def test_all_problems_are_reported_at_once(tmp_path):
    wrong = {"instances__count": 0, "container__image": "x", "deployment__name": 1, "models__systems": ["/"]}
    with pytest.raises(UserError) as error:
        read(write_deployment(tmp_path, container__profile="cuda", **wrong))
    assert len(lines_of(error)) == 5


def test_shape_of_fixed_size_needs_no_size(tmp_path):
    path = write_deployment(tmp_path, container__profile="cuda", instances__shape="VM.GPU.A10.1", instances__ocpus=0)
    assert not read(path).instances.flexible


@pytest.mark.parametrize("text", ["[a", "a = \xff"])
def test_invalid_toml_is_refused(tmp_path, text):
    (tmp_path / "deployment.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="is not valid TOML: "):
        read(tmp_path / "deployment.toml")


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "deployment.toml")
