"""Hide what libraries print about their own internals."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Hide the libraries' warnings, which users cannot act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(level)
        try:
            yield
        finally:
            logging.disable(before)
