"""Models that are not served are refused in one sentence, before anything is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from export.assemble import assemble_all
from export.checkpoint.unsupported import check_model, check_network
from tests.support.checkpoints import encoders
from triton_transformers.settings import Settings, UserError

TOKENIZED = {"tokenizer.json": {}, "model.safetensors": {}}
SPARSE = "sentence_transformers.sparse_encoder.modules"
DENSE = "sentence_transformers.models"


def config(kind: str, architecture: str, **fields) -> dict:
    """Return the config.json of a real architecture."""
    return json.loads(getattr(transformers, f"{kind}Config")(architectures=[architecture], **fields).to_json_string())


def modules(*types: str) -> list[dict]:
    return [{"idx": n, "name": str(n), "path": "", "type": name} for n, name in enumerate(types)]


BERT = config("Bert", "BertModel")
(TRANSFORMER,) = modules("sentence_transformers.models.Transformer")
CASES = {
    "BART": (TOKENIZED | {"config.json": config("Bart", "BartModel")}, {"TASK": "feature-extraction"},
        "is an encoder-decoder (BartModel), which is not served here"),
    "GPTQ": (TOKENIZED | {"config.json": config("Llama", "LlamaForCausalLM")
        | {"quantization_config": {"quant_method": "gptq"}}},
        {"TASK": "text-classification"},
        "is quantized (gptq), and only language models are served so: name the model that it was made from"),
    "bitsandbytes": (TOKENIZED | {"config.json": BERT | {"quantization_config": {"quant_method": "bitsandbytes",
        "load_in_8bit": True}}},
        {}, "is quantized (bitsandbytes)"),
    "PEFT": ({"adapter_config.json": {}, "adapter_model.safetensors": {}}, {},
        "is a PEFT adapter (LoRA, ...) without its base model: add it to the system of a language model"),
    "diffusers": ({"model_index.json": {}}, {}, "is a pipeline of diffusers, which is not served here"),
    "GGUF that is none": ({"model.Q4_K_M.gguf": {}}, {},
        "model.Q4_K_M.gguf is damaged, or no GGUF: download it again"),
    "several GGUF": ({"config.json": BERT, "model.Q4_K_M.gguf": {}, "model.F16.gguf": {}}, {},
        "has several GGUF files (model.F16.gguf, model.Q4_K_M.gguf): set SOURCE to a folder with one of them"),
    "empty folder": ({}, {}, "has no config.json: name a folder that save_pretrained wrote"),
    "config of something else": (TOKENIZED | {"config.json": {"epochs": 3}}, {},
        'its config.json names no model_type. Add it there (the type of its network, such as "bert"), or name a fold'),
    "architecture without its type": (TOKENIZED | {"config.json": {"architectures": ["BertForMaskedLM"]}}, {},
        'its config.json names no model_type. Add it there ("bert", the type of BertForMaskedLM), or name a folder'),
    "class as the type": (TOKENIZED | {"config.json": {"model_type": "SegformerForSemanticSegmentation"}}, {},
        "is SegformerForSemanticSegmentation, the name of a class: set it to segformer, the type of that class"),
    "modules that are no list": (TOKENIZED | {"config.json": BERT, "modules.json": [{}]}, {}, "lists no modules"),
    "module in another folder": (TOKENIZED | {"config.json": BERT, "modules.json": [TRANSFORMER | {"path": "../.."}]},
        {}, "has a module in '../..', which is another folder"),
    "module in a folder by its address": ({"modules.json": [TRANSFORMER | {"path": "/etc"}]}, {},
        "has a module in '/etc', which is another folder"),
    "bag of words": ({"modules.json": modules(f"{DENSE}.BoW")}, {},
        "is a SentenceTransformer of BoW, which is not served here"),
    "route with the address of a folder": ({"modules.json": modules("sentence_transformers.base.modules.router.Router"),
        "router_config.json": {"types": {}, "structure": {"/tmp/route": []}, "parameters": {}}},
        {}, "has a Router with the route '/tmp/route'"),
    "kind that is no text": (TOKENIZED | {"config.json": BERT, "modules.json": [TRANSFORMER],
        "config_sentence_transformers.json": {"model_type": ["SentenceTransformer"]}},
        {}, "is a ['SentenceTransformer'] of Transformer, which is not served here"),
    "quantization that is no object": (TOKENIZED | {"config.json": BERT | {"quantization_config": "int4"}}, {},
        "is quantized (an unknown method)"),
    "config that is a list": (TOKENIZED | {"config.json": []}, {}, "config.json is not a JSON object"),
    "PyLate with a module that sentence-transformers lacks": (TOKENIZED | {"config.json": BERT,
        "modules.json": modules(f"{DENSE}.Transformer", "pylate.models.Pooling.Pooling")},
        {}, "is a MultiVectorEncoder of Pooling, which is not served here"),
    "sparse encoder with a module of another kind": (TOKENIZED | {"config.json": config("Bert", "BertForMaskedLM"),
        "modules.json": modules(f"{SPARSE}.MLMTransformer", f"{SPARSE}.WordWeights"),
        "config_sentence_transformers.json": {"model_type": "SparseEncoder"}},
        {}, "is a SparseEncoder of WordWeights, which is not served here"),
    "CLIP without an image processor": (TOKENIZED | {"config.json": config("CLIP", "CLIPModel")}, {},
        "has no image processor (preprocessor_config.json), which TASK=text-image-similarity requires"),
    "CLIP as a classifier": (TOKENIZED | {"config.json": config("CLIP", "CLIPModel"), "preprocessor_config.json": {}},
        {"TASK": "image-classification"},
        "(clip), which is not served as image-classification: set TASK=text-image-similarity"),
    "BERT for images": (TOKENIZED | {"config.json": BERT, "preprocessor_config.json": {}},
        {"TASK": "text-image-similarity"},
        "has no encoders of texts and of images (bert), which TASK=text-image-similarity requires"),
    "LLaVA without a head": (TOKENIZED | {"config.json": config("Llava", "LlavaModel"), "preprocessor_config.json": {}},
        {"TASK": "image-feature-extraction"},
        "(llava), which is not served as image-feature-extraction: docs/models.md lists what is served"),
    "unknown architecture": (TOKENIZED | {"config.json": config("Bert", "BertForPreTraining")}, {},
        "is a BertForPreTraining, and no task is for its head: set TASK=feature-extraction to serve it without a head"),
    "remote code": (TOKENIZED | {"config.json": {"model_type": "own", "auto_map": {"AutoModel": "own.Own"},
        "architectures": ["OwnModel"]}},
        {}, "brings its own code, which can do whatever you can: set TRUST_REMOTE_CODE=1 if you trust it"),
    "text task of an image model": ({"config.json": config("ViT", "ViTModel"), "preprocessor_config.json": {},
        "model.safetensors": {}},
        {"TASK": "text-classification"},
        "is a ViTModel, which takes images: choose a model of texts for TASK=text-classification"),
    "text task without tokenizer": ({"config.json": BERT, "model.safetensors": {}}, {},
        "has no tokenizer (tokenizer.json), which TASK=feature-extraction requires: save the model's own there too"),
    "image task without processor": (TOKENIZED | {"config.json": BERT}, {"TASK": "image-classification"},
        "has no image processor (preprocessor_config.json), which TASK=image-classification requires"),
    "another head": (TOKENIZED | {"config.json": config("Bert", "BertForSequenceClassification")},
        {"TASK": "token-classification"},
        "is a BertForSequenceClassification, which is for TASK=text-classification and not for TASK=token-class"),
    "detection with a classifier": (TOKENIZED | {"config.json": config("Bert", "BertForSequenceClassification")},
        {"TASK": "object-detection"},
        "which is for TASK=text-classification or TASK=zero-shot-classification, not TASK=object-detection"),
    "name of a task that transformers 5 changed": (TOKENIZED | {"config.json": BERT}, {"TASK": "text-to-speech"},
        "TASK=text-to-speech is TASK=text-to-audio in transformers 5: set that"),
    "unknown image processor": ({"config.json": config("ViT", "ViTModel"), "model.safetensors": {},
        "preprocessor_config.json": {"image_processor_type": "NewestImageProcessor"}},
        {}, "its image processor does not load in transformers"),
    "translation": (TOKENIZED | {"config.json": BERT}, {"TASK": "translation"},
        "is a BertModel, which is for no pipeline, not TASK=translation"),
}  # fmt: skip

IMAGES = {"preprocessor_config.json": {}}
# The prefix of the configuration's class, the architecture, and what the refusal states.
KINDS = [
    ("Bros", "BrosModel", "takes the places of words on a page"),
    ("CLIPSeg", "CLIPSegForImageSegmentation", "is for texts and images together (clipseg)"),
    ("DPR", "DPRReader", "marks answers in DPR's passages"),
    ("LayoutLM", "LayoutLMForTokenClassification", "takes the places of words on a page"),
    ("LayoutLM", "LayoutLMModel", "takes the places of words on a page"),
    ("Llava", "LlavaModel", "is for texts and images together (llava), which is not served here"),
    ("MarkupLM", "MarkupLMModel", "takes the markup of web pages"),
    ("PatchTST", "PatchTSTForPrediction", "takes series of measurements"),
    ("Qwen2VL", "Qwen2VLModel", "takes texts, images and videos together"),
    ("SuperPoint", "SuperPointForKeypointDetection", "finds points in images"),
    ("Tapas", "TapasForSequenceClassification", "answers questions about tables"),
    ("VideoMAE", "VideoMAEModel", "classifies videos"),
    ("Vilt", "ViltForQuestionAnswering", "answers questions about images"),
    ("ViTMAE", "ViTMAEForPreTraining", "fills in hidden parts of images"),
    ("Wav2Vec2", "Wav2Vec2ForXVector", "recognizes speakers"),
    ("Wav2Vec2", "Wav2Vec2Model", "takes sound"),
    ("Bert", "BertForMultipleChoice", "chooses one of several texts"),
    ("Bert", "BertForNextSentencePrediction", "judges whether one sentence follows another"),
]


@pytest.mark.parametrize(("kind", "architecture", "purpose"), KINDS, ids=[architecture for _, architecture, _ in KINDS])
def test_kind_of_model_is_named(tmp_path, kind, architecture, purpose):
    written = config(kind, architecture) | {"architectures": [architecture]}  # some classes drop it
    sentence = refusal(tmp_path, TOKENIZED | IMAGES | {"config.json": written})
    assert purpose in sentence
    assert "set TASK" not in sentence


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "it does not load (SafetensorError in"),
        (
            lambda folder: change(folder, "config.json", hidden_size=64),
            "is damaged, of two models, or made with other code",
        ),
        (lambda folder: change(folder, "config.json", num_attention_heads=5), "it does not load (ValueError in"),
        (lambda folder: change(folder, "config.json", id2label=3), "its configuration does not load in transformers"),
        (lambda folder: (folder / "config.json").write_text("[" * 9999), "config.json is not a JSON object"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "its tokenizer does not load in transformers"),
        (lambda folder: change(folder, "config.json", model_type="nonsense"), "is of the type nonsense, which transf"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "tf_model.h5"),
            "has no model.safetensors, and its tf_model.h5 is not read, because other formats can run code",
        ),
    ],
)
def test_damaged_model_is_refused_in_one_sentence(tmp_path, spoil, sentence):
    folder = encoders.save_bert(tmp_path / "source", "Model")
    spoil(folder)
    assert sentence in refusal(tmp_path)


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


@pytest.mark.parametrize(
    ("file", "keys", "unread"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_newest": True},
            ": 1_Pooling/config.json sets pooling_mode_newest",
        ),
        ("config_sentence_transformers.json", {"newest": 1}, "config_sentence_transformers.json sets newest"),
        ("sentence_bert_config.json", {"newest": 1}, "sentence_bert_config.json sets newest"),
    ],
)
def test_keys_that_sentence_transformers_ignores_are_refused(tmp_path, file, keys, unread):
    folder = encoders.save_sentence_transformer(tmp_path / "source")
    check_model("x", folder, trust_remote_code=False)
    change(folder, file, **keys)
    assert f"{unread}, which the installed sentence-transformers does not read" in refusal(tmp_path)


def test_pooling_of_older_sentence_transformers_is_read(tmp_path):
    folder = encoders.save_sentence_transformer(tmp_path / "source")
    older = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(older))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48, "do_lower_case": False}))
    versions = {"__version__": {"sentence_transformers": "2.0.0"}, "similarity_fn_name": "cosine", "prompts": {"q": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(versions))
    check_model("x", folder, trust_remote_code=False)


def test_sparse_encoder_of_any_module_is_read(tmp_path):
    """sentence-transformers 6 still saves its deprecated module, with the keys of the one that replaces it."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    encoders.save_bert(tmp_path / "plain", "ForMaskedLM")
    SparseEncoder(modules=[MLMTransformer(str(tmp_path / "plain")), SpladePooling()]).save(str(tmp_path / "sparse"))
    check_model("x", tmp_path / "sparse", trust_remote_code=False)


