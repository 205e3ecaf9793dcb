#!/usr/bin/env python3
"""Write the Triton model folder of a model compiled for AWS Neuron: config.pbtxt and <version>/model.py.

Runs anywhere with Python 3.8 or newer, if the folder generator/ is beside it. It needs `tensorflow` only to read the
tensors of a SavedModel that the command line does not list.
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
    from generator.folder import write_folder
    from generator.options import Arguments, build_parser
    from generator.specification import Specification, specify
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}; copy the folder generator/ beside gen_triton_model.py")


def main(command_line: list[str]) -> int:
    if {"-h", "--help"} & set(command_line):
        build_parser().print_help()
        return 0
    try:
        arguments = Arguments(command_line)
        specification = specify(arguments)
        if specification is None:
            return report_errors(arguments.errors)
        for warning in arguments.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        kept = write_folder(specification, shlex.join(["gen_triton_model.py", *command_line]))
    except OSError as error:
        print(f"error: {reason(error)}: config.pbtxt was not written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: config.pbtxt was not written", file=sys.stderr)
        return 130
    report(specification, os.path.normpath(arguments["triton_model_dir"]), kept)
    return 0


def report_errors(errors: list[str]) -> int:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    print("nothing was written (--help describes every option)", file=sys.stderr)
    return 2


def reason(error: OSError) -> str:
    """Return one line, also for shutil's error that lists every file of a folder."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


def report(specification: Specification, folder: str, kept: list[str]) -> None:
    print(f"wrote {folder}/config.pbtxt and {folder}/{specification.version}/model.py")
    if kept:
        print(f"replaced files are kept as {', '.join(kept)}")
    path = specification.compiled.parameter
    if os.path.isabs(path):
        print(f"Triton loads {path} from that path. For a container, move it into {folder} and run this again,")
        print("      or mount it at the same path with this line in compose.override.yaml:")
        print(f"      {mount(path)}")
    name, parent = specification.folder.name, specification.folder.parent.name
    move = "" if parent == "model_repository" else f"move {folder} into model_repository/, and "
    print(f"next: {move}make up PROFILE=neuron SYSTEMS={name}")


def mount(path: str) -> str:
    """Return a line of YAML. Compose would read a single $ as the start of a variable."""
    quoted = json.dumps(path.replace("$", "$$"), ensure_ascii=False)
    volume = f"{{ type: bind, source: {quoted}, target: {quoted}, read_only: true }}"
    return f"services: {{ triton-neuron: {{ volumes: [{volume}] }} }}"


def stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, stop)
    sys.exit(main(sys.argv[1:]))
