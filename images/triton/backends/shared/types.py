"""Types that the backends share, and one table of element types: ONNX's name, config.pbtxt's name, numpy's type."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]  # by the names of config.pbtxt
ModelConfig = dict[str, Any]  # config.pbtxt as Triton passes it: parsed JSON
InstanceArgs = dict[str, str]  # what Triton passes to initialize()


class ElementType(NamedTuple):
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
