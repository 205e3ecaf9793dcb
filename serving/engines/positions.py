"""Bounds texts by a network's tables of positions: beyond one, a graph invents an answer and a GPU fails for good."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from serving.engines.lean_transformers import transformers
from serving.triton.types import BadRequest

# The names in transformers of the tables where the tokens of a text look up their positions.
TABLES = ("embed_positions", "pos_encoding", "position_embedding", "position_embeddings", "positions_embed", "wpe")
# These take any position: they extend the table, or use its last row again.
ENDLESS = ("fsmt", "prophetnet", "tapas")


def bound_texts(model: torch.nn.Module) -> None:
    """Let the networks in a model raise BadRequest for a text that is longer than their tables."""
    for network, limit in position_limits(model).items():
        network.register_forward_pre_hook(partial(check_text, limit), with_kwargs=True)


def position_limits(model: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """Return the number of positions of each network in a model that has a table of them."""
    networks = {
        name: network for name, network in model.named_modules() if isinstance(network, transformers.PreTrainedModel)
    }
    tables = {name: len(buffer) for name, buffer in model.named_buffers() if buffer.ndim}  # of CodeGen, CTRL and GPT-J
    tables |= {name: positions(table) for name, table in model.named_modules() if isinstance(table, torch.nn.Embedding)}
    limits: dict[torch.nn.Module, int] = {}
    for name, count in tables.items():
        if name.rpartition(".")[2] in TABLES:
            *_, owner = None, *(networks[own] for own in networks if not own or name.startswith(f"{own}."))
            if owner is not None and owner.config.model_type not in ENDLESS:
                configured = getattr(owner.config, "max_position_embeddings", None) or count
                limits[owner] = min(count, configured, limits.get(owner, count))  # Yoso's table has more rows
    return limits


def positions(table: torch.nn.Embedding) -> int:
    """Return the rows of a table from that of a text's first token, which comes after others in BART and RoBERTa."""
    unused: int = getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
    return table.num_embeddings - unused


def position_limit(model: Any) -> float:
    """Return the number of positions of the network that generates a model's texts, or infinity without a table."""
    decoder = model.get_decoder()
    own = position_limits(decoder).items()
    return min((limit for network, limit in own if network.main_input_name != "pixel_values"), default=math.inf)


def context_of(model: Any, config: Any) -> int | None:
    """Return the length of the texts of a language model, or None without a limit, for which XLNet's config has -1."""
    names = ("max_position_embeddings", "max_seq_len")  # MPT has the second
    limits = (*(getattr(config, name, None) or 0 for name in names), position_limit(model))
    return min((int(limit) for limit in limits if 0 < limit < math.inf), default=None)


def graph_limit(network: torch.nn.Module) -> float:
    """Return the number of positions of a graph whose network extends its table for longer texts, or infinity."""
    modules: list[Any] = [*network.modules()]
    tables = [(own.weights, own.padding_idx) for own in modules if hasattr(own, "make_weights")]
    tables += [(own.weight, own.padding_idx) for own in modules if hasattr(own, "make_weight")]  # of FSMT
    return min((len(rows) - padding - 1 for rows, padding in tables), default=math.inf)


def check_text(limit: int, network: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raise BadRequest before a network's call for a text that is too long together with its tokens so far."""
    tokens, cache = (*arguments, named.get("input_ids"))[0], named.get("cache")
    tokens = named.get("inputs_embeds") if tokens is None else tokens
    if tokens is not None:
        check_length(tokens.shape[1] + (cache.get_seq_length() if cache is not None else 0), limit)


def check_length(tokens: int, limit: float) -> None:
    if tokens > limit:
        raise BadRequest(
            f"a text of {tokens} tokens is longer than the model's {limit} positions: send a shorter one, or let the "
            "model generate fewer"
        )


def check_new_tokens(parameters: dict[str, Any], limit: float) -> None:
    """Raise BadRequest for parameters that ask for more tokens than a model has positions for."""
    asked = {**parameters, **(parameters.get("generate_kwargs") or {}), **(parameters.get("forward_params") or {})}
    # Nothing follows the last token, so it takes no position.
    for name, unplaced in (("max_new_tokens", 0), ("max_length", 1)):
        if isinstance(count := asked.get(name), int | float) and count - unplaced > limit:
            raise BadRequest(f"{name} is {count}, and the model has {limit} positions: set a smaller number")
