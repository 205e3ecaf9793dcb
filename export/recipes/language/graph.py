"""Convert a causal language model of transformers to an OpenVINO graph whose keys and values are states.

OpenVINO GenAI replaces the attention of such a graph with paged attention, and recognizes it by its operations. So this
module gives transformers an attention of its own, which traces to operations that OpenVINO GenAI recognizes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

if TYPE_CHECKING:
    import openvino
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

NAME = "openvino"  # of the attention and the experts, among those of transformers
PASTS, PRESENTS = "past.{}", "present.{}"
WINDOW_INPUT = 10  # of the operation PagedAttentionExtension


class Unsupported(Exception):
    """Raised for a model that OpenVINO GenAI would serve with other answers."""


@dataclass(frozen=True)
class Traced:
    """The arguments of one call of a layer's attention."""

    window: int  # 0 if the layer sees all tokens before
    sinks: torch.Tensor | None


def convert(model: transformers.PreTrainedModel) -> openvino.Model:
    """Return the graph. The model is of no use afterwards."""
    import openvino

    calls: list[Traced] = []
    windows: set[int] = set()
    transformers.AttentionInterface.register(NAME, functools.partial(attention, calls))
    transformers.AttentionMaskInterface.register(NAME, functools.partial(check_mask, windows))
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    model.set_attn_implementation(NAME)
    model.set_experts_implementation(NAME)
    pasts = keys_and_values(model)
    step = ImageStep(model) if sees_images(model) else Step(model)
    with traceable(model):
        tokens, positions = torch.ones(2, 3, dtype=torch.long), torch.arange(1, 4).expand(2, -1)
        example = (tokens, positions, *step.example_rows(), *(past.float().repeat(2, 1, 1, 1) for past in pasts))
        graph = openvino.convert_model(trace(step.eval(), example))
    if isinstance(step, ImageStep):
        read_image_rows(graph, step.columns)
    layers = traced_layers(graph, calls, windows)
    add_sinks(graph, layers)
    add_states(graph, [(past.shape[1], past.shape[3]) for past in pasts])
    check_windows(graph, layers)
    return graph


@contextlib.contextmanager
def traceable(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Let a model in 16 bits be traced without computing its products.

    Meanwhile torch.bmm returns a constant, for all models of this process.
    """
    from openvino.frontend.pytorch import patch_model

    if model.dtype.itemsize == 4:
        yield
        return
    forward = "_openvino_module_extension_patch_orig_forward"  # where the original functions of the modules wait
    patch_model.__make_16bit_traceable(model, forward)
    try:
        yield
    finally:
        patch_model.unpatch_model(model, forward)


def trace(module: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> TorchScriptPythonDecoder:
    """Return the module as OpenVINO converts it.

    Leave out PyTorch's check, which traces it a second time: about a third of the time of a small export. Callers
    compare what the graph answers.
    """
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    return TorchScriptPythonDecoder(module, example_input=examples, trace_kwargs={"check_trace": False})


# --- functions that transformers calls --------------------------------------------------------------------------------


def attention(
    calls: list[Traced],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    if softcap is not None:
        raise Unsupported("its attention limits scores with a softcap")
    if attention_mask is not None or position_bias is not None:
        raise Unsupported("its attention has a mask or a bias of its own")
    calls.append(Traced(sliding_window or 0, s_aux))
    groups = int(query.shape[1] // key.shape[1])
    length = key.shape[2]
    keys = torch.arange(length)
    queries = (torch.arange(query.shape[2]) + (length - query.shape[2]))[:, None]
    mask = (keys <= queries)[None, None]
    if sliding_window:
        # OpenVINO reads the window from a comparison only between exactly these operations.
        inside = keys > queries + torch.tensor(-sliding_window)
        mask = (mask & (mask & inside & mask)) & mask
        mask = torch.where(mask.expand(query.shape[0], 1, -1, -1), torch.tensor(0.0), torch.tensor(-torch.inf))
        mask = mask[:, :, :, :length]
    answers = torch.nn.functional.scaled_dot_product_attention(
        query, repeat(key, groups), repeat(value, groups), attn_mask=mask, scale=scaling
    )
    return answers.transpose(1, 2).contiguous(), None


def repeat(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat each head of keys or values for its group of queries."""
    if groups == 1:
        return states
    batch, heads, length, width = states.shape
    return states[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)


def check_mask(windows: set[int], mask_function: Any, local_size: int | None = None, **_: object) -> None:
    """Raise unless a layer sees all tokens up to its own, or those of a window. attention() masks the others."""
    windows.add(local_size or 0)
    size = local_size or 4
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size, 3 * size - 1])[:, None]
    keys, first = torch.arange(3 * size), torch.tensor(0)
    expected = keys <= queries
    if local_size:
        expected &= keys > queries - local_size
    if not torch.equal(mask_function(first, first, queries, keys).expand_as(expected), expected):
        raise Unsupported("its attention is neither causal nor that of a sliding window")


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run each expert on the tokens that chose it. OpenVINO has no operation for grouped products of matrices."""

    def linear(states: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(module, name)[expert]
        states = states @ (weight if module.is_transposed else weight.T)
        return states + getattr(module, f"{name}_bias")[expert] if module.has_bias else states

    total = torch.zeros_like(hidden_states)
    for expert in range(module.num_experts):
        tokens, places = torch.where(top_k_index == expert)
        states = hidden_states[tokens]
        if module.has_gate:
            states = module._apply_gate(linear(states, "gate_up_proj", expert))
        else:
            states = module.act_fn(linear(states, "up_proj", expert))
        states = linear(states, "down_proj", expert)
        if module.has_post_expert_norm:
            states = module.post_expert_norm(states)
        weighted = states * top_k_weights[tokens, places, None]  # routers compute weights in 32 bits
        total = total.index_add(0, tokens, weighted.to(total.dtype))
    return total


# --- the graph --------------------------------------------------------------------------------------------------------


class Step(torch.nn.Module):
    """Continues texts by some tokens. Keys and values of the tokens before come in, those of all tokens go out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *pasts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        cache = filled_cache(pasts)
        logits = self.model(input_ids=input_ids, position_ids=position_ids, cache=cache, use_cache=True).logits
        return logits, *tensors(cache)

    def example_rows(self) -> tuple[torch.Tensor, ...]:
        return ()


