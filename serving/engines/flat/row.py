"""Runs the texts of a PyTorch model as one flat row of tokens, without padding.

Only the attention of a transformer looks at other tokens. So a model, or the base below its head, takes the tokens of
all texts as one row, and its attention stays within each text. The layers after it get the answer with padding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from serving.engines.choice import Candidate
from serving.engines.flat.run import CURRENT, FlatRun, NeedsPadding, Tensor
from serving.engines.lean_transformers import transformers
from serving.engines.packing import equal_lengths
from serving.triton.types import Array, Tensors

ATTENTION = "flat"
# The tokens of the texts that are compared, if the model takes as many: the last one is longer than most windows.
SAMPLE_LENGTHS = (1, 2, 9, 17, 64, 300)
# A measurement times so many texts of so many tokens, which keep a GPU busy.
TIMED_TEXTS, TIMED_LENGTH = 64, 64
LABELS = 16  # an output with fewer numbers for each text is no vector
# The arguments of an attention that the kernel for texts of unequal length lacks.
UNSUPPORTED = ("softcap", "s_aux", "position_bias")

# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each text of the current run. The tensors are [1, heads, tokens, width]."""
    run = CURRENT.get()
    if run is None:
        sdpa: Callable[..., tuple[Tensor, None]] = transformers.AttentionInterface()["sdpa"]
        known = {"scaling": scaling, "sliding_window": sliding_window, "is_causal": is_causal}
        return sdpa(module, query, key, value, attention_mask, **known, **others)
    if unsupported := [name for name in UNSUPPORTED if others.get(name) is not None]:
        raise NeedsPadding(f"its attention has '{unsupported[0]}'")
    if attention_mask is not None or query.shape[0] != 1 or not query.shape[2] == key.shape[2] == len(run.places):
        raise NeedsPadding("its attention is not that of one row of tokens")
    if query.is_cuda and query.dtype not in (torch.bfloat16, torch.float16):
        raise NeedsPadding("FlashAttention needs bfloat16 or float16")
    side = sliding_window - 1 if sliding_window else -1
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    attend = attend_on_cuda if query.is_cuda else attend_by_length
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(run, q, k, v, scaling, (side, 0 if causal else side))[None], None


