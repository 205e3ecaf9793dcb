"""The tasks of language models: they continue texts and chats, some with images and sound."""

from __future__ import annotations

from triton_transformers.engines import TEXT_FORMATS
from triton_transformers.tasks.task import CHATS, FEW_TOKENS, OPTIONS, PIPELINE, SAMPLING, Hub, Task

CHAT = {"text": "chat", "images": "images"}
QUESTION = "What is the capital of France?"  # small models know it
# The architectures whose batches have been compared with transformers' own answers (tests/serving/vision/test_chat.py).
SEEING = tuple(f"{family}ForConditionalGeneration" for family in (
    "Gemma3", "Idefics3", "Llava", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "SmolVLM",
))  # fmt: skip

TASKS = {
    "text-generation": Task(
        "continues a text",
        {"text": "chat"},
        f"{CHATS} {SAMPLING} prefix",
        kind="generation",
        example="The three laws of robotics are",
        quick=FEW_TOKENS,
        ends_by="",
        drawing="text",
        recipe="language.recipe",
        formats=(*TEXT_FORMATS, PIPELINE),
        version="2",
        heads=("ForCausalLM", "LMHeadModel"),
        rank=1,
    ),
    "image-text-to-text": Task(
        "continues a text about images",
        CHAT,
        f"{CHATS} {OPTIONS}",
        hub=Hub(options=OPTIONS),
        example="What is in the image?",
        quick={OPTIONS: FEW_TOKENS},
        ends_by=OPTIONS,
        noun="images",
        drawing="text",
        recipe="language.recipe",
        formats=(*(form for form in TEXT_FORMATS if form != "openvino-bf16"), PIPELINE),
        heads=SEEING,
    ),
    "any-to-any": Task(
        "continues texts, images and sound",
        {**CHAT, "audio": "audio"},
        f"{CHATS} {OPTIONS} generation_mode",
        hub=Hub(options=OPTIONS),
        example=QUESTION,
        quick={OPTIONS: FEW_TOKENS},
        ends_by=OPTIONS,
        files=0,
        drawing="text",
        rank=2,
    ),
}
