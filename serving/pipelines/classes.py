"""Opens the pipeline of a task: transformers' own, or a class for what its release lacks."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from serving.engines.lean_transformers import transformers
from serving.triton.types import Array, BadRequest
from triton_transformers.tasks.texts import TEXT_TO_TEXT

# The folder beside the weights with the vocoder that the model needs, if it needs one.
VOCODER = "vocoder"


def open_pipeline(task: str, folder: Path, device: Any, dtype: Any, trust_remote_code: bool = False) -> Any:
    """Return the pipeline of a folder that save_pretrained wrote. All its files are in there."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if task in TEXT_TO_TEXT:  # transformers 5 dropped these pipelines
        own = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        network = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **own)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **own)
        pipe = text_to_text()(model=network, tokenizer=tokenizer, task=task, device=device)
    else:
        make: Any = transformers.pipeline  # typed for each task by its name
        pipeline_class = OWN[task]() if task in OWN else None
        model: Any = str(folder)
        if task == "decision" and (network := named_class(folder)):
            own = {"local_files_only": True, "use_safetensors": True}
            model = network.from_pretrained(folder, dtype=dtype, **own)
            options |= {"tokenizer": str(folder), "processor": str(folder)}
        if (folder / VOCODER).is_dir():
            options["vocoder"] = open_vocoder(folder / VOCODER, device, dtype)
        pipe = make(task, model=model, pipeline_class=pipeline_class, **options)
    if task == "mask-generation" and importlib.util.find_spec("torchvision") is None:
        without_torchvision(pipe)
    pipe.model.eval()
    return pipe


def named_class(folder: Path) -> Any:
    """Return the class of transformers that config.json names, or None.

    For a decision, transformers' own chooses by the type alone: for any Qwen2 it builds a JevForDecision of the default
    size, which are billions of random weights.
    """
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    return getattr(transformers, names[0], None)


@functools.cache
def text_to_text() -> Any:
    """Return the class of the pipelines that generate texts from texts, as transformers 4 had it."""
    base: Any = transformers.Pipeline

    class TextToText(base):
        _pipeline_calls_generate = True
        _load_tokenizer = True
        _load_processor = _load_image_processor = _load_feature_extractor = False
        _default_generation_config = transformers.GenerationConfig(max_new_tokens=256, num_beams=4)
        prefix: Any  # of config.json

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            settings = getattr(self.model.config, "task_specific_params", None) or {}
            names = [name for name in settings if name.startswith(self.task)] if self.task == "translation" else []
            own = settings.get((*names, self.task)[0]) or {}
            self.prefix = own.get("prefix", self.prefix) or ""
            known = vars(transformers.GenerationConfig())
            self._generate_kwargs |= {name: value for name, value in own.items() if name in known}
            if self.model.generation_config.max_length in (None, 20):  # transformers 4 then took the default above
                self._generate_kwargs.pop("max_length", None)

        def _sanitize_parameters(
            self, truncation: Any = True, src_lang: Any = None, tgt_lang: Any = None, **generate: Any
        ) -> Any:
            own = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang}
            generate |= generate.pop("generate_kwargs", None) or {}
            cleaned = generate.pop("clean_up_tokenization_spaces", False)
            return own, generate, {"clean_up_tokenization_spaces": cleaned}

        def preprocess(self, text: str, truncation: Any = True, src_lang: Any = None, tgt_lang: Any = None) -> Any:
            if hasattr(self.tokenizer, "_build_translation_inputs") and self.task == "translation":
                check_languages(self.tokenizer, src_lang, tgt_lang)
                return self.tokenizer._build_translation_inputs(
                    text, return_tensors="pt", truncation=truncation, src_lang=src_lang, tgt_lang=tgt_lang
                )
            inputs = self.tokenizer(self.prefix + text, return_tensors="pt", truncation=truncation)
            inputs.pop("token_type_ids", None)
            return inputs

        def _forward(self, inputs: Any, **generate: Any) -> Any:
            if isinstance(language := inputs.get("forced_bos_token_id"), list):  # of the rows of a batch, all the same
                inputs["forced_bos_token_id"] = language[0]
            return generated_rows(self, inputs, len(inputs["input_ids"]), generate)

        def postprocess(self, outputs: Any, **decode: Any) -> Any:
            return decoded_texts(self, outputs, TEXT_TO_TEXT[self.task].text_key, **decode)

    return TextToText


