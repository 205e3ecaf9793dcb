"""Changes a graph so that OpenVINO computes the padding of a run in attention only.

The rows of a run are padded to the longest one. Layers that treat each token by itself (products with a matrix,
normalization, activations) get the tokens of all rows as one row instead, [1, tokens, width]. Attention, and whatever
else mixes tokens, gets [rows, tokens, width] as before. Its padding then has the numbers of the row's last token, which
the model masks as it masks those of padding.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import openvino
from openvino import opset13 as ops

# Operations that treat each token by itself, if their results have the shape [rows, tokens, width].
TOKENWISE = frozenset(
    {
        *("Add", "Divide", "Multiply", "Power", "SquaredDifference", "Subtract"),
        *("Abs", "Clamp", "Convert", "Erf", "Exp", "Negative", "Sqrt"),
        *("Elu", "Gelu", "HSwish", "Mish", "PRelu", "Relu", "Sigmoid", "SoftPlus", "Swish", "Tanh"),
        *("ReduceMean", "ReduceSum", "Split", "VariadicSplit"),
    }
)
# The shape of a run that tells the axes of rows and of tokens from all others.
ROWS, TOKENS = 7, 11
# The tokens of all rows are a multiple of this, so that there are fewer shapes: the first run of each is slow.
STEP = 16
Key = tuple[str, int]  # names a value of the graph


def without_padding(graph: openvino.Model, mask: str) -> openvino.Model:
    """Return the graph changed in this way. `mask` is the input with 1 for each token, and 0 for padding."""
    graph = graph.clone()
    (tokens,) = (node for node in graph.inputs if mask in node.get_names())
    PaddingRemoval(graph, tokens).apply()
    graph.validate_nodes_and_infer_types()
    return graph


class PaddingRemoval:
    """Finds the nodes that can get the tokens of all rows as one row, and changes what they and the others read."""

    def __init__(self, graph: openvino.Model, mask: openvino.Output) -> None:
        self.nodes = graph.get_ordered_ops()
        self.mask = mask
        self.constant: dict[str, bool] = {}
        self.widths = self._widths(graph)
        products = [node for node in self.nodes if self._is_product(node)]
        # Only these values may become one row. A mask may not: it would no longer hide the padding.
        self.hidden = {self._source(node.input_value(0)) for node in products}
        self.flat = {node.get_name() for node in products}  # the nodes that get the tokens as one row
        self.flat_values: dict[Key, openvino.Output] = {}
        self.padded_values: dict[Key, openvino.Output] = {}

    def apply(self) -> None:
        for node in self.nodes:
            if self._follows(node):
                self.flat.add(node.get_name())
        for node in self.nodes:
            for number, value in enumerate(node.input_values()):
                is_flat = value.get_node().get_name() in self.flat
                if node.get_name() in self.flat and not is_flat and key(value) in self.hidden:
                    node.input(number).replace_source_output(self._flattened(value))
                elif node.get_name() not in self.flat and is_flat:
                    self._pad(node, number, value)

    def _widths(self, graph: openvino.Model) -> dict[Key, int]:
        """Return the width of each value that has the shape [rows, tokens, width]."""
        example = graph.clone()
        example.reshape({node: [ROWS, TOKENS] for node in example.inputs})
        shapes = {
            (node.get_friendly_name(), value.get_index()): value.get_partial_shape()
            for node in example.get_ordered_ops()
            for value in node.outputs()
        }
        widths = {}
        for node in self.nodes:
            for value in node.outputs():
                shape = shapes.get((node.get_friendly_name(), value.get_index()))  # reshape() may have removed the node
                if shape and shape.is_static and list(shape.to_shape())[:-1] == [ROWS, TOKENS]:
                    widths[key(value)] = shape.to_shape()[2]
        return widths

    def _is_product(self, node: openvino.Node) -> bool:
        """Return whether the node multiplies [rows, tokens, width] by a matrix of weights."""
        if node.get_type_name() != "MatMul" or key(node.output(0)) not in self.widths:
            return False
        source, weights = node.input_values()
        is_matrix = len(weights.get_partial_shape()) == 2 and self._is_constant(weights.get_node())
        return is_matrix and key(source) in self.widths and not node.get_attributes()["transpose_a"]

    def _source(self, value: openvino.Output) -> Key:
        """Return the value that this one is computed from with constants alone, such as a scale for each channel."""
        node = value.get_node()
        while node.get_type_name() in TOKENWISE and len(variable := self._variable(node)) == 1:
            if key(variable[0]) not in self.widths:
                break
            (value,) = variable
            node = value.get_node()
        return key(value)

    def _follows(self, node: openvino.Node) -> bool:
        """Return whether the node treats each token by itself, and reads values that are or may become one row."""
        if not all(key(value) in self.widths for value in node.outputs()):
            return False
        variable = self._variable(node)
        known = [value.get_node().get_name() in self.flat or key(value) in self.hidden for value in variable]
        if not known or not all(known):
            return False
        return node.get_type_name() in TOKENWISE or (node.get_type_name() == "MVN" and normalizes_tokens(node))

    def _variable(self, node: openvino.Node) -> list[openvino.Output]:
        return [value for value in node.input_values() if not self._is_constant(value.get_node())]

    def _is_constant(self, node: openvino.Node) -> bool:
        """Return whether the node's values depend on no input of the graph."""
        name = node.get_name()
        if name not in self.constant:
            sources = [value.get_node() for value in node.input_values()]
            self.constant[name] = node.get_type_name() == "Constant" or (
                bool(sources) and all(map(self._is_constant, sources))
            )
        return self.constant[name]

    @cached_property
    def present(self) -> openvino.Node:
        """Return 1 for each cell of the mask up to the row's last token, and for all cells of a row without any."""
        width = ops.gather(ops.shape_of(self.mask, "i32"), np.int32(1), np.int64(0))
        columns = ops.range(np.int32(0), width, np.int32(1), "i32")
        are_tokens = ops.convert(ops.not_equal(ops.convert(self.mask, "i32"), np.int32(0)), "i32")
        ends = ops.reduce_max(ops.multiply(are_tokens, ops.add(columns, np.int32(1))), np.array([1]), True)
        ends = ops.select(ops.equal(ends, np.int32(0)), width, ends)
        return ops.convert(ops.less(columns, ends), "i32")

    @cached_property
    def cell_of_token(self) -> openvino.Node:
        """Return the cell of each token, and then cell 0 until their number is a multiple of STEP: [1, tokens]."""
        cells = ops.non_zero(ops.reshape(self.present, np.array([-1]), False), "i32")
        count = ops.gather(ops.shape_of(cells, "i32"), np.array([1]), np.int64(0))
        more = ops.floor_mod(ops.negative(count), np.array([STEP], np.int32))
        return ops.concat([cells, ops.broadcast(np.int32(0), ops.concat([np.array([1], np.int32), more], 0))], 1)

    @cached_property
    def token_of_cell(self) -> openvino.Node:
        """Return the number of each cell's token, which for padding is the row's last one: [rows, tokens]."""
        count = ops.cum_sum(ops.reshape(self.present, np.array([-1]), False), np.int64(0))
        return ops.reshape(ops.subtract(count, np.int32(1)), ops.shape_of(self.mask), False)

    def _flattened(self, value: openvino.Output) -> openvino.Output:
        if key(value) not in self.flat_values:
            self.flat_values[key(value)] = self._gathered(value, self.cell_of_token)
        return self.flat_values[key(value)]

    def _pad(self, node: openvino.Node, number: int, value: openvino.Output) -> None:
        """Give a node the value, or its shape, as [rows, tokens, width]."""
        if node.get_type_name() == "ShapeOf":
            kind = node.output(0).get_element_type()
            width = ops.constant([self.widths[key(value)]], kind)
            node.output(0).replace(ops.concat([ops.shape_of(self.mask, kind), width], 0).output(0))
            return
        if key(value) not in self.padded_values:
            self.padded_values[key(value)] = self._gathered(value, self.token_of_cell)
        node.input(number).replace_source_output(self.padded_values[key(value)])

    def _gathered(self, value: openvino.Output, indices: openvino.Node) -> openvino.Output:
        rows = ops.reshape(value, np.array([-1, self.widths[key(value)]]), False)
        return ops.gather(rows, indices, np.int32(0)).output(0)


def key(value: openvino.Output) -> Key:
    return value.get_node().get_name(), value.get_index()


def normalizes_tokens(node: openvino.Node) -> bool:
    """Return whether an MVN normalizes along the width alone. Its axes are a constant, or a range of constants."""
    axes = node.input_value(1).get_node()
    sources = [axes] if axes.get_type_name() == "Constant" else [value.get_node() for value in axes.input_values()]
    if not all(source.get_type_name() == "Constant" for source in sources):
        return False
    numbers = [source.data for source in sources]
    return np.ravel(numbers[0] if len(numbers) == 1 else np.arange(*numbers)).tolist() in ([-1], [2])
