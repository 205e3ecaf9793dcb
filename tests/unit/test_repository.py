"""What SYSTEMS and its companions mean, and what is in place."""

from __future__ import annotations

import json

import pytest

from scripts.common.settings import EXAMPLE, Settings, UserError, dotenv_values
from scripts.models import assemble as repository
from scripts.models.catalogue import RECIPES, SYSTEMS, named
from scripts.models.sources import Folder, Hub
from scripts.models.tasks import task_of
from scripts.stack.docker.compose import Compose


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "models").mkdir()
    return Settings(dotenv_values(EXAMPLE) | {"MODEL_REPOSITORY": str(tmp_path / "models")})


def asked_for(settings: Settings, name: str, **more: str):
    settings = Settings(settings | more)
    return repository.asked_for(name, settings, settings.path("MODEL_REPOSITORY"))


def put(
    settings: Settings, name: str, identity: str, task: str = "text-classification", also: tuple = (), **more
) -> None:
    """A system as an earlier `make models` left it."""
    folder = settings.path("MODEL_REPOSITORY") / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").touch()
    record = {
        "system": name, "also": list(also), "task": task, "format": "onnx", "recipe": RECIPES[task].version,
        "files": [f"{name}/1/model.onnx"], "source": identity, "identity": identity,
    }  # fmt: skip
    (folder / "assembled.json").write_text(json.dumps(record | more))


def missing(settings: Settings, systems: str, **more: str) -> list[str]:
    return [each.name for each in repository.missing(Settings(settings | {"SYSTEMS": systems} | more))]


def test_the_catalogue_s_systems_can_be_made():
    for system in SYSTEMS.values():
        assert system.format in ("", *RECIPES[system.task].formats)
        for name in (system.name, *system.also):
            assert named(name) is system


def test_a_name_of_the_user_s_own_needs_weights(settings):
    with pytest.raises(UserError, match=r"no system 'pets'.*HF_MODEL=organisation/model, or SOURCE=folder"):
        asked_for(settings, "pets")
    assert asked_for(settings, "pets", HF_MODEL="a/b").source == Hub("a/b")
    assert asked_for(settings, "pets", HF_MODEL="a/b", HF_REVISION="v1").source == Hub("a/b", "v1")
    assert asked_for(settings, "pets", SOURCE="/some/where").source == Folder(settings.path("SOURCE") / "/some/where")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"HF_MODEL": "a/b", "SOURCE": "/c"}, "SOURCE and HF_MODEL both say where the weights are"),
        ({"HF_MODEL": "a/b", "TASK": "cooking"}, "TASK=cooking: must be one of"),
        ({"HF_MODEL": "a/b", "FORMAT": "gguf"}, "FORMAT=gguf: must be one of onnx, onnx-int8, python"),
    ],
)
def test_what_does_not_go_together_is_said(settings, more, sentence):
    with pytest.raises(UserError, match=sentence):
        asked_for(settings, "pets", **more)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "..", ".", "a/b", "*", "-x", "$(x)"])
def test_a_name_is_a_name(settings, name):
    with pytest.raises(UserError, match="is no name"):
        asked_for(settings, name, SOURCE="/some/where")


def test_a_part_of_a_system_is_not_made_anew(settings):
    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    for name, owner in (("pets_encoder", "pets"), ("falcon7b_stream", "falcon7b")):
        with pytest.raises(UserError, match=f"{name} is a part of {owner}"):
            asked_for(settings, name, SOURCE="/some/where")
    with pytest.raises(UserError, match="falcon7b is for text-generation: TASK=fill-mask takes another name"):
        asked_for(settings, "falcon7b", SOURCE="/some/where", TASK="fill-mask")


@pytest.mark.parametrize(
    ("made", "owner"),
    [
        ("gpt2", "gpt2_ensemble"),
        ("encoder", "embedding"),
        ("vit", "vit_ensemble"),
        ("pets_encoder", "pets"),
        ("theirs", "you"),
    ],
)
def test_what_belongs_to_another_is_not_overwritten(settings, tmp_path, made, owner):
    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    models = settings.path("MODEL_REPOSITORY")
    (models / "theirs").mkdir()
    (models / "theirs/config.pbtxt").touch()
    system = repository.System("new", "text-classification", Hub("a/b"))
    with pytest.raises(UserError, match=f"a model '{made}', which belongs to {owner}: choose another name"):
        repository.check_free(system, [tmp_path / made], models)
    repository.check_free(system, [tmp_path / "new", tmp_path / "new_encoder"], models)


