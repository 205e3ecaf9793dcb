"""Import transformers without scikit-learn and SciPy, which it imports for features that no backend has.

They take 2 s of CPU time and 70 MB of each process. Images lack both. Without Docker, the exporters need them.
"""

import contextlib
import sys
from collections.abc import Iterator

__all__ = ["transformers"]


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let nothing find these packages meanwhile."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]  # Python takes None for a missing package
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]
        sys.modules.update(before)


with hidden("scipy", "sklearn"):
    import transformers

    for check in ("is_scipy_available", "is_sklearn_available"):
        getattr(transformers.utils, check, bool)()  # newer releases look for the package at the first call
