"""Rotary positions that depend on the other texts of a batch."""

from __future__ import annotations

from typing import Any


def rotary_context(config: Any) -> int | None:
    """Return the length up to which a text does not change the positions of others, or None if there is no limit.

    The scaling `longrope` turns all positions of a batch in another way once one text passes this length.
    """
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    lengths = [
        int(values["original_max_position_embeddings"])
        for values in (parameters, *nested)
        if values.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)