def check_languages(tokenizer: Any, source: Any, target: Any) -> None:
    """Raise BadRequest for languages that the tokenizer does not know. It takes them for words, or for unknown ones."""
    try:
        made = tokenizer._build_translation_inputs("", return_tensors="pt", src_lang=source, tgt_lang=target)
        tokens = [made["forced_bos_token_id"], *made["input_ids"].flatten().tolist()]
    except (KeyError, ValueError):
        tokens = [tokenizer.unk_token_id]
    words = {*tokens} - tokenizer.added_tokens_decoder.keys() if tokenizer.is_fast else ()
    if words or tokenizer.unk_token_id in tokens:
        raise BadRequest("src_lang and tgt_lang must be the codes of two languages that the model's tokenizer knows")


def generated_rows(pipe: Any, inputs: Any, rows: int, generate: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens that a model generates for each of these rows: a row may get several texts."""
    generated = pipe.model.generate(**inputs, **pipe._prepare_generate_kwargs(generate))
    return {"texts": generated.reshape(rows, len(generated) // rows, -1)}


def decoded_texts(pipe: Any, outputs: Any, key: str, **decode: Any) -> list[dict[str, str]]:
    """Return the texts of one row."""
    texts = pipe.tokenizer.batch_decode(outputs["texts"][0], skip_special_tokens=True, **decode)
    return [{key: text} for text in texts]


def open_vocoder(folder: Path, device: Any, dtype: Any) -> Any:
    """Return the network that turns spectrograms into sound: SpeechT5 and FastSpeech2Conformer make only these."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind: Any = getattr(transformers, name)
    return kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True).to(device).eval()


def text_to_audio() -> Any:
    base: Any = transformers.TextToAudioPipeline

    class Speech(base):
        """Takes the vector of a speaker as JSON. Without one, SpeechT5 gets zeros, as in its documentation."""

        def _sanitize_parameters(self, forward_params: Any = None, **others: Any) -> Any:
            speaker = (forward_params or {}).get("speaker_embeddings")
            width = getattr(self.model.config, "speaker_embedding_dim", 0)
            if speaker is None and width:
                speaker = torch.zeros(1, width)
            if speaker is not None:
                vector = torch.as_tensor(speaker, dtype=self.model.dtype).reshape(1, -1)
                forward_params = {**(forward_params or {}), "speaker_embeddings": vector}
            return super()._sanitize_parameters(forward_params=forward_params, **others)

    return Speech


