"""Is an exported model still the model?"""

from __future__ import annotations

import numpy as np

from scripts.common.settings import UserError


def compare(original: list[np.ndarray], exported: list[np.ndarray], least: float) -> float:
    """The smallest cosine between the two's answers to an example; a UserError where it is below `least`."""
    cosines = [_cosine(a, b) for a, b in zip(original, exported, strict=True)]
    worst = int(np.argmin(cosines))
    if cosines[worst] < least:
        raise UserError(f"the export is not the model: cosine {cosines[worst]:.6f} on example {worst} < {least}")
    return cosines[worst]


def _cosine(original: np.ndarray, exported: np.ndarray) -> float:
    if original.shape != exported.shape:
        raise UserError(f"the export is not the model: it answers {exported.shape}, the original {original.shape}")
    a, b = original.astype(float).ravel(), exported.astype(float).ravel()
    return float(np.nan_to_num(a @ b / np.linalg.norm(a) / np.linalg.norm(b), nan=-1.0))
