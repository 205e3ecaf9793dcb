"""Compare the weights of a checkpoint with those of a network of transformers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.silence import quiet
from export.checkpoint.tasks import network_of
from triton_transformers.settings import UserError

# Tasks that any model can do without its head.
HEADLESS = (
    "feature-extraction",
    "sentence-similarity",
    "multi-vector-embedding",
    "hybrid-embedding",
    "image-feature-extraction",
)
# Weights on which no answer depends: of training, and masks and positions that today's code computes.
UNUSED = re.compile(
    r"(^|\.)(position_ids|masked_bias|(attn|attention)\.bias|num_batches_tracked|pe|version|pos_encoding|mask_token"
    r"|masked_spec_embed|embed_positions\.weights|attn_mask|relative_position_index|relative_coords_table)$"
)


class Comparison(NamedTuple):
    """The weights in which a network and a checkpoint differ."""

    different: set[str]  # in their sizes
    missing: set[str]  # in the checkpoint
    left_over: set[str]  # in the checkpoint, beyond what transformers ignores by its own lists
    body: set[str]  # the first parts of the names of weights that do not belong to a head

    def of_body(self) -> Comparison:
        return self._replace(
            **{
                field: {name for name in names if name.partition(".")[0] in self.body}
                for field, names in self._asdict().items()
            }
        )


def compare_weights(network: Any, checkpoint: Checkpoint) -> Comparison:
    """Compare the weights of a class of transformers with those of a checkpoint, by their names and sizes.

    The network is built without memory, because a config.json without sizes means one of billions of weights.
    """
    options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet():
        model, report = network.from_pretrained(
            checkpoint.folder, local_files_only=True, use_safetensors=True, **options
        )
    lists = ((name for name, *_ in report["mismatched_keys"]), report["missing_keys"], report["unexpected_keys"])
    different, missing, left_over = ({name for name in names if not UNUSED.search(name)} for names in lists)
    poolers = {name for name in different | missing | left_over if "pooler" in name}
    left_over -= poolers
    if "SequenceClassification" not in network.__name__:  # the only heads that read a pooler
        different, missing = different - poolers, missing - poolers
    body = {name for name, _ in getattr(model, model.base_model_prefix, model).named_children()}
    return Comparison(different, missing, left_over, {model.base_model_prefix, *body})


def check_network(checkpoint: Checkpoint, task: str) -> None:
    """Raise if the weights are not those of the network of config.json: transformers would draw or drop the others."""
    network = network_of(checkpoint.architecture)
    if network is None or checkpoint.own_code() or checkpoint.quantization:
        return
    found = compare_weights(network, checkpoint)
    used = found.of_body() if task in HEADLESS else found
    problems = {
        "has other sizes in": used.different,
        "is missing in": used.missing,
        "is left over from": found.of_body().left_over,  # those of other heads change nothing
    }
    if odd := [(min(names), problem) for problem, names in problems.items() if names]:
        (weight, problem), *_ = odd
        raise UserError(
            f"{checkpoint.name} is damaged, of two models, or made with other code: '{weight}' {problem} the weights "
            f"of the {checkpoint.architecture} that its config.json describes. Save the model again with "
            "save_pretrained, or choose another one"
        )
