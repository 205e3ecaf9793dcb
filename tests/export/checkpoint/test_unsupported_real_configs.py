"""Real configurations are read, and small models with their keys are served as the library answers.

`recorded/real_configs.jsonl` has 620 of them, with the files beside them: paths, links and templates are taken out, and
long maps of labels are cut.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from export.assemble import assemble_all
from export.check.served import served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from export.checkpoint.unsupported import check_keys, check_model
from export.record import Record, read_record
from serving.generation.decoding import Decoder
from serving.generation.row import Options, Row
from tests.support import python_backend
from tests.support.checkpoints.real import RealCheckpoint, real_checkpoints
from tests.support.python_backend import InferenceRequest
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.examples import NEEDS
from triton_transformers.tasks.texts import TEXT_TO_TEXT

pytestmark = pytest.mark.usefixtures("one_thread", "stored")

# Transformers would compute these otherwise than the code that the files were made for, without notice. The files with
# code of their own are served with TRUST_REMOTE_CODE=1.
REFUSED = {
    "Ascend-ModelZoo-PyTorch__PLM_config_quoted": "keys of BERT: XLNet reads ff_activation, and computes with gelu",
    "Ascend-ModelZoo-PyTorch__med_config_albef": "ALBEF's BERT, without types of tokens, looks at images from layer 6",
    "Ascend-ModelZoo-PyTorch__med_large_config": "BLIP's BERT, without types of tokens",
    "Griffin-McCauley-lodestone-base-4096-v1": "a BERT with ALiBi, and code of its own",
    "JunnYu-ChineseBert_pytorch__README_quoted": "ChineseBERT, which also reads pictures and sounds of characters",
    "alibaba-rtp-llm__bloom__fake": "a ChatGLM with RoPE and RMSNorm, under the type bloom",
    "allenai-OLMo__test_fixtures__test-olmo-model": "the first OLMo, of its own library, with or without RoPE",
    "amazon-science-chronos-forecasting__test__dummy-chronos-model": "Chronos, which reads series of numbers",
    "aws-neuron-neuronx-distributed-inference__config_chunked_attention": "Llama with attention in chunks",
    "hpcaitech-ColossalAI__openmoe_8b_config": "OpenMoE, a Llama with experts, and code of its own",
    "huggingface-text-embeddings-inference__voyage_dense": "a Qwen3 that reads both ways, and code of its own",
    "salesforce-LAVIS__med_config_albef": "ALBEF's BERT, which looks at images from layer 6",
    "sgl-project-ome__llava_v1.5_7b": "the first LLaVA, of its own library",
    "ypkang-adept-fuyu-8b": "with a text_config, the class does not read the RoPE of the outer level",
}
# Architectures without a small model: what the library itself needs or cannot do here, or what no task serves.
WITHOUT_SMALL_MODEL = {
    "DetrForSegmentation": "transformers asks the Hub for the configuration of the backbone",
    "Florence2ForConditionalGeneration": "transformers does not know the type of its text_config",
    "Gemma4ForConditionalGeneration": "its processor in transformers needs torchvision",
    "Llama4ForConditionalGeneration": "its processor in transformers needs torchvision",
    "MllamaForConditionalGeneration": "its processor needs a template, which the files here lack",
    "ProphetNetForConditionalGeneration": "generate() in transformers 5.24 fails with its cache",
    "Qwen3_5ForConditionalGeneration": "its processor in transformers needs torchvision",
    "TableTransformerForObjectDetection": "transformers needs timm for it, which needs torchvision",
    **dict.fromkeys(
        ("FuyuForCausalLM", "GitForCausalLM", "GroundingDinoForObjectDetection", "Qwen2AudioForConditionalGeneration",
         "Qwen2_5OmniModel", "Qwen3ASRForConditionalGeneration", "WhisperModel"),
        "no small model with processors of its sizes exists here",
    ),
    **dict.fromkeys(
        ("BertForPreTraining", "LayoutLMv3ForTokenClassification", "MobileBertForPreTraining",
         "SpeechT5ForSpeechToSpeech", "Wav2Vec2ForPreTraining", "WavLMModel"),
        "no task serves it: docs/models.md",
    ),
}  # fmt: skip
# Files with which the library itself fails.
UNREADABLE = {
    "incroyable229-mt5-large-google~3": "mT5 with the architecture of T5: test_config_completion.py",
    "nikhil-solankii-bart-large~5": "no id of the token that begins a text, so generate() raises ValueError",
    "nikhil-solankii-bart-large~6": "no id of the token that begins a text, so generate() raises ValueError",
    "salesforce-LAVIS__bert_config": "cross-attention in a BERT that is no decoder: BertLayer raises ValueError",
    "sgl-project-ome__dbrx_132b": "ffn_act_fn is a text, and DbrxConfig takes an object",
}
PROMPTS = ("I am going", "Which battery", "It")
NEW_TOKENS = 8


def known() -> list[RealCheckpoint]:
    return [real for real in real_checkpoints() if str(real.config.get("model_type")) in CONFIG_MAPPING]


def reason(name: str) -> str:
    """Return why the configuration of this name, or of one of its versions, is refused, or ""."""
    return next((why for start, why in REFUSED.items() if name.startswith(start)), "")


def test_keys_of_real_configurations_are_read_or_change_nothing(tmp_path):
    refused = set()
    for number, real in enumerate(known()):
        checkpoint = Checkpoint(real.name, real.write(tmp_path / str(number)))
        try:
            check_keys(checkpoint, CONFIG_MAPPING[checkpoint.kind])
        except UserError as error:
            refused.add(real.name)
            assert reason(real.name), error
    assert len(known()) == 475
    # Some files have several versions, of which only one is refused.
    assert {why for why in REFUSED.values()} == {reason(name) for name in refused}
    assert len(refused) == 22


def test_real_files_are_read_or_refused_in_one_sentence(tmp_path):
    for number, real in enumerate(real_checkpoints()):
        folder = real.write(tmp_path / str(number))
        try:
            check_model(Checkpoint("m", folder))
            assert task_of(Checkpoint("m", folder))
        except UserError as error:
            assert "\n" not in str(error)


def small_models() -> list[Any]:
    """Return a real checkpoint for each type that generates or does not, and for each head; others only with SLOW=2."""
    seen, chosen = set(), []
    names = set(dir(transformers))
    for real in sorted(known(), key=lambda real: -len(real.config)):
        if (
            real.architecture not in names - WITHOUT_SMALL_MODEL.keys()
            or reason(real.name)
            or real.name in UNREADABLE
            or "quantization_config" in real.config
            # One small model of this class exists.
            or (real.architecture == "VisionEncoderDecoderModel" and not is_vit(**real.config["encoder"]))
            or "auto_map" in real.config
        ):
            continue
        head = re.search(r"(Encoder|For|LMHead|Text|With).*|Model", real.architecture)[0]
        parts = {(real.config["model_type"], generates(real)), head}
        mark = pytest.mark.slow if parts - seen else pytest.mark.slowest
        seen |= parts
        chosen.append(pytest.param(real, id=real.name, marks=mark))
    return chosen


def generates(real: RealCheckpoint) -> bool:
    return real.architecture.endswith(("ForCausalLM", "LMHeadModel"))


def is_vit(model_type: str, num_channels: int = 3, **_: Any) -> bool:
    return (model_type, num_channels) == ("vit", 3)


@pytest.mark.parametrize("real", small_models())
def test_small_model_with_real_keys_answers_as_the_library(real, tmp_path, pb_utils):
    task = task_of(Checkpoint("m", real.write(tmp_path / "real")))
    weights = real.save(tmp_path / "weights", task)
    record = assembled(weights, tmp_path / "models", "openvino-fp32" if generates(real) else "")
    if record.task in TEXT_TO_TEXT:
        check_texts(weights, tmp_path / "models", record)
    elif record.format == "openvino-fp32":
        check_generation(weights, tmp_path / "models/m")
    elif record.format == "python" and generates(real):
        check_decoder(weights)
    # All other recipes compare what they make with the library's answers themselves, alone and in a batch.


def assembled(weights: Path, repository: Path, form: str) -> Record:
    settings = Settings.load().replace(SYSTEMS="m", SOURCE=str(weights), MODEL_REPOSITORY=str(repository))
    try:
        assemble_all(settings.replace(FORMAT=form))
    except UserError as error:
        if "FORMAT=python serves it" not in str(error):
            raise
        assemble_all(settings.replace(FORMAT="python"))
    record = read_record("m", repository)
    assert record
    return record


def check_texts(weights: Path, repository: Path, record: Record) -> None:
    """Compare with generate(), on the prefix and with the parameters that config.json has for the task."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(weights).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    asked = {"max_new_tokens": NEW_TOKENS, "min_length": 0, "do_sample": False, "num_beams": 1}
    languages = record.facts.get(NEEDS, {})
    params = getattr(model.config, "task_specific_params", None) or {}
    own = next((params[name] for name in params if name.startswith(record.task)), {})
    prefix = own.get("prefix", getattr(model.config, "prefix", None)) or ""
    own = {name: value for name, value in own.items() if hasattr(model.generation_config, name)}

    def expected(text: str) -> str:
        build = getattr(tokenizer, "_build_translation_inputs", None) if languages else None
        encoded = (
            build(text, return_tensors="pt", **languages) if build else tokenizer(prefix + text, return_tensors="pt")
        )
        encoded.pop("token_type_ids", None)
        with torch.inference_mode():
            tokens = model.generate(**encoded, **own | {"max_length": None} | asked)[0]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    parameters = json.dumps(asked | languages).encode()
    with served_system("m", repository) as served:
        requests = [
            {"text": np.array([[text.encode()]], np.object_), "parameters": np.array([[parameters]], np.object_)}
            for text in PROMPTS
        ]
        for answers in (served.alone(requests), served.together(requests)):
            for answer, text in zip(answers, PROMPTS, strict=True):
                ((served_text,),) = (one.values() for one in json.loads(answer["outputs"][0, 0]))
                assert served_text == expected(text)


