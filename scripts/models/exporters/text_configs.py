"""The configs of a text encoder's ensemble, from its task (tasks.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.models.exporters.config_writer import batched, ensemble, ragged, tensor
from scripts.models.tasks import activation

if TYPE_CHECKING:
    from scripts.models.exporters.text import TextModel

MAX_BATCH = 64
ANSWERS = 5  # words for a mask
Config = tuple[dict, dict[str, object]]  # Triton's fields, the backend's parameters


def configs(model: TextModel, width: int) -> dict[str, Config]:
    """Of each Triton model of the ensemble."""
    axes = {"T": -1, "E": -1, "L": model.config.num_labels, "D": width, "V": model.config.vocab_size, "K": ANSWERS}

    def dims(shape: tuple) -> list[int]:
        return [axes.get(axis, axis) for axis in shape]

    task = model.task
    texts = [tensor(name, "STRING", [1]) for name in task.inputs]
    fed = [tensor(name, "INT64", [-1]) for name in model.token_inputs]
    of_tokens = [tensor(name, "INT64", [-1, 2] if name == "offsets" else [-1]) for name in task.of_tokens]
    of_texts = [text for text in texts if text["name"] in task.of_texts]
    outputs = [tensor(name, "FP32", dims(shape)) for name, shape in task.outputs.items()]
    answers = [tensor(name, kind, dims(shape)) for name, (kind, shape) in task.answers.items()]

    parts = {
        "tokenizer": (
            batched("tokenizer", MAX_BATCH, texts, fed + of_tokens, "KIND_CPU"),
            {"padding": "none"} | ({"exactly_one": model.mask} if model.mask else {}),
        ),
        "encoder": encoder(model, fed, outputs),
    }
    if answers:
        needed = ragged(outputs + of_tokens) + of_texts
        parts["answers"] = batched("postprocessor", MAX_BATCH, needed, answers, "KIND_CPU"), last_step(model)
    steps = {model.part(part).name: config for part, (config, _) in parts.items()}
    return parts | {"ensemble": (ensemble(steps, texts, answers or outputs), {})}


def encoder(model: TextModel, fed: list[dict], outputs: list[dict]) -> Config:
    if target := model.order.neuron:
        cores = {"NEURON_CORE_START_INDEX": target.cores[0], "NEURON_CORE_END_INDEX": target.cores[-1]}
        return batched("neuron", MAX_BATCH, ragged(fed), outputs, "KIND_MODEL"), {"task": "text-encoder", **cores}
    if model.order.format != "python":
        return batched("packed_onnx", MAX_BATCH, ragged(fed), outputs, "KIND_AUTO"), {}
    parameters = {"task": "text-encoder", "model_class": model.task.model_class}
    if model.mask:
        parameters["mask_token_id"] = model.hugging_face_tokenizer.mask_token_id
    if "sentence_embedding" in model.task.outputs:
        parameters |= model.pooling
    if model.order.trust_remote_code:
        parameters["trust_remote_code"] = 1
    return batched("transformers", MAX_BATCH, ragged(fed), outputs, "KIND_AUTO"), parameters


def last_step(model: TextModel) -> dict[str, object]:
    parameters: dict[str, object] = {"task": model.order.task}
    if model.order.task == "text-classification":
        parameters["activation"] = activation(model.config)
    if model.mask:
        parameters["count"] = ANSWERS
    return parameters
