"""What make's targets call, whichever runtime it is: python -m scripts.stack.commands up | down | status | ..."""

from __future__ import annotations

import argparse
import os
import sys

from scripts.common.cli import out, run
from scripts.common.files import exclusive
from scripts.common.ports import check_free
from scripts.common.settings import ROOT, Settings, with_secrets
from scripts.stack.base import Stack

RUNTIMES = ("docker", "local")


def stack(settings: Settings) -> Stack:
    if settings.choice("RUNTIME", RUNTIMES) == "docker":
        from scripts.stack.docker.stack import DockerStack

        return DockerStack(settings)
    from scripts.stack.local.stack import LocalStack

    return LocalStack(settings)


def up() -> None:
    with exclusive(ROOT, "another `make up` is at work here"):  # two first ones would make two keys
        settings = with_secrets(Settings.load())
    out.print(f"runtime     {settings['RUNTIME']}")
    chosen = stack(settings)
    chosen.up()
    chosen.print_urls()
    # What was said for one command is to be said for the next.
    said = f' SYSTEMS="{settings["SYSTEMS"]}"' if os.environ.get("SYSTEMS") else ""
    out.print(f"\n`make status` shows how it is, `make smoke{said}` tries it, `make down` stops it.")


def status() -> int:
    return 0 if stack(Settings.load()).status() else 1


def logs() -> None:
    stack(Settings.load()).logs(follow=sys.stdout.isatty())
    out.print("no logs: nothing was started here yet (`make up`)")


def locust() -> None:
    settings = Settings.load()
    check_free(settings, ["LOCUST_PORT"])
    out.print(f"Locust      {settings.url('LOCUST_PORT')}  (Ctrl-C ends it)")
    stack(settings).locust()


COMMANDS = {
    "up": up,
    "down": lambda: stack(Settings.load()).down(),
    "status": status,
    "logs": logs,
    "models": lambda: stack(Settings.load()).models(),
    "loadtest": lambda: stack(Settings.load()).loadtest(),
    "locust": locust,
    "dashboards": lambda: stack(Settings.load()).dashboards(),
    "build": lambda: stack(Settings.load()).build(),
    "clean": lambda: stack(Settings.load()).clean(),
}


def main() -> int | None:
    parser = argparse.ArgumentParser(prog="python -m scripts.stack.commands", description="What make's targets call.")
    parser.add_argument("command", choices=COMMANDS)
    return COMMANDS[parser.parse_args().command]()


if __name__ == "__main__":
    run(main)
