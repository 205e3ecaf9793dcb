"""Checkpoints that are refused: what is in the folder, the settings, and what the sentence has."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import encoders, language, vision
from tests.support.checkpoints.pickled import pickle_weights

Save = Callable[[Path], object]


class Spoiled(NamedTuple):
    """Saves a model, and then changes its files."""

    save: Save
    spoil: Save

    def __call__(self, folder: Path) -> None:
        self.save(folder)
        self.spoil(folder)


def written(folder: Path, files: dict) -> Path:
    """Write a folder of JSON files."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def change(folder: Path, file: str = "config.json", **fields: Any) -> None:
    """Set these keys in a file of JSON."""
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))


def add_weight(folder: Path, name: str) -> None:
    save_file(load_file(folder / WEIGHTS) | {name: torch.ones(3)}, folder / WEIGHTS, {"format": "pt"})


def take_weight(folder: Path, name: str) -> None:
    kept = {other: weight for other, weight in load_file(folder / WEIGHTS).items() if other != name}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})


def empty_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": {}}')


def save_without_shard(folder: Path) -> None:
    pickle_weights(language.save_llama(folder), shards=3)
    (folder / f"pytorch_{SHARD}.bin").unlink()


def take_chats(folder: Path) -> None:
    """Let the model take messages as it takes texts."""
    modalities = json.loads((folder / "sentence_bert_config.json").read_text())["modality_config"]
    change(folder, "sentence_bert_config.json", modality_config=modalities | {"message": modalities["text"]})


def write_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