class ImageStep(Step):
    """The same for a model that sees images, whose tokens get embeddings and places from image_rows.py of serving."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.width = model.config.get_text_config().hidden_size
        self.layers = deep_layers(model.config)
        self.columns = self.width * (1 + self.layers) + 1
        self.has_axes = hasattr(model.model, "get_rope_index")

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        *pasts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        model: Any = self.model
        cache = filled_cache(pasts)
        is_image = rows[..., -1:] > 0
        own: dict[str, Any] = {}
        if self.has_axes:
            position_ids = torch.where(places < 0, position_ids[None], places)
        if self.layers:
            decoder = model.get_decoder()
            decoder._deepstack_process = lambda states, _, added: states + added  # rows of texts are zeros
            added = rows[..., :-1].split(self.width, dim=-1)[1:]
            own = {"visual_pos_masks": is_image, "deepstack_visual_embeds": added}
        embeddings = torch.where(is_image, rows[..., : self.width], model.get_input_embeddings()(input_ids))
        states = model.get_decoder()(
            inputs_embeds=embeddings, position_ids=position_ids, cache=cache, use_cache=True, **own
        ).last_hidden_state
        return model.get_output_embeddings()(states), *tensors(cache)

    def example_rows(self) -> tuple[torch.Tensor, ...]:
        from serving.generation.openvino.image_rows import AXES, NOWHERE

        return torch.zeros(2, 3, self.columns), torch.full((AXES, 2, 3), NOWHERE)


def sees_images(model: transformers.PreTrainedModel) -> bool:
    return hasattr(model, "get_image_features")


def deep_layers(config: Any) -> int:
    """Return how many layers add features of images to their states."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def filled_cache(pasts: Sequence[torch.Tensor]) -> DynamicCache:
    cache = DynamicCache()
    for keys, values in zip(pasts[::2], pasts[1::2], strict=True):
        layer = DynamicLayer()
        # update() would first concatenate them with nothing, where OpenVINO GenAI expects one concatenation.
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        cache.layers.append(layer)
    return cache


def read_image_rows(graph: openvino.Model, columns: int) -> None:
    """Let the graph look up the rows itself, by the numbers of its tokens."""
    from openvino import opset13 as ops

    from serving.generation.openvino.image_rows import ImageRows

    numbers, _, rows, places = graph.inputs[:4]
    targets = [port.get_target_inputs() for port in (numbers, rows, places)]
    found = ImageRows([numbers, ops.constant(np.zeros(columns, np.float32)).output(0)])
    for output, readers, kind in zip(found.outputs(), targets, (np.int64, np.float32, np.int64), strict=True):
        for reader in readers:
            reader.replace_source_output(ops.convert(output, kind).output(0))
    for port in (rows, places):
        graph.remove_parameter(port.get_node())
    graph.validate_nodes_and_infer_types()


