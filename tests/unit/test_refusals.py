"""Models that are not served are refused in one sentence, before anything is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from scripts.common.settings import Settings, UserError
from scripts.models.assemble import assemble_all

TOKENIZED = {"tokenizer.json": {}, "model.safetensors": {}}
SPARSE = "sentence_transformers.sparse_encoder.modules"
DENSE = "sentence_transformers.models"


def config(kind: str, architecture: str, **fields) -> dict:
    """Return the config.json of a real architecture."""
    return json.loads(getattr(transformers, f"{kind}Config")(architectures=[architecture], **fields).to_json_string())


def modules(*types: str) -> list[dict]:
    return [{"idx": n, "name": str(n), "path": "", "type": name} for n, name in enumerate(types)]


BERT = config("Bert", "BertModel")
CASES = {
    "T5": (
        TOKENIZED | {"config.json": config("T5", "T5ForConditionalGeneration")},
        {},
        "is an encoder-decoder (T5ForConditionalGeneration), which is not served here: choose an encoder such as BERT",
    ),
    "encoder of T5": (
        TOKENIZED | {"config.json": config("T5", "T5EncoderModel")},
        {"TASK": "feature-extraction"},
        "is a T5EncoderModel, which is served as TASK=sentence-similarity only",
    ),
    "BART": (
        TOKENIZED | {"config.json": config("Bart", "BartModel")},
        {"TASK": "feature-extraction"},
        "is an encoder-decoder (BartModel), which is not served here",
    ),
    "BART classifier": (
        TOKENIZED | {"config.json": config("Bart", "BartForSequenceClassification")},
        {},
        "is an encoder-decoder (BartForSequenceClassification), which is not served here",
    ),
    "Whisper": (
        TOKENIZED | {"config.json": config("Whisper", "WhisperForConditionalGeneration")},
        {},
        "is an encoder-decoder (WhisperForConditionalGeneration), which is not served here",
    ),
    "LLaVA": (
        TOKENIZED | {"config.json": config("Llava", "LlavaForConditionalGeneration")},
        {"TASK": "text-generation"},
        "which generates text from images, sound or other text; that is not served here",
    ),
    "speech recogniser": (
        {"config.json": config("Wav2Vec2", "Wav2Vec2ForCTC"), "preprocessor_config.json": {"sampling_rate": 16000}},
        {},
        "is a Wav2Vec2ForCTC, which transcribes speech; that is not served here",
    ),
    "sound features": (
        {"config.json": config("Wav2Vec2", "Wav2Vec2Model"), "preprocessor_config.json": {"sampling_rate": 16000}},
        {},
        "takes sound, which is not served here",
    ),
    "GPTQ": (
        TOKENIZED
        | {"config.json": config("Llama", "LlamaForCausalLM") | {"quantization_config": {"quant_method": "gptq"}}},
        {},
        "is quantized (gptq), and only weights in full precision are served: name the model that it was made from",
    ),
    "AWQ": (
        TOKENIZED
        | {"config.json": config("Llama", "LlamaForCausalLM") | {"quantization_config": {"quant_method": "awq"}}},
        {},
        "is quantized (awq)",
    ),
    "bitsandbytes": (
        TOKENIZED
        | {"config.json": BERT | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}},
        {},
        "is quantized (bitsandbytes)",
    ),
    "GPTQ in a file of its own": (TOKENIZED | {"config.json": BERT, "quantize_config.json": {}}, {}, "is quantized"),
    "PEFT": (
        {"adapter_config.json": {}, "adapter_model.safetensors": {}},
        {},
        "is a PEFT adapter (LoRA, ...) without its base model: load it with peft, call merge_and_unload()",
    ),
    "PEFT beside a model": (TOKENIZED | {"config.json": BERT, "adapter_config.json": {}}, {}, "is a PEFT adapter"),
    "diffusers": ({"model_index.json": {}}, {}, "is a pipeline of diffusers, which is not served here"),
    "GGUF": ({"config.json": BERT, "model.Q4_K_M.gguf": {}}, {}, "has its weights as GGUF: name the model that they"),
    "empty folder": ({}, {}, "has no config.json: name a folder that save_pretrained wrote"),
    "config of something else": (
        TOKENIZED | {"config.json": {"epochs": 3}},
        {},
        "is no model of transformers: its config.json names no model_type",
    ),
    "modules that are no list": (TOKENIZED | {"config.json": BERT, "modules.json": [{}]}, {}, "lists no modules"),
    "quantization that is no object": (
        TOKENIZED | {"config.json": BERT | {"quantization_config": "int4"}},
        {},
        "is quantized (an unknown method)",
    ),
    "config that is a list": (TOKENIZED | {"config.json": []}, {}, "config.json is not a JSON object"),
    "ColBERT": (
        TOKENIZED | {"config.json": config("Bert", "HF_ColBERT")},
        {"TASK": "feature-extraction"},
        "is a HF_ColBERT, which returns a vector for each token in ColBERT's way",
    ),
    "PyLate": (
        TOKENIZED
        | {"config.json": BERT, "modules.json": modules(f"{DENSE}.Transformer", "pylate.models.Dense.Dense")},
        {},
        "is a ColBERT of PyLate, which returns a vector for each token in ColBERT's way",
    ),
    "sparse encoder without inference": (
        TOKENIZED
        | {
            "config.json": config("Bert", "BertForMaskedLM"),
            "modules.json": modules(f"{SPARSE}.Router", f"{SPARSE}.SparseStaticEmbedding"),
            "config_sentence_transformers.json": {"model_type": "SparseEncoder"},
        },
        {},
        "is a SparseEncoder of Router, SparseStaticEmbedding, which is not served here",
    ),
    "both halves of CLIP": (
        TOKENIZED | {"config.json": config("CLIP", "CLIPModel"), "preprocessor_config.json": {}},
        {},
        "is for texts and images: set TASK=image-feature-extraction to serve its image half, and TASK=sentence-similar",
    ),
    "text half of SigLIP": (
        TOKENIZED | {"config.json": config("Siglip", "SiglipModel"), "preprocessor_config.json": {}},
        {"TASK": "sentence-similarity"},
        "(siglip), which is not served as sentence-similarity: set TASK=image-feature-extraction",
    ),
    "BLIP": (
        TOKENIZED | {"config.json": config("Blip", "BlipModel"), "preprocessor_config.json": {}},
        {"TASK": "image-feature-extraction"},
        "(blip), which is not served as image-feature-extraction: docs/models.md lists what is served",
    ),
    "unknown architecture": (
        TOKENIZED | {"config.json": config("Bert", "BertForNextSentencePrediction")},
        {},
        "names BertForNextSentencePrediction, which has no known task: set TASK",
    ),
    "remote code": (
        TOKENIZED
        | {"config.json": {"model_type": "own", "auto_map": {"AutoModel": "own.Own"}, "architectures": ["OwnModel"]}},
        {},
        "brings its own code, which can do whatever you can: set TRUST_REMOTE_CODE=1 if you trust it",
    ),
    "text task without tokenizer": (
        {"config.json": config("ViT", "ViTModel"), "preprocessor_config.json": {}, "model.safetensors": {}},
        {"TASK": "text-classification"},
        "has no tokenizer (tokenizer.json), which TASK=text-classification requires: set another TASK",
    ),
    "image task without processor": (
        TOKENIZED | {"config.json": BERT},
        {"TASK": "image-classification"},
        "has no image processor (preprocessor_config.json), which TASK=image-classification requires",
    ),
    "another head": (
        TOKENIZED | {"config.json": config("Bert", "BertForSequenceClassification")},
        {"TASK": "token-classification"},
        "is a BertForSequenceClassification, which is for TASK=text-classification and not for TASK=token-class",
    ),
    "zero-shot": (
        TOKENIZED | {"config.json": config("Bert", "BertForSequenceClassification")},
        {"TASK": "zero-shot-classification"},
        "is served as text-classification: set that, and send each hypothesis as text_pair",
    ),
    "translation": (
        TOKENIZED | {"config.json": BERT},
        {"TASK": "translation"},
        "TASK=translation needs an encoder-decoder, which is not served here",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_model_is_refused_in_one_sentence(tmp_path, case):
    files, chosen, sentence = CASES[case]
    source, repository = tmp_path / "source", tmp_path / "models"
    write(source, files)
    settings = Settings.load() | {"MODEL_REPOSITORY": str(repository), "SYSTEMS": "x", "SOURCE": str(source)}
    with pytest.raises(UserError) as error:
        assemble_all(Settings(settings | chosen))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(repository.glob("*"))


def write(folder: Path, files: dict) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
