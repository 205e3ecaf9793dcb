"""make tune: search for the best configuration on the running server, and write the report."""

from __future__ import annotations

from triton_transformers.cli import run


def main() -> int:
    # The import takes seconds. Inside run(), Ctrl-C during it ends as quietly as later.
    from loadtest.tune.tuning import main

    return main()


if __name__ == "__main__":
    run(main)
