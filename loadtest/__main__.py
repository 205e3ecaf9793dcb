"""python -m loadtest: the comparison. See compare.py."""

from scripts.common.cli import run


def main() -> int:
    from loadtest.compare import main  # seconds, in which Ctrl-C is to be as quiet as later

    return main()


if __name__ == "__main__":
    run(main)
