"""Loads compiled models with PyTorch or TensorFlow, and calls them: tensors by name in, tensors by name out.

It knows nothing of Triton's requests. A framework imports the Neuron libraries, so an instance claims its cores first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from serving.neuron.cores import Cores
from serving.neuron.libraries import imported, loading, running
from serving.triton.parameters import int_parameter, parameter
from serving.triton.types import BY_ONNX, ConfigError, Tensors

# numpy has no bfloat16; such tensors are float32 outside of the model.
BFLOAT16 = "TYPE_BF16"
NUMPY = {element.config: element.numpy for element in BY_ONNX.values()} | {BFLOAT16: np.float32}


class Framework(ABC):
    """A library that loads and calls the model. The runtime puts each load on the next core of the process."""

    torch: ModuleType  # set by the frameworks that use PyTorch
    copies: int  # how often to load the model
    splits = False  # the library splits a batch over the cores by itself
    cuts_evenly = False  # cut a batch evenly over the copies if the model's number of rows is unknown

    @abstractmethod
    def load(self, path: Path) -> Callable: ...

    @abstractmethod
    def call(self, model: Callable, inputs: Tensors) -> Tensors: ...


def numpy_types(tensors: list[dict]) -> dict[str, type]:
    """Return the numpy type of each tensor of config.pbtxt."""
    for tensor in tensors:
        if tensor["data_type"] not in NUMPY:
            raise ConfigError(f"'{tensor['name']}': {tensor['data_type']} is not a type of a compiled model's tensors")
    return {tensor["name"]: NUMPY[tensor["data_type"]] for tensor in tensors}


# --- PyTorch ----------------------------------------------------------------------------------------------------------


class TorchNeuronX(Framework):
    """PyTorch on Inf2 and Trn1."""

    package = "torch_neuronx"

    def __init__(self, config: dict, cores: Cores) -> None:
        self.inputs = in_order(config["input"], "input")
        self.outputs = in_order(config["output"], "output")
        self.cores = cores
        self.copies = cores.count
        self.torch = imported("torch")
        imported(self.package)  # makes torch.jit.load() load onto Neuron
        self.bfloat16 = {tensor["name"] for tensor in config["input"] if tensor["data_type"] == BFLOAT16}
        for side in ("input", "output"):
            self.check_types(config[side])

    def check_types(self, tensors: list[dict]) -> None:
        for name, dtype in numpy_types(tensors).items():
            try:
                self.torch.from_numpy(np.empty(0, dtype))
            except TypeError:
                raise ConfigError(f"'{name}': PyTorch {self.torch.__version__} has no {np.dtype(dtype)}") from None

    def load(self, path: Path) -> Callable:
        if not path.is_file():
            raise ConfigError(f"{path}, the compiled model, is missing: put it there, or correct COMPILED_MODEL")
        return load_torchscript(self.torch, path, self.cores)

    def call(self, model: Callable, inputs: Tensors) -> Tensors:
        tensors = [self.tensor(name, inputs[name]) for name in self.inputs]
        return call_torchscript(self.torch, model, tensors, self.outputs)

    def tensor(self, name: str, array: np.ndarray):
        tensor = self.torch.from_numpy(np.ascontiguousarray(array))
        return tensor.bfloat16() if name in self.bfloat16 else tensor


class TorchNeuron(TorchNeuronX):
    """PyTorch on Inf1, where the library splits a batch over the cores."""

    package = "torch_neuron"
    splits = True

    def __init__(self, config: dict, cores: Cores) -> None:
        super().__init__(config, cores)
        self.copies = 1
        self.split_size = int_parameter(config, "COMPILED_BATCH_SIZE", 0)

    def load(self, path: Path) -> Callable:
        loaded = super().load(path)
        with loading(path, self.cores):
            # The library numbers the cores from the first that this process sees.
            model = self.torch.neuron.DataParallel(loaded, device_ids=list(range(self.cores.count)))
        model.num_workers = self.cores.threads
        if self.split_size:
            model.split_size = self.split_size
        return model


def load_torchscript(torch: ModuleType, path: Path, cores: Cores) -> Callable:
    with loading(path, cores):
        return torch.jit.load(str(path))


def call_torchscript(torch: ModuleType, model: Callable, tensors: list, outputs: list[str]) -> Tensors:
    with running(), torch.no_grad():
        answer = model(*tensors)
    return {name: as_array(torch, name, value) for name, value in named(answer, outputs).items()}


def as_array(torch: ModuleType, name: str, value: object) -> np.ndarray:
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"the model's output for '{name}' is a {type(value).__name__}, not a tensor")
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def in_order(tensors: list[dict], side: str) -> list[str]:
    """Sort names by the index in `<name>__<index>`, because TorchScript has no names."""
    places: dict[int, str] = {}
    for tensor in tensors:
        name, _, index = tensor["name"].rpartition("__")
        if not name or not index.isdecimal():
            raise ConfigError(f"{side} '{tensor['name']}' must be named <name>__<index>, such as INPUT__0")
        if int(index) in places:
            raise ConfigError(f"{side}s '{places[int(index)]}' and '{tensor['name']}' have the same index")
        places[int(index)] = tensor["name"]
    missing = set(range(len(places))) - places.keys()
    if missing:
        raise ConfigError(f"no {side} has the index {min(missing)}: they count from 0, without a gap")
    return [places[index] for index in range(len(places))]


def named(answer: object, outputs: list[str]) -> dict[str, object]:
    """Name the model's outputs: by key if it returns a dict with a key of that name, else by position."""
    keyed = answer if isinstance(answer, Mapping) else {}
    values = list(answer.values()) if isinstance(answer, Mapping) else answer
    if not isinstance(values, (list, tuple)):
        values = [values]
    if len(values) < len(outputs):
        raise RuntimeError(f"the model has {len(values)} output(s), config.pbtxt {len(outputs)}: {', '.join(outputs)}")
    return {name: keyed.get(name.rpartition("__")[0], value) for name, value in zip(outputs, values)}  # noqa: B905