def keys_and_values(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    """Return the keys and values of a text of one token. Their heads and sizes may differ between layers."""
    cache = DynamicCache()
    if any(DynamicCache(config=model.config).is_linear):
        raise Unsupported("some of its layers have states other than keys and values")
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long), cache=cache, use_cache=True)
    return tensors(cache)


def tensors(cache: DynamicCache) -> list[torch.Tensor]:
    layers: list[Any] = cache.layers
    return [states for layer in layers for states in (layer.keys, layer.values)]


def traced_layers(graph: openvino.Model, calls: list[Traced], windows: set[int]) -> list[Traced]:
    """Return the layers in the graph's order. The first calls are those of keys_and_values()."""
    count = len(nodes_of(graph, "ScaledDotProductAttention"))
    layers = calls[-count:]
    if not calls and windows <= {0}:  # Falcon calls PyTorch's attention itself
        layers = [Traced(0, None)] * count
    if len(layers) != count:
        raise Unsupported("some of its layers compute attention themselves")
    return layers


def add_sinks(graph: openvino.Model, layers: list[Traced]) -> None:
    """Add the sinks of gpt-oss, which PyTorch's attention cannot take."""
    from openvino import opset13 as ops
    from openvino.utils.node_factory import NodeFactory

    for node, layer in zip(nodes_of(graph, "ScaledDotProductAttention"), layers, strict=True):
        if layer.sinks is not None:
            sinks = ops.constant(layer.sinks.detach().float().reshape(1, -1, 1, 1).numpy())
            inputs = [*node.input_values()[:5], sinks.output(0)]
            new = NodeFactory("opset13").create("ScaledDotProductAttention", inputs, {"causal": False})
            node.output(0).replace(new.output(0))


def add_states(graph: openvino.Model, sizes: list[tuple[int, int]]) -> None:
    """Name the inputs and outputs as OpenVINO GenAI does, and make states of keys and values."""
    import openvino
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    # OpenVINO GenAI expects an input that orders the rows between two steps, as a beam search needs.
    beams = ops.parameter([-1], np.int32, "beam_idx")
    names = ["input_ids", "position_ids", *(PASTS.format(i) for i in range(len(sizes)))]
    shapes = [[-1, -1], [-1, -1], *([-1, heads, -1, width] for heads, width in sizes)]
    for port, name, shape in zip(graph.inputs, names, shapes, strict=True):
        port.get_node().set_friendly_name(name)
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
        port.get_tensor().set_names({name})
        if len(shape) == 4:
            targets = port.get_target_inputs()
            ordered = ops.gather(port, beams, ops.constant(0))
            for target in targets:
                target.replace_source_output(ordered.output(0))
    outputs = ["logits", *(PRESENTS.format(i) for i in range(len(sizes)))]
    for port, name in zip(graph.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    beams.output(0).get_tensor().set_names({"beam_idx"})
    graph.add_parameters([beams])
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, {PASTS.format(i): PRESENTS.format(i) for i in range(len(sizes))})
    rows = ops.gather(ops.shape_of(graph.input("input_ids")), ops.constant([0]), ops.constant(0))
    for node in nodes_of(graph, "ReadValue"):
        _, heads, _, width = node.get_output_partial_shape(0)
        shape = [rows, *(ops.constant([size]) for size in (heads.get_length(), 0, width.get_length()))]
        node.set_arguments([ops.broadcast(ops.constant(0.0, dtype=np.float32), ops.concat(shape, 0))])
    graph.validate_nodes_and_infer_types()


def check_windows(graph: openvino.Model, layers: list[Traced]) -> None:
    """Raise if OpenVINO GenAI would not give each layer its window: a check with short texts would not notice."""
    from openvino._offline_transformations import paged_attention_transformation

    paged = graph.clone()
    try:
        paged_attention_transformation(paged)
    except RuntimeError:
        raise Unsupported("OpenVINO GenAI does not know its attention") from None
    windows = [constant(node.input_value(WINDOW_INPUT)) for node in nodes_of(paged, "PagedAttentionExtension")]
    expected = [layer.window for layer in layers]
    if windows != expected:
        raise Unsupported(f"its layers have the sliding windows {expected}, and OpenVINO reads {windows}")


def constant(output: openvino.Output) -> int:
    """Compute a value that depends on no input."""
    import openvino
    from openvino import opset13 as ops

    result = openvino.compile_model(openvino.Model([ops.result(output)], [], "constant"), "CPU")([])
    return int(result[0])


def nodes_of(graph: openvino.Model, kind: str) -> list[openvino.Node]:
    return [node for node in graph.get_ordered_ops() if node.get_type_name() == kind]
