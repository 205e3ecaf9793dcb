"""Lets MPNet run texts as one flat row of tokens: its attention adds a bias for the distance of two tokens."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch.nn.functional import scaled_dot_product_attention

from shared.flat_run import CURRENT, Tensor


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
