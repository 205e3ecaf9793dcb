"""Write the LoRA adapters of a language model: in one form for all engines, and for OpenVINO into its graph.

OpenVINO GenAI (2026.4) ignores the adapters of requests that join a running batch. So the graph computes the change of
every adapter, and each token has the change of its own text's: docs/generation.md#adapters.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.nn import Linear
from torch.nn.functional import pad

from export.checkpoint.adapters import CONFIG, WEIGHTS, check_adapter, read_options
from export.recipes.language.openvino import MODEL
from export.recipes.low_rank import matrices
from triton_transformers.settings import UserError

if TYPE_CHECKING:
    import openvino

LIMITS = "limits.json"
PREFIX = "base_model.model."
# Ends the names of the operations that replace the model's own.
ADDED = "/adapters"
# A marked token has this score for the attention, and all others 0: it alone is seen.
SCORE = 60.0


def write(adapter: str, source: Path, folder: Path, version: Path) -> None:
    """Write an adapter as peft does, but with the names and the scale 1 that each engine reads alike.

    Raise UserError if it does not fit the model of this version.
    """
    options = read_options(adapter, source)
    check_adapter(adapter, options)
    config = transformers.AutoConfig.from_pretrained(version, local_files_only=True)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{adapter}: a {config.model_type} has no adapters here, only models of text alone have")
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    try:
        pairs = matrices(adapter, network, source, (Linear,))
    except UserError as error:
        base = options.get("base_model_name_or_path") or "a model without a name"
        raise UserError(f"{error}. It was made for {base}") from None
    if not pairs:
        raise UserError(f"{adapter} changes no layer: its {WEIGHTS} is empty")
    rank = max(len(down) for down, _ in pairs.values())
    tensors = {}
    for layer, (down, up) in pairs.items():  # zeros fill up smaller ranks
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = pad(down, (0, 0, 0, rank - len(down))).contiguous()
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = pad(up, (0, rank - len(down))).contiguous()
    folder.mkdir(parents=True)
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # of the file system
        raise OSError(str(error)) from None
    modules = sorted({layer.rpartition(".")[2] for layer in pairs})
    own = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": modules}
    base = {"base_model_name_or_path": options.get("base_model_name_or_path")}
    (folder / CONFIG).write_text(json.dumps(own | base, indent=2) + "\n")


def max_rank(folder: Path) -> int:
    """Return the largest rank of the adapters in a folder, 0 if there is none."""
    return max((json.loads(path.read_text())["r"] for path in folder.glob(f"*/{CONFIG}")), default=0)


# --- OpenVINO's graph -------------------------------------------------------------------------------------------------


def write_graph(system: str, version: Path, target: Path, folders: list[Path]) -> None:
    """Write the graph of this version with these adapters instead of those that it has."""
    import openvino

    limits = json.loads((version / LIMITS).read_text())
    graph = openvino.Core().read_model(version / MODEL)
    remove(graph)
    if folders:
        add(system, graph, limits["vocabulary"], folders)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as work:
        try:
            openvino.save_model(graph, Path(work) / MODEL, compress_to_fp16=False)
        except RuntimeError as error:  # of the file system
            raise OSError(str(error)) from None
        for file in Path(work).iterdir():
            file.replace(target / file.name)
    (target / LIMITS).write_text(json.dumps(limits | {"adapters": [folder.name for folder in folders]}) + "\n")


def remove(graph: openvino.Model) -> None:
    for node in graph.get_ordered_ops():
        if node.get_friendly_name().endswith(ADDED):
            node.output(0).replace(node.input_value(0))
    for sink in graph.get_sinks():
        if ADDED in sink.get_variable_id():
            graph.remove_sink(sink)
            graph.remove_variable(graph.get_variable_by_id(sink.get_variable_id()))


def add(system: str, graph: openvino.Model, vocabulary: int, folders: list[Path]) -> None:
    """Let the graph add the change of the adapter whose number the first token of a text carries.

    Number n, from 1, is n times the vocabulary, added to the token's id. So prompts of two adapters are different
    prompts for the prefix cache.
    """
    from openvino import opset13 as ops

    from serving.generation.adapters import read_matrices

    ids = graph.input("input_ids").get_node()
    readers = ids.output(0).get_target_inputs()
    number = ops.divide(ids, ops.constant(np.int64(vocabulary)))
    own = ops.subtract(ids, ops.multiply(number, ops.constant(np.int64(vocabulary))))
    chosen = chosen_adapters(graph, ids, number, len(folders))
    own_ids = ops.minimum(ids, own)  # which is `own`; remove() finds the ids as the first input
    own_ids.set_friendly_name(f"input_ids{ADDED}")
    for reader in readers:
        reader.replace_source_output(own_ids.output(0))
    layers: dict[str, list[tuple[int, Any, Any]]] = {}
    for place, folder in enumerate(folders):
        for layer, (down, up) in read_matrices(folder).items():
            layers.setdefault(layer, []).append((place, down.numpy(), up.numpy()))
    products = {node.get_friendly_name(): node for node in graph.get_ordered_ops() if node.get_type_name() == "MatMul"}
    for layer, parts in layers.items():
        found = [node for name, node in products.items() if name.startswith(f"__module.model.{layer}/")]
        if len(found) != 1:
            raise UserError(f"{system}: OpenVINO's graph has no '{layer}', which an adapter changes: set FORMAT=python")
        add_change(found[0], parts, chosen)
    graph.validate_nodes_and_infer_types()


def add_change(product: openvino.Node, parts: list[tuple[int, Any, Any]], chosen: openvino.Node) -> None:
    """Add to a layer's product with its weights the change that the chosen adapter makes."""
    from openvino import opset13 as ops

    owners = np.concatenate([np.full(len(down), place) for place, down, _ in parts])
    columns = (np.arange(chosen.get_output_partial_shape(0)[2].get_length())[:, None] == owners).astype(np.float32)
    downs, ups = np.concatenate([down for _, down, _ in parts]), np.concatenate([up for _, _, up in parts], 1)
    inner = ops.matmul(product.input_value(0), ops.constant(downs), False, True)
    inner = ops.multiply(inner, ops.matmul(chosen, ops.constant(columns), False, False))
    change = ops.matmul(inner, ops.constant(ups), False, True)
    readers = product.output(0).get_target_inputs()
    changed = ops.add(product, change)
    changed.set_friendly_name(f"{product.get_friendly_name()}{ADDED}")
    for reader in readers:
        reader.replace_source_output(changed.output(0))