def test_a_catalogue_s_system_of_the_user_s_weights_stays_theirs(settings):
    put(settings, "mistral7b", "/my/finetune 0123", task="text-generation", recipe="0")
    assert asked_for(settings, "mistral7b").source.path.as_posix() == "/my/finetune"


def test_one_that_was_killed_half_way_is_made_again(settings):
    put(settings, "pets", "a/b@123", recipe=repository.UNFINISHED)
    assert missing(settings, "pets") == ["pets"]


def test_weights_are_of_one_system(settings):
    with pytest.raises(UserError, match="HF_MODEL say which one system is meant"):
        missing(settings, "pets toys", HF_MODEL="a/b")


def test_what_is_in_place_stays_until_something_else_is_asked_for(settings):
    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    assert missing(settings, "pets") == []
    assert missing(settings, "pets_encoder") == []
    assert missing(settings, "pets", HF_MODEL="a/b") == []
    assert missing(settings, "pets", HF_MODEL="a/b", HF_REVISION="123") == []
    assert missing(settings, "pets", HF_MODEL="a/b", HF_REVISION="456") == ["pets"]
    assert missing(settings, "pets", HF_MODEL="c/d") == ["pets"]
    assert asked_for(settings, "pets", HF_MODEL="c/d").task == ""  # its config.json will tell
    assert asked_for(settings, "falcon7b", HF_MODEL="c/d").task == "text-generation"
    assert missing(settings, "pets", FORMAT="onnx-int8") == ["pets"]
    assert missing(settings, "pets", TASK="fill-mask") == ["pets"]


def test_what_lost_a_file_or_was_made_by_an_older_recipe_is_made_again(settings):
    put(settings, "pets", "a/b@123")
    put(settings, "toys", "/a/folder 0123456789abcdef", recipe="0")
    (settings.path("MODEL_REPOSITORY") / "pets/1/model.onnx").unlink()
    assert missing(settings, "pets toys") == ["pets", "toys"]
    assert asked_for(settings, "pets").source == Hub("a/b", "123")
    assert asked_for(settings, "toys").source.path.as_posix() == "/a/folder"


def test_a_model_of_the_user_s_own_is_left_alone(settings, capsys):
    folder = settings.path("MODEL_REPOSITORY") / "theirs"
    folder.mkdir()
    (folder / "config.pbtxt").write_text('backend: "python"')
    assert missing(settings, "theirs") == []
    assert "theirs: your own, left as it is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("RobertaForTokenClassification", "token-classification"),
        ("DistilBertForQuestionAnswering", "question-answering"),
        ("RobertaForMaskedLM", "fill-mask"),
        ("BertModel", "feature-extraction"),
        ("ViTForImageClassification", "image-classification"),
        ("MistralForCausalLM", "text-generation"),
        ("GPT2LMHeadModel", "text-generation"),
    ],
)
def test_the_task_is_told_by_the_architecture(tmp_path, architecture, task):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert task_of(tmp_path) == task


def test_or_by_what_lies_beside_it_or_not_at_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTModel"]}))
    (tmp_path / "preprocessor_config.json").touch()
    assert task_of(tmp_path) == "image-feature-extraction"
    (tmp_path / "modules.json").touch()
    assert task_of(tmp_path) == "sentence-similarity"
    (tmp_path / "modules.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="say TASK"):
        task_of(tmp_path)


def test_the_image_has_what_the_models_need(settings):
    def source(systems: str, **more: str) -> str:
        return Compose(Settings(settings | {"SYSTEMS": systems} | more)).triton_source

    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    assert source("embedding pets") == "pypi"
    encoder = settings.path("MODEL_REPOSITORY") / "pets_encoder"
    encoder.mkdir()
    (encoder / "config.pbtxt").write_text('name: "pets_encoder"\nbackend: "transformers"\n')
    assert source("embedding pets") == "pypi-transformers"
    assert source("falcon7b") == "pypi-transformers"
    assert source("pets", TRITON_SOURCE="ngc") == "ngc"
