"""deployment.toml: what is committed, and what each wrong or missing value says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from deploy.oci import deployment as config
from deploy.oci.deployment import read
from scripts.common.settings import ROOT, UserError

COMMITTED = ROOT / "deploy/oci/deployment.toml"
IDS = {
    "deployment.compartment_id": "ocid1.compartment.oc1..tests",
    "deployment.project_id": "ocid1.datascienceproject.oc1.iad.tests",
    "container.image": "iad.ocir.io/tests/triton:1.0",
}


def written(folder: Path, **settings: object) -> Path:
    """The committed file with what is needed, and with these: section__name=value, None to leave it out."""
    table = tomllib.loads(COMMITTED.read_text())
    for name, value in {**IDS, **{name.replace("__", "."): value for name, value in settings.items()}}.items():
        section, _, key = name.partition(".")
        if key and value is None:
            del table[section][key]
        elif key:
            table.setdefault(section, {})[key] = value
        else:
            table[section] = value
    path = folder / "deployment.toml"
    path.write_text("".join(toml(name, value) for name, value in table.items()))
    return path


def toml(section: str, values: dict) -> str:
    nested = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {literal(value)}" for name, value in values.items() if name not in nested]
    tables = "".join(toml(f"{section}.{name}", value) for name, value in nested.items())
    return "\n".join([f"[{section}]", *lines, ""]) + tables


def literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)  # of a text, a number, a list of texts: TOML's too


def test_what_is_committed_wants_three_things():
    with pytest.raises(UserError) as error:
        read(COMMITTED)
    path, *lines = str(error.value).splitlines()
    assert path == f"{COMMITTED} cannot be used as it is:"
    assert [line.split()[0] for line in lines] == list(IDS)


def test_who_only_asks_needs_none_of_them(tmp_path):
    assert read(COMMITTED, config.TO_ASK).models.systems == ["gpt2_ensemble"]
    with pytest.raises(UserError) as error:
        read(COMMITTED, config.TO_FIND)
    assert [line.split()[0] for line in str(error.value).splitlines()[1:]] == ["deployment.compartment_id"]


def test_a_setting_by_nearly_its_name(tmp_path):
    with pytest.raises(UserError) as error:
        read(written(tmp_path, instances__ocpus=None, instances__ocpu=2, wait__nothing=1))
    lines = str(error.value).splitlines()[1:]
    assert lines == ["  instances.ocpu is no setting: is it ocpus?", "  wait.nothing is no setting"]


def test_with_them_it_is_read(tmp_path):
    deployment = read(written(tmp_path, tags__team="search", container__environment={"TRITON_LOG_VERBOSE": "1"}))
    assert deployment.name == "triton-transformers"
    assert deployment.models.systems == ["gpt2_ensemble"]
    assert deployment.container.environment == {"TRITON_LOG_VERBOSE": "1"}
    assert (deployment.tags, deployment.wait.minutes) == ({"team": "search"}, 60)


def test_sections_that_only_have_defaults_can_be_left_out(tmp_path):
    path = written(tmp_path)
    kept = [part for part in path.read_text().split("[") if not part.startswith(("account", "logs", "tags", "wait"))]
    path.write_text("[".join(kept))
    assert read(path).account.profile == "DEFAULT"


LONG = "x" * 256
PLAIN = "1 to 255 letters, digits, blanks, '_', '-' and '.'"
IMAGE = "must be <region>.ocir.io/<namespace>/<repository>:<tag>"
WRONG = [
    ({"deployment__compartment_id": None}, "deployment.compartment_id is empty: it is needed, as ocid1.compartment..."),
    ({"deployment__compartment_id": "mine"}, "deployment.compartment_id = 'mine': must be ocid1.compartment..."),
    (
        {"deployment__project_id": "ocid1.project.oc1..x"},
        "deployment.project_id = 'ocid1.project.oc1..x': must be ocid1.datascienceproject...",
    ),
    *[
        ({"deployment__name": name}, f"deployment.name = '{name}': must be {PLAIN}")
        for name in ("", LONG, "gpt2 [/prod]", "  ")
    ],
    ({"models__systems": ["own", "own"]}, "models.systems names one twice"),
    (
        {"container__image": "iad.ocir.io/tests/Triton:1.0"},
        f"container.image = 'iad.ocir.io/tests/Triton:1.0': {IMAGE}",
    ),
    ({"wait__minutes": float("nan")}, "wait.minutes = nan: must be at least 1"),
    ({"wait__poll_seconds": float("inf")}, "wait.poll_seconds = inf: must be at least 0.1"),
    ({"deployment__name": 3}, "deployment.name = 3: must be a text"),
    ({"deployment__nam": "x"}, "deployment.nam is no setting"),
    ({"models__systems": []}, "models.systems is empty: name at least one, as in SYSTEMS"),
    ({"models__systems": "gpt2"}, "models.systems = 'gpt2': must be a list of texts"),
    ({"models__systems": ["a b"]}, "models.systems holds 'a b', which is no name of a system"),
    (
        {"container__image": "triton:1.0"},
        f"container.image = 'triton:1.0': {IMAGE}",
    ),
    ({"container__profile": "neuron"}, "container.profile = 'neuron': must be one of cpu, cuda"),
    (
        {"container__profile": "cuda"},
        "instances.shape = 'VM.Standard.E4.Flex' has no GPU, which container.profile = 'cuda' wants",
    ),
    ({"container__cmd": [1]}, "container.cmd = [1]: must be a list of texts"),
    ({"container__environment": {"A_B": 1}}, "container.environment = {'A_B': 1}: must be a table of texts"),
    ({"account__auth": "key"}, "account.auth = 'key': must be one of config, resource_principal"),
    ({"instances__shape": ""}, "instances.shape is empty: `oci data-science model-deployment-shape list` names them"),
    ({"instances__ocpus": 0}, "instances.ocpus = 0: must be at least 1"),
    ({"instances__ocpus": "2"}, "instances.ocpus = '2': must be a number"),
    ({"instances__memory_gb": None}, "instances.memory_gb = 0: must be at least 1"),
    ({"instances__count": 0}, "instances.count = 0: must be at least 1"),
    ({"instances__count": 1.5}, "instances.count = 1.5: must be a whole number"),
    ({"instances__count": True}, "instances.count = True: must be a whole number"),
    ({"instances__bandwidth_mbps": 5}, "instances.bandwidth_mbps = 5: must be at least 10"),
    ({"instances__subnet_id": "x"}, "instances.subnet_id = 'x': must be ocid1.subnet..."),
    ({"logs__access_id": "ocid1.log.oc1.iad.x"}, "logs.group_id is empty: it is needed, as ocid1.loggroup..."),
    (
        {"logs__group_id": "ocid1.loggroup.oc1.iad.x"},
        "logs.group_id says where, and logs.access_id and logs.predict_id are empty: say at least one",
    ),
    ({"wait__minutes": 0}, "wait.minutes = 0: must be at least 1"),
    ({"wait__poll_seconds": 0}, "wait.poll_seconds = 0: must be at least 0.1"),
    ({"tags": {"team": 1}}, "[tags] = {'team': 1}: must be a table of texts"),
    ({"spare": {}}, "[spare]: there is no such section"),
]


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=[f"{next(iter(s))}-{n}" for n, (s, _) in enumerate(WRONG)])
def test_a_wrong_value_is_one_line(tmp_path, settings, said):
    with pytest.raises(UserError) as error:
        read(written(tmp_path, **settings))
    assert str(error.value).splitlines()[1:] == [f"  {said}"]


def test_the_registrys_other_address(tmp_path):
    image = "ocir.us-ashburn-1.oci.oraclecloud.com/tests/triton:1.0"
    assert read(written(tmp_path, container__image=image)).container.image == image


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        read(written(tmp_path, instances__count=0, container__image="x", deployment__name=1, models__systems=["/"]))
    assert len(str(error.value).splitlines()) == 5


def test_a_shape_with_its_own_size_wants_none(tmp_path):
    path = written(tmp_path, container__profile="cuda", instances__shape="VM.GPU.A10.1", instances__ocpus=0)
    assert not read(path).instances.flexible


@pytest.mark.parametrize(("text", "said"), [("[a", "is no TOML: "), ("a = \xff", "is no TOML: ")])
def test_no_toml(tmp_path, text, said):
    (tmp_path / "deployment.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=said):
        read(tmp_path / "deployment.toml")


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        read(tmp_path / "deployment.toml")
