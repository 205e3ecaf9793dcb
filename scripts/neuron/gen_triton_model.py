#!/usr/bin/env python3
"""Writes the Triton model folder of a model compiled for AWS Neuron: config.pbtxt and <version>/model.py.

Runs wherever it is copied to together with generator/: Python 3.8 is all they need. Only a TensorFlow model whose
tensors are not said takes `tensorflow`, to read them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    from generator.flags import parse
    from generator.folder import write
    from generator.options import help_text
    from generator.order import Order, read
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: the folder generator/ belongs beside gen_triton_model.py")


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    try:
        flags = parse(arguments)
        order = read(flags)
        if order is None:
            return fail(flags.errors)
        for warning in flags.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        shown = os.path.normpath(flags["triton_model_dir"])
        kept = write(order, shlex.join(["gen_triton_model.py", *arguments]))
    except OSError as error:
        print(f"error: {reason(error)}: config.pbtxt was not written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: config.pbtxt was not written", file=sys.stderr)
        return 130
    tell(order, shown, kept)
    return 0


def fail(errors: list[str]) -> int:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print("nothing was written (--help says what each option takes)", file=sys.stderr)
    return 2


def reason(error: OSError) -> str:
    """In one line, also where a folder's many files could not be copied."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


def tell(order: Order, shown: str, kept: list[str]) -> None:
    print(f"wrote {shown}/config.pbtxt and {shown}/{order.version}/model.py")
    if kept:
        print(f"what was there before is kept: {', '.join(kept)}")
    path = order.compiled.parameter
    if os.path.isabs(path):
        print(f"{path} is loaded from there. For a container, put it into {shown} and say that,")
        print("      or mount it at that very place, by this line in compose.override.yaml:")
        print(f"      {mount(path)}")
    where = "" if order.folder.parent.name == "model_repository" else f"move {shown} into model_repository/, and "
    print(f"next: {where}make up PROFILE=neuron SYSTEMS={order.folder.name}")


def mount(path: str) -> str:
    """A line of compose's, to which $ is the start of a variable."""
    quoted = json.dumps(path.replace("$", "$$"), ensure_ascii=False)
    volume = f"{{ type: bind, source: {quoted}, target: {quoted}, read_only: true }}"
    return f"services: {{ triton-neuron: {{ volumes: [{volume}] }} }}"


def stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, stop)
    sys.exit(main(sys.argv[1:]))
