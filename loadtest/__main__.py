"""python -m loadtest: run the comparison (compare.py), or with OVERLOAD the measurement of overload.py."""

from triton_transformers.cli import run


def main() -> int:
    # The imports take seconds. Inside run(), Ctrl-C during them ends as quietly as later.
    from triton_transformers.settings import Settings

    if Settings.load()["OVERLOAD"]:
        from loadtest.overload.overload import main
    else:
        from loadtest.compare.compare import main
    return main()


if __name__ == "__main__":
    run(main)
