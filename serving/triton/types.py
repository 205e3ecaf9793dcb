"""Types that the backends share, and the errors that users see: why a model does not load, or a response."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]  # by the names of config.pbtxt
ModelConfig = dict[str, Any]  # config.pbtxt as Triton passes it: parsed JSON
InstanceArgs = dict[str, str]  # what Triton passes to initialize()


class ConfigError(ValueError):
    """Raised when a model cannot be served as its config.pbtxt asks; Triton reports the message."""


class Busy(RuntimeError):
    """Raised when too many requests wait: HTTP status 503."""


class Cancelled(RuntimeError):
    """Raised for a request that its client no longer waits for: HTTP status 499."""


class BadRequest(ValueError):
    """Raised for a wrong request: HTTP status 400. The message names the input and never quotes its content."""


class ElementType(NamedTuple):
    """The names of one type: ONNX's, config.pbtxt's and numpy's."""

    onnx: str
    config: str
    numpy: type


_SAME = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")  # names in all three
_TYPES = (
    *(ElementType(f"tensor({name})", f"TYPE_{name.upper()}", np.dtype(name).type) for name in _SAME),
    ElementType("tensor(float16)", "TYPE_FP16", np.float16),
    ElementType("tensor(float)", "TYPE_FP32", np.float32),
    ElementType("tensor(double)", "TYPE_FP64", np.float64),
    ElementType("tensor(string)", "TYPE_STRING", np.object_),
)

BY_ONNX = {element.onnx: element for element in _TYPES}
