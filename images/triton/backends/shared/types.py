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


class BadRequest(ValueError):
    """Raised for a wrong request: HTTP status 400. The message names the input and never quotes its content."""


class ElementType(NamedTuple):
    """The names of one type: ONNX's, config.pbtxt's and numpy's."""

    onnx: str
    config: str
    numpy: type


_TYPES = (
    ElementType("tensor(bool)", "TYPE_BOOL", np.bool_),
    ElementType("tensor(uint8)", "TYPE_UINT8", np.uint8),
    ElementType("tensor(uint16)", "TYPE_UINT16", np.uint16),
    ElementType("tensor(uint32)", "TYPE_UINT32", np.uint32),
    ElementType("tensor(uint64)", "TYPE_UINT64", np.uint64),
    ElementType("tensor(int8)", "TYPE_INT8", np.int8),
    ElementType("tensor(int16)", "TYPE_INT16", np.int16),
    ElementType("tensor(int32)", "TYPE_INT32", np.int32),
    ElementType("tensor(int64)", "TYPE_INT64", np.int64),
    ElementType("tensor(float16)", "TYPE_FP16", np.float16),
    ElementType("tensor(float)", "TYPE_FP32", np.float32),
    ElementType("tensor(double)", "TYPE_FP64", np.float64),
    ElementType("tensor(string)", "TYPE_STRING", np.object_),
)

BY_ONNX = {element.onnx: element for element in _TYPES}
