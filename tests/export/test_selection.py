"""The systems that settings select, those already in place, and the owner of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from export.assemble import check_free
from export.catalogue import RECIPES, SYSTEMS, System, find_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from export.record import UNFINISHED, read_record
from export.selection import check_formats, missing_systems, requested_system
from export.sources.source import Folder, Hub
from scripts.stack.docker.compose import Compose
from triton_transformers.settings import Settings, UserError


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "models").mkdir()
    return Settings.load().replace(MODEL_REPOSITORY=str(tmp_path / "models"))


def requested(settings: Settings, name: str, **chosen: str) -> System | None:
    settings = settings.replace(**chosen)
    return requested_system(name, settings, settings.model_repository)


def put(
    settings: Settings, name: str, identity: str, task: str = "text-classification", also: tuple = (), **fields
) -> None:
    """Write a system as an earlier `make models` left it."""
    folder = settings.model_repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").touch()
    record = {
        "system": name, "also": list(also), "task": task, "format": "onnx", "recipe": RECIPES[task].version,
        "files": [f"{name}/1/model.onnx"], "source": identity, "identity": identity,
    }  # fmt: skip
    (folder / "assembled.json").write_text(json.dumps(record | fields))


def missing(settings: Settings, systems: str, **chosen: str) -> list[str]:
    return [system.name for system in missing_systems(settings.replace(**chosen), systems.split())[0]]


def test_catalogue_systems_have_a_recipe_and_distinct_names():
    for system in SYSTEMS.values():
        assert system.format in ("", *RECIPES[system.task].formats)
        for name in system.names:
            assert find_system(name) is system


def test_own_name_requires_weights(settings):
    with pytest.raises(UserError, match=r"no system 'pets'.*HF_MODEL=organisation/model, or SOURCE=folder"):
        requested(settings, "pets")
    assert requested(settings, "pets", HF_MODEL="a/b").source == Hub("a/b")
    assert requested(settings, "pets", HF_MODEL="a/b", HF_REVISION="v1").source == Hub("a/b", "v1")
    assert requested(settings, "pets", SOURCE="/some/where").source == Folder(Path("/some/where"))


@pytest.mark.parametrize(
    ("name", "chosen", "sentence"),
    [
        ("pets", {"HF_MODEL": "a/b", "SOURCE": "/c"}, "SOURCE and HF_MODEL both name weights: set one of them"),
        ("pets", {"HF_MODEL": "a/b", "TASK": "cooking"}, "TASK=cooking: must be one of"),
        ("pets", {"HF_MODEL": "a/b", "FORMAT": "gguf"}, "FORMAT=gguf: must be one of onnx, int8, onnx-int8, python"),
        ("pets_encoder", {"SOURCE": "/c"}, "pets_encoder is a part of pets"),
        ("falcon7b_stream", {"SOURCE": "/c"}, "falcon7b_stream is a part of falcon7b"),
        (
            "falcon7b",
            {"SOURCE": "/c", "TASK": "fill-mask"},
            "falcon7b is for TASK=text-generation: choose another name for TASK=fill-mask",
        ),
    ],
)
def test_contradicting_settings_are_refused(settings, name, chosen, sentence):
    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    with pytest.raises(UserError, match=sentence):
        requested(settings, name, **chosen)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "..", ".", "a/b", "*", "-x", "$(x)"])
def test_unsafe_name_is_refused(settings, name):
    with pytest.raises(UserError, match="is not a valid name"):
        requested(settings, name, SOURCE="/some/where")


@pytest.mark.parametrize(
    ("model", "owner"),
    [
        ("gpt2", "gpt2_ensemble"),
        ("encoder", "embedding"),
        ("vit", "vit_ensemble"),
        ("pets_encoder", "pets"),
        ("theirs", "you"),
    ],
)
def test_models_of_another_system_are_not_overwritten(settings, model, owner):
    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    models = settings.model_repository
    (models / "theirs").mkdir()
    (models / "theirs/config.pbtxt").touch()
    with pytest.raises(UserError, match=f"new needs a model '{model}', which belongs to {owner}: choose another name"):
        check_free("new", [model], models)
    check_free("new", ["new", "new_encoder"], models)


def test_catalogue_system_keeps_the_weights_of_the_user(settings):
    put(settings, "mistral7b", "/my/finetune 0123", task="text-generation", recipe="0")
    assert requested(settings, "mistral7b").source.path.as_posix() == "/my/finetune"


def test_weights_for_two_systems_are_refused(settings):
    with pytest.raises(UserError, match="HF_MODEL can apply to one system only, and SYSTEMS has 2: name exactly one"):
        missing(settings, "pets toys", HF_MODEL="a/b")


def test_system_stays_until_the_settings_choose_another(settings):
    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    assert missing(settings, "pets") == []
    assert missing(settings, "pets_encoder") == []
    assert missing(settings, "pets", HF_MODEL="a/b") == []
    assert missing(settings, "pets", HF_MODEL="a/b", HF_REVISION="123") == []
    assert missing(settings, "pets", HF_MODEL="a/b", HF_REVISION="456") == ["pets"]
    assert missing(settings, "pets", HF_MODEL="c/d") == ["pets"]
    assert requested(settings, "pets", HF_MODEL="c/d").task == ""  # its config.json names it
    assert requested(settings, "falcon7b", HF_MODEL="c/d").task == "text-generation"
    assert missing(settings, "pets", FORMAT="onnx-int8") == ["pets"]
    assert missing(settings, "pets", TASK="fill-mask") == ["pets"]


def test_quality_of_int8_stays_until_the_settings_choose_another(settings):
    put(settings, "pets", "a/b@123", format="int8", min_quality=0.98)
    assert missing(settings, "pets", FORMAT="int8") == []
    assert missing(settings, "pets", MIN_QUALITY="0.98") == []
    assert missing(settings, "pets", MIN_QUALITY="0.99") == ["pets"]
    assert requested(settings, "pets").min_quality == 0.98  # for a newer recipe
    assert requested(settings, "pets", MIN_QUALITY="0.99").min_quality == 0.99
    assert requested(settings, "pets", FORMAT="onnx").min_quality is None
    put(settings, "embedding", "from the catalogue", format="int8", min_quality=0.97)
    compared = {"SYSTEM": "embedding", "FORMATS": "onnx int8"}
    assert requested(settings, "embedding.int8", **compared).min_quality == 0.97
    assert requested(settings, "embedding.onnx", **compared).min_quality is None


def test_generated_text_moves_to_the_engine_of_the_profile(settings):
    put(settings, "story", "a/b@123", task="text-generation", format="openvino")
    put(settings, "tale", "a/b@123", task="text-generation", format="python")
    assert missing(settings, "story tale") == []
    assert missing(settings, "story tale", PROFILE="cuda") == ["story"]
    assert requested(settings, "story", PROFILE="cuda").format == ""  # the default of the profile
    assert requested(settings, "story").format == "openvino"
    defaults = {profile: RECIPES["text-generation"].default_format(profile) for profile in ("cpu", "cuda", "neuron")}
    assert defaults == {"cpu": "openvino", "cuda": "vllm", "neuron": "python"}


def test_default_format_follows_the_profile(settings):
    """Transformers replaced OpenVINO, or was the default with AWS Neuron; nobody chose either."""
    for name, profile in (("story", "cpu"), ("tale", "neuron")):
        put(settings, name, "a/b@123", task="text-generation", format="python", default_on=profile)
        assert missing(settings, name, PROFILE=profile) == []
        assert missing(settings, name, PROFILE="cuda") == [name]
        assert missing(settings, name, PROFILE="cuda", FORMAT="python") == []
        assert requested(settings, name, PROFILE="cuda").format == ""
    assert missing(settings, "tale") == ["tale"]
    assert requested(settings, "story", SOURCE="/some/where").format == ""  # OpenVINO may export that
    put(settings, "pets", "a/b@123", default_on="cpu")
    assert missing(settings, "pets", PROFILE="cuda") == []


def test_format_of_another_profile_is_refused_even_if_it_is_in_place(settings):
    put(settings, "story", "a/b@123", task="text-generation", format="vllm")
    with pytest.raises(UserError, match="FORMAT=vllm does not run with PROFILE=cpu: leave FORMAT empty"):
        missing(settings, "story", FORMAT="vllm")
    assert missing(settings, "story", FORMAT="vllm", PROFILE="cuda") == []


def test_format_that_the_task_lacks_is_refused_before_weights_are_read(settings):
    chosen = {"HF_MODEL": "a/b", "TASK": "token-classification", "FORMAT": "vllm", "PROFILE": "cuda"}
    with pytest.raises(
        UserError, match=r"FORMAT=vllm is not available for mine \(token-classification\): set FORMAT to"
    ):
        requested(settings, "mine", **chosen)
    assert requested(settings, "mine", **chosen | {"FORMAT": "python"}).format == "python"


def test_system_that_is_interrupted_incomplete_or_of_an_older_recipe_is_assembled_again(settings, tmp_path):
    put(settings, "pets", "a/b@123")
    put(settings, "toys", f"{tmp_path}/a folder 0123456789abcdef", recipe="0")
    put(settings, "half", "a/b@123", recipe=UNFINISHED)
    (settings.model_repository / "pets/1/model.onnx").unlink()
    with pytest.raises(UserError, match=r"toys is incomplete, or of another release.* longer in .*/a folder: put them"):
        missing(settings, "toys")
    (tmp_path / "a folder").mkdir()
    assert missing(settings, "pets toys half") == ["pets", "toys", "half"]
    assert requested(settings, "pets").source == Hub("a/b", "123")
    assert requested(settings, "toys").source == Folder(tmp_path / "a folder")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"system": "pets", "files": []}'])
def test_unreadable_record_is_ignored(settings, content):
    put(settings, "pets", "a/b@123")
    (settings.model_repository / "pets/1/assembled.json").write_text(content)
    assert read_record("pets", settings.model_repository) is None


def test_own_model_is_left_alone(settings):
    folder = settings.model_repository / "theirs"
    folder.mkdir()
    (folder / "config.pbtxt").write_text('backend: "python"')
    assert missing_systems(settings, ["theirs"]) == ([], ["theirs: your own, left as it is"])


def of(architecture: str, **fields: object) -> dict:
    return {"architectures": [architecture], **fields}


ONE_LABEL = of("BertForSequenceClassification", id2label={"0": "LABEL_0"})
THREE_LABELS = ONE_LABEL | {"id2label": {"0": "a", "1": "b", "2": "c"}}


@pytest.mark.parametrize(
    ("config", "model_type", "task"),
    [
        (of("RobertaForTokenClassification"), "", "token-classification"),
        (of("DistilBertForQuestionAnswering"), "", "question-answering"),
        (of("RobertaForMaskedLM"), "", "fill-mask"),
        (of("BertModel"), "", "feature-extraction"),
        (of("ViTForImageClassification"), "", "image-classification"),
        (of("MistralForCausalLM"), "", "text-generation"),
        (of("GPT2LMHeadModel"), "", "text-generation"),
        (of("GitForCausalLM", model_type="git"), "", "image-text-to-text"),
        (of("Mistral4ForCausalLM", model_type="mistral4"), "", "text-generation"),
        # Cross-encoders, in the form of each release of sentence-transformers.
        (ONE_LABEL, "CrossEncoder", "text-ranking"),
        (of("Qwen3ForCausalLM"), "CrossEncoder", "text-ranking"),
        (THREE_LABELS, "CrossEncoder", "text-classification"),
        (ONE_LABEL, "SentenceTransformer", "sentence-similarity"),
        (ONE_LABEL, "", "text-ranking"),
        (ONE_LABEL | {"problem_type": "regression"}, "", "text-classification"),
        (THREE_LABELS, "", "text-classification"),
        (THREE_LABELS | {"sbert_ce_default_activation_function": "torch.nn.Identity"}, "", "text-classification"),
        (ONE_LABEL | {"sentence_transformers": {"version": "4.0.1"}, "problem_type": "regression"}, "", "text-ranking"),
    ],
)
def test_task_follows_from_the_architecture_and_the_library(tmp_path, config, model_type, task):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if model_type:
        (tmp_path / "modules.json").touch()
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": model_type}))
    assert task_of(Checkpoint("m", tmp_path)) == task


def test_task_follows_from_other_files_or_is_required(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of("ViTModel")))
    (tmp_path / "preprocessor_config.json").touch()
    assert task_of(Checkpoint("m", tmp_path)) == "image-feature-extraction"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="set TASK"):
        task_of(Checkpoint("m", tmp_path))


def test_container_image_has_the_backends_of_the_models(settings):
    def source(systems: str, **more: str) -> str:
        return Compose(settings.replace(**{"SYSTEMS": systems} | more)).triton_source

    put(settings, "pets", "a/b@123", also=("pets_encoder",))
    assert source("embedding pets") == "pypi"
    encoder = settings.model_repository / "pets_encoder"
    encoder.mkdir()
    (encoder / "config.pbtxt").write_text('name: "pets_encoder"\nbackend: "transformers"\n')
    assert source("embedding pets") == "pypi-transformers"
    (encoder / "configs").mkdir()
    (encoder / "configs/cpu.pbtxt").write_text('backend: "packed_onnx"')
    assert source("embedding pets") == "pypi"
    assert source("falcon7b") == "pypi"
    (settings.model_repository / "falcon7b/1").mkdir(parents=True)
    (settings.model_repository / "falcon7b/1/model.safetensors").touch()  # of FORMAT=python
    assert source("falcon7b") == source("falcon7b_stream") == "pypi-transformers"
    assert source("pets", TRITON_SOURCE="ngc") == "ngc"


# --- the formats that `make loadtest FORMATS` compares ----------------------------------------------------------------


def test_formats_of_a_system_are_assembled_from_its_weights_until_these_change(settings, tmp_path):
    weights = Hub("organisation/spam", "1234")
    put(settings, "spam", "organisation/spam@1234")
    formats = {"SYSTEM": "spam", "FORMATS": "onnx python"}
    check_formats(settings.replace(**formats))
    assert requested(settings, "spam.python", **formats) == System(
        "spam.python", "text-classification", weights, "python"
    )
    assert missing(settings, "spam spam.onnx spam.python", **formats) == ["spam.onnx", "spam.python"]
    put(settings, "spam.onnx", "organisation/spam@1234", format_of="spam")
    put(settings, "spam.python", "organisation/spam@9999", format="python", format_of="spam")
    check_formats(settings.replace(**formats))
    assert missing(settings, "spam spam.onnx spam.python", **formats) == ["spam.python"]
    assert requested(settings, "spam.onnx") == System("spam.onnx", "text-classification", weights, "onnx")


def test_min_quality_applies_to_int8_only(settings):
    put(settings, "spam", "organisation/spam@1234")
    put(settings, "spam.onnx", "organisation/spam@1234", format_of="spam")
    put(settings, "spam.int8", "organisation/spam@1234", format="int8", format_of="spam")
    formats = {"SYSTEM": "spam", "FORMATS": "onnx int8", "MIN_QUALITY": "0.98"}
    check_formats(settings.replace(**formats))
    assert missing(settings, "spam spam.onnx spam.int8", **formats) == ["spam.int8"]
    assert requested(settings, "spam.int8", **formats).min_quality == 0.98


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"FORMATS": "onnx"}, "must be two or three different formats"),
        ({"FORMATS": "onnx onnx"}, "must be two or three different formats"),
        ({"FORMATS": "onnx openvino"}, r"embedding \(sentence-similarity\) has no format openvino; it has onnx, "),
        ({"FORMAT": "onnx"}, "leave FORMAT empty"),
        ({"MAX_BATCH": "8"}, "leave MAX_BATCH empty"),
        ({"PROFILE": "neuron"}, "has no formats to compare"),
        ({"SYSTEM": "mine"}, "mine is your own model"),
        ({"SYSTEM": "gone"}, "gone/weights: there is no such folder"),
        ({"SYSTEM": "text-generation", "FORMATS": "openvino python"}, "generates text"),
        ({"SYSTEM": "object-detection"}, "it has no other"),
        ({"MIN_QUALITY": "0.98"}, "leave MIN_QUALITY empty"),
        ({"SYSTEM": "fill-mask"}, "no measure compares the answers of fill-mask"),
        ({"SYSTEM": "reranker"}, "assembles a system reranker.onnx, and you have your own"),
    ],
)
def test_formats_that_cannot_be_compared_are_one_sentence(settings, chosen, message):
    (settings.model_repository / "mine").mkdir()
    (settings.model_repository / "mine/config.pbtxt").touch()
    put(settings, "gone", "/gone/weights 0123456789abcdef")
    put(settings, "reranker.onnx", "organisation/another@1", "text-ranking")
    with pytest.raises(UserError, match=message):
        check_formats(settings.replace(**{"FORMATS": "onnx python"} | chosen))