@pytest.mark.parametrize("case", CASES)
def test_model_is_refused_in_one_sentence(tmp_path, case):
    files, chosen, sentence = CASES[case]
    assert sentence in refusal(tmp_path, files, chosen)


@pytest.mark.parametrize("form", ["onnx", "python"])
def test_weights_for_another_task_are_refused(tmp_path, form):
    """Transformers would initialize the missing weights at random."""
    encoders.save_distilbert(tmp_path / "source", "Model")
    sentence = refusal(tmp_path, chosen={"TASK": "text-classification", "FORMAT": form})
    assert "is not a model for text-classification: it lacks the weights 'classifier.bias'" in sentence


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        ("bert.encoder.layer.2.output.dense.weight", "is left over from"),
        ("bert.encoder.layer.0.crossattention.self.query.weight", "is left over from"),
        ("bert.embeddings.word_embeddings.weight", "has other sizes in"),
        ("classifier.bias", "has other sizes in"),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path, weight, problem):
    source = encoders.save_bert(tmp_path / "source", "ForSequenceClassification")
    add_weight(source, weight)
    assert f"'{weight}' {problem} the weights of the BertForSequenceClassification" in refusal(tmp_path)


def test_weights_of_other_heads_are_ignored(tmp_path):
    source = encoders.save_bert(tmp_path / "source", "ForSequenceClassification")
    add_weight(source, "cls.seq_relationship.weight")
    add_weight(source, "qa_outputs.bias")
    # Buffers of old releases, and a pooler that the head does not read.
    add_weight(source, "bert.encoder.layer.0.attn.masked_bias")
    add_weight(source, "bert.encoder.version")
    check_network("x", source, "text-classification")