def check_generation(weights: Path, folder: Path) -> None:
    config = {"model_transaction_policy": {"decoupled": False}} | python_backend.parameters(cache_gigabytes=1)
    engine = importlib.import_module("serving.generation.openvino.engine").GenAIGeneration()
    engine.initialize(python_backend.instance_args(folder, config))
    try:
        requests = [
            InferenceRequest(["text"], {"max_new_tokens": NEW_TOKENS}, prompt=[prompt.encode()]) for prompt in PROMPTS
        ]
        engine.execute(requests)
        model, tokenizer = library(weights)
        for request, prompt in zip(requests, PROMPTS, strict=True):
            assert request.sender.finished.wait(60)
            (response,) = request.sender.responses
            assert response.error is None
            text = response.outputs["text"][0].decode()
            assert text.removeprefix(prompt) == greedy(model, tokenizer, prompt)
    finally:
        engine.finalize()


def check_decoder(weights: Path) -> None:
    model, tokenizer = library(weights)
    expected = [greedy(model, tokenizer, prompt) for prompt in PROMPTS]
    decoder = Decoder(model, tokenizer)
    options = Options(max_new_tokens=NEW_TOKENS, temperature=0.0, top_p=1.0, seed=1, stop=())
    rows = [Row(prompt, decoder.encode(prompt), options) for prompt in PROMPTS]
    decoder.generate(rows, lambda: None)
    assert [row.text for row in rows] == expected


def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return what the library generates after a prompt."""
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    with torch.inference_mode():
        tokens = model.generate(**encoded, **options)[0, encoded["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def library(weights: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(weights)
