"""Import transformers without SciPy and scikit-learn, which it imports for tasks that no backend offers.

They take 1.6 s of CPU time and 70 MB in each process. The server's images lack both. Without Docker, the exporters'
libraries bring them.
"""

import contextlib
import sys
from collections.abc import Iterator

__all__ = ["transformers"]


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Make imports of the packages fail inside the block, but for those that are imported already."""
    missing = [package for package in packages if package not in sys.modules]
    for package in missing:
        sys.modules[package] = None  # type: ignore[assignment]  # Python takes that for a missing package
    try:
        yield
    finally:
        for package in missing:
            sys.modules.pop(package, None)


with hidden("scipy", "sklearn"):
    import transformers

    for name in ("is_scipy_available", "is_sklearn_available"):
        getattr(transformers.utils, name, bool)()  # newer releases search for the package at the first call