def attend_on_cuda(
    run: FlatRun, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Attend by FlashAttention, which takes texts of unequal length. The tensors are [tokens, heads, width]."""
    from torch.nn.attention.varlen import varlen_attn  # older versions of PyTorch lack it, and then texts are padded

    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # PyTorch 2.11 has no groups of heads here
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    starts, longest = run.starts, run.longest
    answer = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, window_size=window)
    return cast(Tensor, answer)


def attend_by_length(
    run: FlatRun, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Attend to all neighbours of equal length at once."""
    starts, answers = run.starts.numpy(), []
    lengths = np.diff(starts)
    for first, end in equal_lengths(lengths):
        if not (length := int(lengths[first])):
            continue
        part = slice(starts[first], starts[end])
        q, k, v = (tensor[part].unflatten(0, (-1, length)).transpose(1, 2) for tensor in (query, key, value))
        left, right = (min(length, side) if side >= 0 else length for side in window)
        is_whole = left >= length - 1
        answer = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if is_whole and right in (0, left) else within(left, right, length),
            is_causal=is_whole and right == 0,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        answers.append(answer.transpose(1, 2).flatten(0, 1))
    return torch.cat(answers)


@functools.lru_cache(8)
def within(left: int, right: int, length: int) -> Tensor:
    """Return which tokens [length, length] each token of a text sees: so many on either side."""
    return torch.ones(length, length, dtype=torch.bool).tril(right).triu(-left)


def no_mask(*args: Any, **others: Any) -> Tensor | None:
    """Return no mask for a flat run, because `attention` knows its texts, or else the mask of the padded run."""
    if CURRENT.get():
        return None
    mask: Tensor | None = transformers.AttentionMaskInterface()["sdpa"](*args, **others)
    return mask


# --- models -----------------------------------------------------------------------------------------------------------


def flatten(model: Any, base: Any) -> None:
    """Let this part of the model run flat inside `current`. Raise NeedsPadding if it cannot; `restore` undoes it."""
    forward = base.forward
    if model.config._attn_implementation != "sdpa" and not is_mpnet(base):
        raise NeedsPadding(f"its attention is '{model.config._attn_implementation}', not 'sdpa'")
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise NeedsPadding("its attention is that of chunks")  # which are longer than the texts of `sample`
    if "position_ids" not in inspect.signature(forward).parameters:
        raise NeedsPadding(f"{type(base).__name__} takes no position_ids")
    padding_id = first_position(model) - 1

    @functools.wraps(forward)
    def flat_forward(input_ids: Tensor | None = None, **others: Any) -> Any:
        run = CURRENT.get()
        if run is None:
            return forward(input_ids, **others)
        if input_ids is None or input_ids.shape != run.shape:
            raise NeedsPadding(f"{type(base).__name__} gets no token ids")
        inputs = {"input_ids": input_ids} | others
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.shape == run.shape:
                inputs[name] = run.flat(value)
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = run.columns[None]
            if padding_id >= 0:  # such a model does not count its padding tokens, wherever they are
                present = (input_ids != padding_id).long()
                inputs["position_ids"] = run.flat(present.cumsum(1) * present + padding_id)
        if is_mpnet(base):
            inputs["attention_mask"] = run.present()  # transformers passes masks of this shape on, as they are
        outputs = base.row_forward(**inputs)
        for name, value in list(outputs.items()):
            if not isinstance(value, Tensor):
                continue
            if name == "pooler_output":
                outputs[name] = base.pooler(outputs["last_hidden_state"])
            elif value.shape[:2] == (1, len(run.places)):
                outputs[name] = run.padded(value)
            else:
                raise NeedsPadding(f"output '{name}' of {type(base).__name__} is not one of tokens")
        return outputs

    if is_mpnet(base):
        flatten_mpnet(base)
    else:
        transformers.AttentionInterface.register(ATTENTION, attention)
        transformers.AttentionMaskInterface.register(ATTENTION, no_mask)
        model.set_attn_implementation(ATTENTION)
    base.forward, base.row_forward = flat_forward, forward


def restore(model: Any, base: Any) -> None:
    """Undo `flatten`."""
    for module in base.modules():
        for name in ("forward", "row_forward", "compute_position_bias"):
            vars(module).pop(name, None)
    if model.config._attn_implementation == ATTENTION:
        model.set_attn_implementation("sdpa")


def longest_text(model: Any) -> int:
    """Return how many tokens of a text the model takes, or those of the longest sample if it has no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", SAMPLE_LENGTHS[-1])
    return int(limit) - first_position(model)


def sample(
    model: Any, names: Iterable[str], padding: dict[str, int], lengths: Sequence[int] = SAMPLE_LENGTHS
) -> Tensors:
    """Return texts of these lengths, of random tokens. `padding` has the value of padded columns that is not 0."""
    config, random = model.config.get_text_config(), np.random.default_rng(0)
    cut = np.minimum(lengths, longest_text(model))
    mask = np.arange(cut.max()) < cut[:, None]
    limits = {
        "input_ids": model.get_input_embeddings().num_embeddings,
        "token_type_ids": max(1, getattr(config, "type_vocab_size", 0)),
    }
    ids = {name: random.integers(0, limit, mask.shape) for name, limit in limits.items()}
    return {name: np.where(mask, ids.get(name, 1), padding.get(name, 0)) for name in names}


def likeness(expected: list[Array], actual: list[Array]) -> Candidate:
    """Return how alike the answers are. Of an output with few numbers for each text, compare all texts together."""
    shapes = [(1, -1) if answer[0].size < LABELS else (len(answer), -1) for answer in expected]
    first, second = (
        [[answer.reshape(shape) for answer, shape in zip(answers, shapes, strict=True)]]
        for answers in (expected, actual)
    )
    return Candidate.compared(first, second, "flat")


def check_alike(expected: list[Array], actual: list[Array]) -> str:
    """Return how alike the answers are. Raise NeedsPadding if they differ."""
    alike = likeness(expected, actual)
    if not alike.agrees:
        raise NeedsPadding(alike.error or f"its answers differ, {alike.likeness}")
    return alike.likeness


def first_position(model: torch.nn.Module) -> int:
    """Return the position of a text's first token: RoBERTa and its kin count from the padding token's id."""
    tables = (table for name, table in model.named_modules() if name.endswith("position_embeddings"))
    padding = next((getattr(table, "padding_idx", None) for table in tables), None)
    return 0 if padding is None else padding + 1


# --- MPNet, whose attention adds a bias for the distance of two tokens ------------------------------------------------


def is_mpnet(base: Any) -> bool:
    return bool(base.config.model_type == "mpnet")


def flatten_mpnet(base: Any) -> None:
    """Let all but the attention of this model run flat. No kernel for texts of unequal length adds a bias."""
    encoder = base.encoder
    compute_bias = encoder.compute_position_bias

    @functools.wraps(compute_bias)
    def biases(hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return [texts, heads, length, length], in which padding is masked."""
        if (run := CURRENT.get()) is None:
            return cast(Tensor, compute_bias(hidden, *others, **named))
        bias: Tensor = compute_bias(hidden.new_empty(1, run.shape[1]), *others, **named)
        return bias.masked_fill(~run.present(), float("-inf"))

    encoder.compute_position_bias = biases
    for layer in encoder.layer:
        layer.attention.attn.forward = flat_attention(layer.attention.attn)


def flat_attention(attention: Any) -> Any:
    """Return the forward of one layer's attention, which pads the texts."""
    forward = attention.forward

    @functools.wraps(forward)
    def attend(hidden: Tensor, attention_mask: Any = None, position_bias: Any = None, **others: Any) -> Any:
        if (run := CURRENT.get()) is None:
            return forward(hidden, attention_mask, position_bias, **others)
        heads = (attention.num_attention_heads, attention.attention_head_size)
        query, key, value = (
            run.padded(project(hidden)).unflatten(-1, heads).transpose(1, 2)
            for project in (attention.q, attention.k, attention.v)
        )
        answer = scaled_dot_product_attention(query, key, value, attn_mask=position_bias)
        return (attention.o(run.flat(answer.transpose(1, 2).flatten(2))),)

    return attend