def test_head_may_be_missing_where_no_task_reads_it(tmp_path):
    source = encoders.save_bert(tmp_path / "source", "ForMaskedLM")
    weights = load_file(source / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if name.startswith("bert.")}, source / "model.safetensors"
    )
    check_network("x", source, "feature-extraction")
    with pytest.raises(UserError, match=r"'cls\.predictions\..*' is missing in the weights of the BertForMaskedLM"):
        check_network("x", source, "fill-mask")


def add_weight(source: Path, name: str) -> None:
    file = source / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(3)}, file, {"format": "pt"})


def refusal(folder: Path, files: dict | None = None, chosen: dict | None = None) -> str:
    """Return the sentence that refuses the model of these files, or the one in the folder `source`."""
    source, repository = folder / "source", folder / "models"
    if files is not None:
        write(source, files)
    settings = Settings.load().replace(MODEL_REPOSITORY=str(repository), SYSTEMS="x", SOURCE=str(source))
    with pytest.raises(UserError) as error:
        assemble_all(settings.replace(**(chosen or {})))
    assert "\n" not in str(error.value)
    assert not list(repository.glob("*"))
    return str(error.value)


def write(folder: Path, files: dict) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def change(folder: Path, file: str, **fields: Any) -> None:
    """Set these keys in a file of JSON."""
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