# --- TensorFlow -------------------------------------------------------------------------------------------------------


class TensorFlow(Framework):
    """A SavedModel."""

    cuts_evenly = True

    def __init__(self, config: dict, cores: Cores) -> None:
        for tensor in config["input"] + config["output"]:
            if tensor["data_type"] == BFLOAT16:
                raise ConfigError(f"'{tensor['name']}': BF16 is for PyTorch models only")
        self.inputs = numpy_types(config["input"])
        self.outputs = numpy_types(config["output"])
        self.cores = cores
        self.copies = cores.count
        self.tags = [tag.strip() for tag in parameter(config, "TAG_SET", "serve").split(",")]
        self.key = parameter(config, "SIGNATURE_DEF_KEY", "serving_default")
        self.tf = imported("tensorflow")

    def load(self, path: Path) -> Callable:
        if not any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
            raise ConfigError(f"{path}, the compiled model, is no SavedModel: put it there, or correct COMPILED_MODEL")
        with loading(f"{path} with the tags {', '.join(self.tags)}", self.cores):
            return self.signature(path)

    def signature(self, path: Path) -> Callable:
        loaded = self.tf.saved_model.load(str(path), tags=self.tags)  # its error lists the known tags
        if self.key not in loaded.signatures:
            known = ", ".join(sorted(loaded.signatures))
            raise ConfigError(f"{path} has no signature '{self.key}', it has {known}: correct SIGNATURE_DEF_KEY")
        signature = loaded.signatures[self.key]
        specs = signature.structured_input_signature[1]
        for side, names, known in (
            ("input", self.inputs, specs),
            ("output", self.outputs, signature.structured_outputs),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ConfigError(f"the signature has no {side} '{unknown[0]}'; it has {', '.join(sorted(known))}")
        if missing := [name for name in specs if name not in self.inputs]:
            raise ConfigError(f"the signature needs an input '{missing[0]}', which config.pbtxt lacks")

        # The default keeps the loaded model, whose variables live as long as it does.
        def run(inputs: Tensors, model: Any = loaded) -> Tensors:
            tensors = {name: self.tf.constant(array, specs[name].dtype) for name, array in inputs.items()}
            return {name: value.numpy() for name, value in signature(**tensors).items()}

        return run

    def call(self, model: Callable, inputs: Tensors) -> Tensors:
        with running():
            answer = model(inputs)
        return {name: np.asarray(answer[name]) for name in self.outputs}


FRAMEWORKS: dict[str, Callable[..., Framework]] = {
    "torch-neuron": TorchNeuron,
    "torch-neuronx": TorchNeuronX,
    "tensorflow": TensorFlow,
}
