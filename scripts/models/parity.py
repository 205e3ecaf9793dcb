"""Is an exported model still the model?"""

from __future__ import annotations

import numpy as np

from scripts.settings import UserError


def check_cosine(original: np.ndarray, exported: np.ndarray, least: float) -> float:
    """The smallest cosine between rows of the two; a UserError where it is below `least`."""
    if original.shape != exported.shape:
        raise UserError(f"the export is not the model: it answers {exported.shape}, the original {original.shape}")
    products = (original.astype(float) * exported.astype(float)).sum(axis=1)
    cosines = products / np.linalg.norm(original, axis=1) / np.linalg.norm(exported, axis=1)
    worst = float(np.nan_to_num(cosines, nan=-1.0).min())
    if worst < least:
        raise UserError(f"the export is not the model: cosine {worst:.6f} on text {int(cosines.argmin())} < {least}")
    return worst
