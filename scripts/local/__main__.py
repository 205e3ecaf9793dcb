"""python -m scripts.local up | down | status | logs | clean"""

from __future__ import annotations

import argparse
import os
import sys

from scripts.cli import out, run
from scripts.files import exclusive
from scripts.local.stack import Stack
from scripts.settings import ROOT, Settings, with_admin_key


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.local", description="The stack without Docker.")
    parser.add_argument("command", choices=("up", "down", "status", "logs", "clean"))
    command = parser.parse_args().command
    if command == "up":
        with exclusive(ROOT, "another `make up` is at work here"):  # two first ones would make two keys
            stack = Stack(with_admin_key(Settings.load()))
        stack.up()
        stack.print_urls()
        out.print("\n`make status` shows how it is, `make smoke` tries it, `make down` stops it.")
        return 0
    stack = Stack(Settings.load())
    if command == "status":
        return 0 if stack.status() else 1
    elif command == "logs":
        files = [str(path) for path in stack.logs()]
        if not files:
            out.print("no logs: nothing was started here yet (`make up`)")
            return 0
        follow = ["-F"] if sys.stdout.isatty() else []
        os.execvp("tail", ["tail", "-n", "100", *follow, *files])
    else:
        getattr(stack, command)()
    return 0


if __name__ == "__main__":
    run(main)
