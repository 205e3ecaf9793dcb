"""Vision models: an ensemble of image processor, ONNX graph, and labels where the task has them; or all in PyTorch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
import transformers

from scripts.common.settings import UserError
from scripts.models.catalogue import Order
from scripts.models.exporters.config_writer import batched, ensemble, ragged, tensor, write_config
from scripts.models.exporters.onnx_export import export, quantized, quiet
from scripts.models.exporters.parity import compare
from scripts.models.tasks import activation, save_labels

MAX_BATCH = 32
LEAST_COSINE = 0.9999
POOLED = "pooler_output"
# Those with configs in git, and as what they are served.
PUBLISHED = {"python_vit": ("python",), "vit_ensemble": ("onnx", "onnx-int8")}
PUBLISHED_PARTS = {"ensemble": "vit_ensemble", "processor": "preprocessing", "model": "vit"}

IMAGES = [
    tensor("image", "FP32", [-1, -1, 3], optional=True),
    tensor("image_bytes", "STRING", [1], optional=True),
]
PIXEL_VALUES = tensor("pixel_values", "FP32", [-1, -1, -1])


@dataclass
class VisionModel:
    """A model of the order, and the Triton models it becomes."""

    order: Order

    @property
    def classifies(self) -> bool:
        return self.order.task == "image-classification"

    @property
    def export_task(self) -> str:
        """As optimum names it."""
        return "image-classification" if self.classifies else "feature-extraction"

    @cached_property
    def original(self) -> transformers.PreTrainedModel:
        return self._loaded[0]

    @cached_property
    def outputs(self) -> list[str]:
        """Of the original. A pooler that the weights lack would answer at random, and is left out."""
        if self.classifies:
            return ["logits"]
        return [name for name in ("last_hidden_state", POOLED) if name in self.answered and name not in self._loaded[1]]

    @cached_property
    def answered(self):
        """What the original answers to one picture."""
        return answers(self.original, self.examples[:1])

    @cached_property
    def _loaded(self) -> tuple[transformers.PreTrainedModel, list[str]]:
        """The original, and which of its outputs are of no use, for the weights lack what they need."""
        kind = transformers.AutoModelForImageClassification if self.classifies else transformers.AutoModel
        try:
            model, found = kind.from_pretrained(
                self.order.weights,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=self.order.trust_remote_code,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise UserError(f"{self.order.weights} is no model for {self.order.task}: {error}") from None
        poolers = {key for key in found["missing_keys"] if "pooler" in key}
        if missing := sorted(set(found["missing_keys"]) - poolers):
            raise UserError(f"{self.order.weights} is no model for {self.order.task}: it has no weights '{missing[0]}'")
        return model.eval(), [POOLED] if poolers else []

    @cached_property
    def processor(self) -> transformers.BaseImageProcessor:
        try:
            return transformers.AutoImageProcessor.from_pretrained(
                self.order.weights, use_fast=False, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"{self.order.weights} has no image processor that can be used: {error}") from None

    @cached_property
    def examples(self) -> list[np.ndarray]:
        """pixel_values of a few pictures: plain, noise, waves; upright, lying, small."""
        random = np.random.default_rng(0)
        rows, columns = np.mgrid[0:300, 0:200]
        waves = np.stack([np.sin(rows / 9), np.sin(columns / 7), np.sin((rows + columns) / 23)], axis=-1)
        pictures = [
            np.full((64, 64, 3), 127, np.uint8),
            random.integers(0, 256, (48, 96, 3), np.uint8),
            random.integers(0, 256, (10, 10, 3), np.uint8).repeat(40, axis=0).repeat(40, axis=1),
            ((waves + 1) * 127).astype(np.uint8),
        ]
        return [self.processor(picture, return_tensors="np")["pixel_values"] for picture in pictures]

    @property
    def labels(self) -> list[str]:
        return [label for _, label in sorted(self.original.config.id2label.items())]

    def part(self, name: str) -> Path:
        """The folder of one of the Triton models. Those of vit_ensemble have their names from the published guides."""
        own = self.order.system if name == "ensemble" else f"{self.order.system}_{name}"
        return self.order.folder / (PUBLISHED_PARTS[name] if self.order.system == "vit_ensemble" else own)


def assemble(order: Order) -> dict:
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = VisionModel(order)
    with quiet():
        check_published(model)
        return save_python(model) if order.format == "python" else save_ensemble(model)


def check_published(model: VisionModel) -> None:
    """Their configs are in git, and promise what other formats, tasks and weights do not keep."""
    order = model.order
    formats = PUBLISHED.get(order.system)
    if formats is None:
        return
    if order.format not in formats or model.classifies:
        wrong = order.task if model.classifies else f"FORMAT={order.format}"
        raise UserError(f"{order.system} is image-feature-extraction, FORMAT={formats[0]}: {wrong} wants another name")
    if order.system == "vit_ensemble" and POOLED not in model.outputs:
        raise UserError(
            f"vit_ensemble answers a {POOLED}, and {order.weights} has no pooler: another name is served without"
        )


# --- in PyTorch -------------------------------------------------------------------------------------------------------


def save_python(model: VisionModel) -> dict:
    order = model.order
    made = labelled(model) if model.classifies else features(model)
    version = order.folder / order.system / "1"
    version.mkdir(parents=True)
    order.take_model(version)
    model.processor.save_pretrained(version)
    if order.system not in PUBLISHED:
        activated = last_step(model) if model.classifies else {}
        parameters = {"task": order.task} | activated | ({"trust_remote_code": 1} if order.trust_remote_code else {})
        write(model, "ensemble", batched("transformers", MAX_BATCH, ragged(IMAGES), made, "KIND_AUTO"), parameters)
    return {}


def features(model: VisionModel) -> list[dict]:
    return [tensor(name, "FP32", [-1] * (model.answered[name].ndim - 1)) for name in model.outputs]


# --- as an ensemble ---------------------------------------------------------------------------------------------------


def save_ensemble(model: VisionModel) -> dict:
    for part in ("ensemble", "processor", "model", *(["answers"] if model.classifies else [])):
        (model.part(part) / "1").mkdir(parents=True)
    model.processor.save_pretrained(model.part("processor") / "1")
    facts = save_onnx(model, model.part("model") / "1/model.onnx")
    if model.classifies:
        save_labels(model.part("answers") / "1", model.labels)
    if model.order.system not in PUBLISHED:
        write_configs(model)
    return facts


def save_onnx(model: VisionModel, target: Path) -> dict:
    *_, height, width = model.examples[0].shape
    export(
        model.order.weights,
        model.export_task,
        target.parent,
        model.outputs,
        custom_onnx_configs={"model": onnx_config(model)},
        height=height,
        width=width,
    )
    found = run(target, model.examples)
    cosine = compare(reference(model), found, LEAST_COSINE)
    facts = {"least_cosine": cosine, "parity_pictures": len(found)}
    said = f"cosine with the original at least {cosine:.6f} on {len(found)} pictures"
    if model.order.format == "onnx-int8":
        facts |= quantized(target, lambda: run(target, model.examples))
        said += f"; {facts.pop('said')}"
    return facts | {"said": said}


def onnx_config(model: VisionModel):
    """Optimum's own, with all of the outputs: it leaves out the pooled one."""
    import optimum.exporters.onnx.model_configs  # noqa: F401  (registers what can be exported)
    from optimum.exporters.tasks import TasksManager

    try:
        theirs = TasksManager.get_exporter_config_constructor(
            "onnx", model=model.original, task=model.export_task, library_name="transformers"
        )
    except (KeyError, ValueError):
        kind = model.original.config.model_type
        raise UserError(f"{model.order.system}: no ONNX of a model of type {kind}: FORMAT=python serves it") from None
    outputs = property(lambda self: {name: {0: "batch_size"} for name in model.outputs})
    return type("AllOutputs", (theirs.func,), {"outputs": outputs})(model.original.config, **theirs.keywords)