WEIGHTS, SHARD = "model.safetensors", "model-00002-of-00003"
BERT_MODEL = partial(encoders.save_bert, head="Model")
CLASSIFIER = partial(encoders.save_bert, head="ForSequenceClassification")
NO_HEAD = partial(encoders.save_distilbert, head="Model")
SENTENCES = encoders.save_sentence_transformer
LAYERS, WORDS = "bert.encoder.layer", "bert.embeddings.word_embeddings.weight"
CROSS = f"{LAYERS}.0.crossattention.self.query.weight"
UNREAD = "which the installed sentence-transformers does not read"
ALL_SIZES = transformers.BitImageProcessor(do_resize=False, do_center_crop=False)
GPTQ = {"quant_method": "gptq", "bits": 4}
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
REFUSED: dict[str, tuple[dict | Save, dict[str, str], str]] = {
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
    # Saved models, with something spoiled.
    "half a file of weights": (Spoiled(BERT_MODEL, lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 99)), {},
        "it does not load (SafetensorError in"),
    "other sizes": (Spoiled(BERT_MODEL, lambda folder: change(folder, hidden_size=64)), {},
        "is damaged, of two models, or made with other code"),
    "heads that do not divide the size": (Spoiled(BERT_MODEL, lambda folder: change(folder, num_attention_heads=5)), {},
        "it does not load (ValueError in"),
    "labels that are a number": (Spoiled(BERT_MODEL, lambda folder: change(folder, id2label=3)), {},
        "its configuration does not load in transformers"),
    "lists without end": (Spoiled(BERT_MODEL, lambda folder: (folder / "config.json").write_text("[" * 9999)), {},
        "config.json is not a JSON object"),
    "half a tokenizer": (Spoiled(BERT_MODEL, lambda folder: (folder / "tokenizer.json").write_text("{")), {},
        "its tokenizer does not load in transformers"),
    "unknown type": (Spoiled(BERT_MODEL, lambda folder: change(folder, model_type="nonsense")), {},
        "is of the type nonsense, which transf"),
    "weights of TensorFlow": (Spoiled(BERT_MODEL, lambda folder: (folder / WEIGHTS).rename(folder / "tf_model.h5")), {},
        "has no model.safetensors, and its tf_model.h5 is not read, because other formats can run code"),
    "no weights": (Spoiled(BERT_MODEL, lambda folder: (folder / WEIGHTS).unlink()), {},
        "has no model.safetensors, and no weights in another format: save_pretrained writes it beside config.json"),
    "index of nothing": (Spoiled(BERT_MODEL, empty_index), {}, "has no model.safetensors, and no weights in another"),
    "missing shard": (save_without_shard, {},
        f"has no {SHARD}.safetensors, which model.safetensors.index.json names: download the missing files"),
    "config of an image model": (
        Spoiled(language.save_mistral, lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}')),
        {"TASK": "text-generation"}, "does not generate text"),
    "left over layer": (Spoiled(CLASSIFIER, lambda folder: add_weight(folder, f"{LAYERS}.2.output.dense.weight")), {},
        f"'{LAYERS}.2.output.dense.weight' is left over from the weights of the BertForSequenceClassification"),
    "left over attention": (Spoiled(CLASSIFIER, lambda folder: add_weight(folder, CROSS)), {},
        f"'{CROSS}' is left over from the weights of the BertForSequenceClassification"),
    "words of another size": (Spoiled(CLASSIFIER, lambda folder: add_weight(folder, WORDS)), {},
        f"'{WORDS}' has other sizes in the weights of the BertForSequenceClassification"),
    "head of another size": (Spoiled(CLASSIFIER, lambda folder: add_weight(folder, "classifier.bias")), {},
        "'classifier.bias' has other sizes in the weights of the BertForSequenceClassification"),
    # Transformers would initialize missing weights at random.
    "no head": (NO_HEAD, {"TASK": "text-classification", "FORMAT": "onnx"},
        "is not a model for text-classification: it lacks the weights 'classifier.bias'"),
    "no head, without a graph": (NO_HEAD, {"TASK": "text-classification", "FORMAT": "python"},
        "is not a model for text-classification: it lacks the weights 'classifier.bias'"),
    "missing layer": (Spoiled(SENTENCES, lambda folder: take_weight(folder, "encoder.layer.1.output.dense.weight")), {},
        "'encoder.layer.1.output.dense.weight' is missing in the weights"),
    "key of a pooling": (Spoiled(SENTENCES, lambda folder: change(folder, "1_Pooling/config.json", newest=1)), {},
        f": 1_Pooling/config.json sets newest, {UNREAD}"),
    "key of sentence-transformers": (
        Spoiled(SENTENCES, lambda folder: change(folder, "config_sentence_transformers.json", newest=1)), {},
        f": config_sentence_transformers.json sets newest, {UNREAD}"),
    "key of its first module": (
        Spoiled(SENTENCES, lambda folder: change(folder, "sentence_bert_config.json", newest=1)), {},
        f": sentence_bert_config.json sets newest, {UNREAD}"),
    "chat without a template": (Spoiled(SENTENCES, take_chats), {},
        "x: its texts pass through a chat template, and its tokenizer has none"),
    "sparse embeddings without a masked language head": (BERT_MODEL, {"TASK": "sparse-embedding"},
        "serves masked language models and sparse encoders that sentence-tr"),
    "images in all sizes": (
        Spoiled(vision.save_dinov2, ALL_SIZES.save_pretrained), {},
        "only models that take all images in one size are served"),
    "unserved activation": (partial(encoders.save_cross_encoder, activation_fn=torch.nn.ReLU()), {},
        "x: its scores pass through ReLU, which is not served; Sigmoid, "),
    "template without a document": (Spoiled(partial(language.save_llama_classifier, labels=1), write_template), {},
        "x: its chat template has no place for a query and a document"),
    "ranker without yes and no": (language.save_llama, {"TASK": "text-ranking"},
        "x: a language model ranks by the logits of yes and no, and its tokenizer has"),
    "GPTQ without vLLM": (
        Spoiled(language.save_llama, lambda folder: change(folder, quantization_config=GPTQ, dtype="bfloat16")),
        {"FORMAT": "python"}, "is quantized (gptq), which only vLLM reads: set PROFILE=cuda"),
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
