"""Types that the backends share, and the errors that users see: why a model does not load, or a response."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triton_transformers.errors import TypedError

Array = NDArray[Any]
Tensors = dict[str, Array]  # by the names of config.pbtxt
ModelConfig = dict[str, Any]  # config.pbtxt as Triton passes it: parsed JSON
InstanceArgs = dict[str, str]  # what Triton passes to initialize()


class ConfigError(ValueError):
    """Raised when a model cannot be served as its config.pbtxt asks; Triton reports the message."""


class RequestError(Exception):
    """An error that a client gets. `fields` are the inputs and options that the message quotes, the wrong one first.

    `code` and `index`, a row of the first field, are for programs that read them: triton_transformers/errors.py.
    """

    status = 500

    def __init__(self, message: str, *fields: str, code: str = "", index: int | None = None) -> None:
        super().__init__(message)
        self.fields, self.code, self.index = fields, code, index


class Busy(RequestError, RuntimeError):
    """Raised when too many requests wait."""

    status = 503


class Cancelled(RequestError, RuntimeError):
    """Raised for a request that its client no longer waits for."""

    status = 499


class BadRequest(RequestError, ValueError):
    """Raised for a wrong request. The message names the input and never quotes its content."""

    status = 400


class CalledModelError(RequestError):
    """The error that another model of the server answered, for the client of this one."""

    def __init__(self, error: TypedError) -> None:
        super().__init__(error.sentence, *error.fields, code=error.code, index=error.index)
        self.status = error.status


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