def speech_recognition() -> Any:
    base: Any = transformers.AutomaticSpeechRecognitionPipeline

    class Recognition(base):
        """Takes Whisper's prompt as a text, where transformers' own takes the ids of its tokens.

        As in OpenAI's program, only its last tokens count: with others, the answer would not fit the network.
        Times of words beside the language are those without it. Transformers' own puts the token of the language before
        the others and no time before theirs, so that each word has the next one's time and the last may have none.
        """

        def _sanitize_parameters(self, prompt: str | None = None, **others: Any) -> Any:
            if prompt is not None:
                start, *ids = self.tokenizer.get_prompt_ids(prompt).tolist()
                last = ids[-(self.model.config.max_target_positions // 2 - 1) :]
                prompt_ids = torch.tensor([start, *last], device=self.device)
                others["generate_kwargs"] = {**others.get("generate_kwargs", {}), "prompt_ids": prompt_ids}
            return super()._sanitize_parameters(**others)

        def _forward(self, inputs: Any, **options: Any) -> Any:
            outputs = super()._forward(inputs, **options)
            if "lang_id" in outputs and "token_timestamps" in outputs:
                outputs["token_timestamps"] = [pad(times, (1, 0)) for times in outputs["token_timestamps"]]
            return outputs

    return Recognition


def video_classification() -> Any:
    base: Any = transformers.VideoClassificationPipeline

    class Videos(base):
        """Takes the frames that a worker decoded, where transformers' own takes a path."""

        def preprocess(self, video: Array, num_frames: int | None = None, frame_sampling_rate: int = 1) -> Any:
            count = num_frames or self.model.config.num_frames
            if count * frame_sampling_rate > len(video):
                raise BadRequest(f"num_frames and frame_sampling_rate reach past the first {len(video)} frames")
            chosen = np.linspace(0, count * frame_sampling_rate - 1, num=count, dtype=np.int64)
            return self.image_processor(list(video[chosen]), return_tensors="pt").to(self.dtype)

    return Videos


def any_to_any() -> Any:
    base: Any = transformers.AnyToAnyPipeline

    class AnyToAny(with_chats(base)):  # type: ignore[misc]
        """Does without torchvision, which only processors of videos need."""

        __init__ = transformers.Pipeline.__init__

    return AnyToAny


def with_chats(base: Any) -> Any:
    """Return a class of pipelines that takes a chat as a field of a row, or beside texts.

    Transformers' own takes it as a keyword, or beside other chats. Its module has the class of chats that it knows.
    """
    chat = vars(sys.modules[base.__module__])["Chat"]

    class Chats(base):
        def preprocess(self, inputs: Any = None, **parameters: Any) -> Any:
            fields = inputs if isinstance(inputs, dict) else {"text": inputs}
            if isinstance(fields.get("text"), list):
                if len(fields) > 1:
                    raise BadRequest("a chat has its images and sounds in its messages, and not beside them")
                inputs = chat(fields["text"])
            elif fields.keys() == {"text"}:
                inputs = fields["text"]
            return super().preprocess(inputs, **parameters)

    return Chats


def image_to_text() -> Any:
    base: Any = transformers.Pipeline

    class ImageToText(base):
        """Describes images as transformers 4 did: those of transformers 5 also ask for a text and a processor."""

        _pipeline_calls_generate = True
        _load_tokenizer = _load_image_processor = True
        _load_processor = _load_feature_extractor = False
        _default_generation_config = transformers.GenerationConfig(max_new_tokens=256)

        def _sanitize_parameters(self, generate_kwargs: Any = None, **generate: Any) -> Any:
            return {}, generate | (generate_kwargs or {}), {}

        def preprocess(self, image: Any) -> Any:
            return self.image_processor(images=image, return_tensors="pt").to(self.dtype)

        def _forward(self, inputs: Any, **generate: Any) -> Any:
            return generated_rows(self, inputs, len(inputs["pixel_values"]), generate)

        def postprocess(self, outputs: Any) -> Any:
            return decoded_texts(self, outputs, "generated_text")

    return ImageToText


OWN = {
    "any-to-any": any_to_any,
    "automatic-speech-recognition": speech_recognition,
    "image-text-to-text": lambda: with_chats(transformers.ImageTextToTextPipeline),
    "image-to-text": image_to_text,
    "text-generation": lambda: with_chats(transformers.TextGenerationPipeline),
    "text-to-audio": text_to_audio,
    "video-classification": video_classification,
}


def sampling_rate(pipe: Any) -> int:
    """Return the rate in Hz of the sound that the model takes."""
    owner = pipe.feature_extractor or getattr(pipe.processor, "feature_extractor", None)
    if owner is None:
        raise BadRequest("this model takes no sound")
    return int(owner.sampling_rate)


def without_torchvision(pipe: Any) -> None:
    """Let a pipeline of masks do without torchvision, of which it calls one function."""
    module = sys.modules[type(pipe.image_processor).__module__]
    boxes = ModuleType("torchvision.ops.boxes")
    boxes.batched_nms = batched_nms  # type: ignore[attr-defined]
    sys.modules.setdefault(boxes.__name__, boxes)
    pipe.image_processor.post_process_for_mask_generation = module._post_process_for_mask_generation


def batched_nms(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the boxes that overlap no better one of their kind, best first, as torchvision does."""
    order, kept = scores.argsort(descending=True, stable=True), []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        corners = torch.max(boxes[best, :2], boxes[order, :2]), torch.min(boxes[best, 2:], boxes[order, 2:])
        shared = (corners[1] - corners[0]).clamp(min=0).prod(1)
        areas = [(box[..., 2:] - box[..., :2]).prod(-1) for box in (boxes[best], boxes[order])]
        overlap = shared / (areas[0] + areas[1] - shared)
        order = order[(overlap <= iou_threshold) | (idxs[best] != idxs[order])]
    return torch.stack(kept) if kept else order
