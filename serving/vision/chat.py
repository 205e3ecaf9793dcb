"""Reads chats with images for a vision-language model, and lets the checkpoint's processor prepare them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from serving.text.chat_template import IMAGES, MESSAGES, ChatTemplate, Message
from serving.triton.parameters import int_parameter, weights_folder
from serving.triton.types import BadRequest, ConfigError, InstanceArgs, ModelConfig
from serving.vision.files import Place, opened, upright
from serving.vision.processor import LARGE_PIXELS, MAX_PIXELS

if TYPE_CHECKING:
    import torch

Inputs = dict[str, "torch.Tensor"]  # of the model, beside the tokens

# Processors enlarge the shorter edge of an image, or refuse such images as Qwen's does.
MAX_RATIO = 200
# The inputs with a value for each token. The others have values for each image, or each patch of one.
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
# The processors without num2words, which another one needs for videos. With images they do the same.
WITHOUT_VIDEOS = {"SmolVLMProcessor": "Idefics3Processor"}


class ChatImages:
    """The processor of a vision-language model. Threads may share it."""

    def __init__(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.max_pixels = int_parameter(config, "max_pixels", MAX_PIXELS)
        self.large = threading.Lock()  # decoded and processed, images take much memory: one request with large ones
        Image.MAX_IMAGE_PIXELS = None  # we check max_pixels instead
        folder = weights_folder(config, args)
        try:
            self.processor = load_processor(folder)
        except (OSError, ValueError, ImportError, AttributeError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder} has no processor of images and texts that loads: {error}") from None
        self.tokenizer = self.processor.tokenizer
        # The caller of the tokenizer uses its template, too.
        self.tokenizer.chat_template = self.processor.chat_template or self.tokenizer.chat_template
        self.template = ChatTemplate.of_tokenizer(self.tokenizer)
        owners = (self.processor, self.tokenizer)
        names = ("image_token", "video_token", "boi_token")
        tokens = {token for owner in owners for name in names if (token := getattr(owner, name, None))}
        # The tokens that stand for images and videos -> their ids.
        vocabulary = self.tokenizer.get_vocab()
        self.placeholders: dict[str, int] = {token: vocabulary[token] for token in tokens if token in vocabulary}
        self.takes_parts = self._takes_parts()

    def _takes_parts(self) -> bool:
        """Return whether the template knows contents that are lists of parts."""
        content = [{"type": "text", "text": "probe"}]
        try:
            prompt = self.template.prompt([{"role": "user", "content": content}])
        except BadRequest:
            return False
        return "probe" in prompt and "'type'" not in prompt

    def parts(self, messages: list[Message], count: int) -> list[Message]:
        """Return the messages as the template knows them. Raise BadRequest unless they have this many images."""
        contents = [_checked(message["content"], number) for number, message in enumerate(messages)]
        placed = sum(part["type"] == "image" for parts in contents for part in parts or ())
        if placed != count:
            raise BadRequest(
                f"input '{IMAGES}' has {count} images, and '{MESSAGES}' has places for {placed}", IMAGES, MESSAGES
            )
        if not self.takes_parts:
            if count:
                raise BadRequest(f"input '{IMAGES}': the model's chat template has no place for images", IMAGES)
            return messages
        return [message | {"content": parts} for message, parts in zip(messages, contents, strict=True)]

    def encode(self, prompt: str, files: Sequence[bytes]) -> tuple[list[int], Inputs]:
        """Return the tokens of a chat's prompt, and the model's other inputs. Raise BadRequest for a wrong image."""
        if not files:
            return self.tokens(prompt), {}
        if prompt.count(self.processor.image_token) != len(files):
            raise self._imitated(MESSAGES)
        pixels = self.check_sizes(files)
        with self.large if pixels > LARGE_PIXELS else contextlib.nullcontext():
            images = self.decode(files)
            try:
                special = self.adds_special_tokens(prompt)
                inputs = dict(
                    self.processor(text=[prompt], images=[images], add_special_tokens=special, return_tensors="pt")
                )
            except Exception as error:  # a processor raises anything, such as for a video's token in a text
                raise BadRequest(f"input '{IMAGES}': the model's processor cannot read them: {error}"[:300]) from None
        tokens = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        return tokens, inputs

    def tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a chat's prompt. Each image is one of them."""
        tokens: list[int] = self.tokenizer(prompt, add_special_tokens=self.adds_special_tokens(prompt)).input_ids
        return tokens

    def adds_special_tokens(self, prompt: str) -> bool:
        """Return whether the template left them to the processor, as many of these models' templates do."""
        return not prompt.startswith(self.tokenizer.bos_token or "\0")

    def check_text(self, tokens: Sequence[int], name: str = MESSAGES) -> None:
        """Raise BadRequest if a request without images has the tokens of one: the model would have no pixels for it."""
        if not set(self.placeholders.values()).isdisjoint(tokens):
            raise self._imitated(name)

    def _imitated(self, name: str) -> BadRequest:
        names = " or ".join(sorted(self.placeholders))
        return BadRequest(
            f"input '{name}': a text has {names}, which stands for an image to this model: remove it", name
        )

    def check_sizes(self, files: Sequence[bytes]) -> int:
        """Return the pixels of all images, by their headers. Raise BadRequest if they are too many."""
        total = 0
        for row, file in enumerate(files):
            place = Place(IMAGES, row)
            with opened(place, file) as image:
                width, height = image.size
            total += width * height
            if total > self.max_pixels:
                raise place.error(f"makes the images larger than max_pixels={self.max_pixels} together")
            if max(width, height) > MAX_RATIO * min(width, height):
                raise place.error(f"is more than {MAX_RATIO} times as long as wide")
        return total

    def decode(self, files: Sequence[bytes]) -> list[Image.Image]:
        """Return the images, upright and in colours."""
        images = []
        for row, file in enumerate(files):
            with opened(Place(IMAGES, row), file) as image:
                images.append(upright(image))
        return images