def chosen_adapters(graph: openvino.Model, ids: openvino.Node, number: openvino.Node, count: int) -> openvino.Node:
    """Return for each token which adapter its text has: [rows, tokens, adapters], 1 for that one and 0 for the others.

    Only keys and values belong to a text in a batch of OpenVINO GenAI. So this is one more layer of attention, which
    sees the first token of the text, if that has a number, and returns its value.
    """
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation
    from openvino.utils.node_factory import NodeFactory

    width = 64 * -(-count // 64)  # OpenVINO writes past the ends of heads that are smaller than its vectors
    zero, one = ops.constant(np.float32(0)), ops.constant(np.float32(1))
    place = ops.subtract(number, ops.constant(np.int64(1)))
    values = ops.unsqueeze(ops.one_hot(place, ops.constant(width), one, zero, -1), ops.constant(1))
    before = {node.get_friendly_name() for node in graph.get_ordered_ops() if node.get_type_name() == "ReadValue"}
    states, names = [], {}
    for kind in ("keys", "values"):
        past = ops.parameter([-1, 1, -1, width], np.float32, f"past.{kind}{ADDED}")
        all_tokens = ops.concat([ops.gather(past, graph.input("beam_idx").get_node(), ops.constant(0)), values], 2)
        present = ops.result(all_tokens)
        names[f"past.{kind}{ADDED}"] = f"present.{kind}{ADDED}"
        past.output(0).get_tensor().set_names({f"past.{kind}{ADDED}"})
        all_tokens.output(0).get_tensor().set_names({f"present.{kind}{ADDED}"})
        graph.add_parameters([past])
        graph.add_results([present])
        states.append(all_tokens.output(0))
    query = ops.broadcast(ops.constant(np.float32(SCORE)), ops.shape_of(values))
    mask = ops.constant(np.zeros((1, 1, 1, 1), np.float32))  # OpenVINO GenAI replaces it with its own
    inputs = [query.output(0), *states, mask.output(0), one.output(0)]
    seen = NodeFactory("opset13").create("ScaledDotProductAttention", inputs, {"causal": False})
    value = ops.reshape(ops.transpose(seen, ops.constant([0, 2, 1, 3])), ops.constant([0, 0, -1]), True)
    chosen = ops.convert(ops.greater(value, ops.constant(np.float32(0.5))), np.float32)
    apply_make_stateful_transformation(graph, names)
    rows = ops.gather(ops.shape_of(ids), ops.constant([0]), ops.constant(0))
    nothing = ops.broadcast(zero, ops.concat([rows, ops.constant([1, 0, width])], 0))
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "ReadValue" and node.get_friendly_name() not in before:
            node.set_arguments([nothing])
    return chosen
