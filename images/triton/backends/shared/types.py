"""Type aliases that the backends share."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]  # by the names of config.pbtxt
ModelConfig = dict[str, Any]  # config.pbtxt as Triton passes it: parsed JSON
InstanceArgs = dict[str, str]  # what Triton passes to initialize()
