"""Import transformers without scikit-learn, which it imports for a way to generate text that no backend offers.

That takes 1.2 s of CPU time and 40 MB in each process. The server's images lack scikit-learn. Without Docker, the
sentence-transformers of the exporter brings it.
"""

import contextlib
import sys
from collections.abc import Iterator

__all__ = ["transformers"]


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Make imports of a package fail inside the block, unless it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # Python takes that for a missing package
    try:
        yield
    finally:
        sys.modules.pop(package, None)


with hidden("sklearn"):
    import transformers

    getattr(transformers.utils, "is_sklearn_available", bool)()  # newer releases search for it at the first call
