"""Export the vision part of a model that sees images, and compare a chat with an image with transformers."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from export.catalogue import FormatUnavailable, Job
from triton_transformers.corpus import MIXED

NEW_TOKENS = 16
# The logarithms of the new tokens' probabilities may differ by this much on average, because weights are rounded.
MAX_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Chat:
    """The inputs of a chat with an image, and the tokens with which transformers continues it."""

    tokens: list[int]
    inputs: dict[str, Any]
    new_tokens: list[int]
    logprobs: list[float]


def greedy_chat(job: Job, model: Any) -> Chat:
    from serving.vision.chat import ChatImages

    images = ChatImages({}, {"model_repository": str(job.weights.parent), "model_version": job.weights.name})
    file = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (16, 24, 3), np.uint8)
    Image.fromarray(pixels).resize((384, 256)).save(file, "PNG")
    content = [{"type": "image"}, {"type": "text", "text": MIXED.texts[0]}]
    prompt = images.template.prompt(images.parts([{"role": "user", "content": content}], 1))
    tokens, inputs = images.encode(prompt, [file.getvalue()])
    with torch.no_grad():
        output = model.generate(
            input_ids=torch.tensor([tokens]), **inputs, do_sample=False, max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    new = output.sequences[0, len(tokens) :].tolist()
    logits = torch.cat(output.logits).float().log_softmax(-1)
    return Chat(tokens, inputs, new, logits[range(len(new)), new].tolist())


def write(model: Any, folder: Path) -> None:
    """Write the model without the layers of its language part, which is a graph of its own."""
    from serving.generation.openvino.vision_part import FOLDER

    config = transformers.AutoConfig.for_model(**model.config.to_dict())
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers, text.layer_types, text.vocab_size, text.pad_token_id = 0, [], 1, None
    vision: Any = transformers.AutoModel.from_config(config, dtype=model.dtype)
    own = vision.state_dict()
    weights = model.model.state_dict()
    vision.load_state_dict(
        {name: weights[name] for name in own if weights[name].shape == own[name].shape}, strict=False
    )
    vision.save_pretrained(folder / FOLDER)


def check(chat: Chat, graph: Path, folder: Path) -> None:
    """Raise FormatUnavailable if the graph continues the chat in another way than transformers."""
    import openvino_genai as genai

    from serving.generation.openvino.pipeline import NO_TOKEN, load_pipeline, tensor
    from serving.generation.openvino.vision_part import VisionPart

    rows = VisionPart(folder, torch.get_num_threads()).rows(chat.tokens, chat.inputs)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    pipeline = load_pipeline(graph, scheduler)
    config = genai.GenerationConfig(logprobs=1, max_new_tokens=len(chat.new_tokens), eos_token_id=NO_TOKEN)
    handle = pipeline.add_request(0, tensor(rows.numbered(chat.tokens)), config)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    output = handle.read_all()[0]
    pairs = zip(output.generated_ids, chat.new_tokens, strict=False)
    same = next((place for place, (own, other) in enumerate(pairs) if own != other), len(chat.new_tokens))
    difference = np.abs(np.subtract(output.generated_log_probs[:same], chat.logprobs[:same]))
    if not same or difference.mean() > MAX_DIFFERENCE:
        raise FormatUnavailable("exported to OpenVINO, it continues a chat with an image in another way")