def write_configs(model: VisionModel) -> None:
    session = ort.InferenceSession(str(model.part("model") / "1/model.onnx"), providers=["CPUExecutionProvider"])
    outputs = [
        tensor(node.name, "FP32", [axis if isinstance(axis, int) else -1 for axis in node.shape[1:]])
        for node in session.get_outputs()
    ]
    parts = {
        "processor": batched("image_processor", MAX_BATCH, ragged(IMAGES), [PIXEL_VALUES], "KIND_CPU"),
        "model": batched("onnxruntime", MAX_BATCH, [PIXEL_VALUES], outputs, "KIND_AUTO"),
    }
    if model.classifies:
        parts["answers"] = batched("postprocessor", MAX_BATCH, outputs, labelled(model), "KIND_CPU")
    steps = {model.part(part).name: config for part, config in parts.items()}
    parts["ensemble"] = ensemble(steps, IMAGES, list(steps.values())[-1]["output"])
    for part, config in parts.items():
        write(model, part, config, last_step(model) if part == "answers" else {})


def write(model: VisionModel, part: str, config: dict, parameters: dict) -> None:
    write_config(model.part(part), f"{model.order.task}, written by `make models`", config, parameters)


def last_step(model: VisionModel) -> dict:
    return {"task": model.order.task, "activation": activation(model.original.config)}


def labelled(model: VisionModel) -> list[dict]:
    return [
        tensor("label", "STRING", [1]),
        tensor("score", "FP32", [1]),
        tensor("scores", "FP32", [len(model.labels)]),
    ]


# --- is it still the model? -------------------------------------------------------------------------------------------


@torch.inference_mode()
def answers(original: transformers.PreTrainedModel, examples: list[np.ndarray]):
    return original(pixel_values=torch.from_numpy(np.concatenate(examples)))


def reference(model: VisionModel) -> list[np.ndarray]:
    found = [answers(model.original, [example]) for example in model.examples]
    return [np.concatenate([each[name].numpy().ravel() for name in model.outputs]) for each in found]


def run(path: Path, examples: list[np.ndarray]) -> list[np.ndarray]:
    """All outputs for each picture, in one row."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = [session.run(None, {"pixel_values": example}) for example in examples]
    return [np.concatenate([array.ravel() for array in arrays]) for arrays in found]