def _checked(content: Any, number: int) -> list[dict[str, str]] | None:
    """Return a content as parts, which are texts and images."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        return None
    if isinstance(content, list):
        parts = [
            {"type": "image"} if part == {"type": "image"} else {"type": "text", "text": part["text"]}
            for part in content
            if part == {"type": "image"} or (isinstance(part, dict) and isinstance(part.get("text"), str))
        ]
        if len(parts) == len(content):
            return parts
    raise BadRequest(
        f"input '{MESSAGES}': the content of message {number} must be a text, or a list of "
        '{"type": "text", "text": ...} and {"type": "image"}',
        MESSAGES,
    )


def load_processor(folder: Path) -> Any:
    """Load the processor of images and texts, without its part for videos, which takes torchvision."""
    from serving.engines.lean_transformers import transformers

    options: dict[str, Any] = {"local_files_only": True}
    kind = transformers.AutoConfig.from_pretrained(folder, **options).model_type
    name = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[kind]
    processor_class = getattr(transformers, WITHOUT_VIDEOS.get(name, name))
    image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)

    class Processor(processor_class):  # type: ignore[misc, valid-type]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    settings, _ = Processor.get_processor_dict(folder, **options)
    settings.pop("video_processor", None)
    return Processor.from_args_and_dict([image_processor, tokenizer], settings)


def joined(rows: Sequence[Inputs], width: int) -> Inputs:
    """Return the inputs of a batch whose texts are padded on the left to this width. Rows of texts have no inputs."""
    import torch

    # Idefics3 and SmolVLM keep the images of each text apart: [texts, images, ...]. Other models have all in one list.
    apart = any(inputs["pixel_values"].ndim == 5 for inputs in rows if inputs)
    batch: Inputs = {}
    for name in dict.fromkeys(name for inputs in rows for name in inputs):
        values = [inputs.get(name) for inputs in rows]
        present = [value for value in values if value is not None]
        if name in PER_TOKEN:
            batch[name] = padded(values, width, is_left=True)
        elif apart:
            batch[name] = padded(values, max(value.shape[1] for value in present), is_left=False)
        else:
            batch[name] = torch.cat(present)
    return batch


def padded(values: Sequence[torch.Tensor | None], width: int, is_left: bool) -> torch.Tensor:
    """Return tensors of shape [1, size, ...], which rows may lack, in one of shape [rows, width, ...]."""
    example = next(value for value in values if value is not None)
    whole = example.new_zeros((len(values), width, *example.shape[2:]))
    for row, value in enumerate(values):
        if value is not None:
            start = width - value.shape[1] if is_left else 0
            whole[row, start : start + value.shape[1]] = value[0]
    return whole
