"""Models that are not served are refused in one sentence, before anything is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from export.assemble import assemble_all
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.network import check_network
from export.checkpoint.unsupported import check_model
from tests.export.refused import IMAGES, KINDS, REFUSED, TOKENIZED, add_weight, config, written
from tests.support.checkpoints import encoders
from triton_transformers.settings import Settings, UserError


@pytest.mark.parametrize(("kind", "architecture", "purpose"), KINDS, ids=[architecture for _, architecture, _ in KINDS])
def test_kind_of_model_is_named(tmp_path, kind, architecture, purpose):
    content = config(kind, architecture) | {"architectures": [architecture]}  # some classes drop it
    written(tmp_path / "source", TOKENIZED | IMAGES | {"config.json": content})
    sentence = refusal(tmp_path)
    assert purpose in sentence
    assert "set TASK" not in sentence


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("transformers.BertModel.forward", "the original failed on the example inputs (AttributeError in transformers: "
            "'BertConfig' object has no attribute 'width'). Choose"),
        ("export.recipes.text.recipe.longest_window", "this project failed to prepare it (AttributeErr"),
    ],
)  # fmt: skip
def test_failure_is_the_originals_only_if_its_network_fails(tmp_path, monkeypatch, place, sentence):
    encoders.save_bert(tmp_path / "source", "Model")
    monkeypatch.setattr(place, lambda *_, **__: transformers.BertConfig().width)
    assert sentence in refusal(tmp_path)


def test_pooling_of_older_sentence_transformers_is_read(tmp_path):
    folder = encoders.save_sentence_transformer(tmp_path / "source")
    older = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(older))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48, "do_lower_case": False}))
    versions = {"__version__": {"sentence_transformers": "2.0.0"}, "similarity_fn_name": "cosine", "prompts": {"q": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(versions))
    check_model(Checkpoint("x", folder))


def test_sparse_encoder_of_any_module_is_read(tmp_path):
    """sentence-transformers 6 still saves its deprecated module, with the keys of the one that replaces it."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    encoders.save_bert(tmp_path / "plain", "ForMaskedLM")
    SparseEncoder(modules=[MLMTransformer(str(tmp_path / "plain")), SpladePooling()]).save(str(tmp_path / "sparse"))
    check_model(Checkpoint("x", tmp_path / "sparse"))


@pytest.mark.parametrize("case", REFUSED)
def test_model_is_refused_in_one_sentence(tmp_path, case):
    build, chosen, sentence = REFUSED[case]
    if callable(build):
        build(tmp_path / "source")
    else:
        written(tmp_path / "source", build)
    assert sentence in refusal(tmp_path, **chosen)


def test_weights_of_other_heads_are_ignored(tmp_path):
    source = encoders.save_bert(tmp_path / "source", "ForSequenceClassification")
    add_weight(source, "cls.seq_relationship.weight")
    add_weight(source, "qa_outputs.bias")
    # Buffers of old releases, and a pooler that the head does not read.
    add_weight(source, "bert.encoder.layer.0.attn.masked_bias")
    add_weight(source, "bert.encoder.version")
    check_network(Checkpoint("x", source), "text-classification")


def test_head_may_be_missing_where_no_task_reads_it(tmp_path):
    source = encoders.save_bert(tmp_path / "source", "ForMaskedLM")
    weights = load_file(source / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if name.startswith("bert.")}, source / "model.safetensors"
    )
    check_network(Checkpoint("x", source), "feature-extraction")
    with pytest.raises(UserError, match=r"'cls\.predictions\..*' is missing in the weights of the BertForMaskedLM"):
        check_network(Checkpoint("x", source), "fill-mask")


def refusal(folder: Path, **chosen: str) -> str:
    """Return the sentence that refuses the model in the folder `source`."""
    repository = folder / "models"
    settings = Settings.load().replace(MODEL_REPOSITORY=str(repository), SYSTEMS="x", SOURCE=str(folder / "source"))
    with pytest.raises(UserError) as error:
        assemble_all(settings.replace(**chosen))
    assert "\n" not in str(error.value)
    assert not list(repository.glob("*"))
    return str(error.value)
