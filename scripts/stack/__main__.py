"""Run the stack's commands in either runtime: python -m scripts.stack up | down | status | ..."""

from __future__ import annotations

import argparse
import sys

from scripts.common.cli import out, run
from scripts.common.files import exclusive
from scripts.common.ports import check_free
from scripts.common.settings import ROOT, Settings, with_secrets
from scripts.stack.base import Stack

RUNTIMES = ("docker", "local")


def stack(settings: Settings) -> Stack:
    """Return the stack of the chosen runtime. The other runtime's module stays unimported: it needs other packages."""
    if settings.choice("RUNTIME", RUNTIMES) == "docker":
        from scripts.stack.docker.stack import DockerStack

        return DockerStack(settings)
    from scripts.stack.local.stack import LocalStack

    return LocalStack(settings)


def up() -> None:
    # Two first runs at once would make two admin keys.
    with exclusive(ROOT, "another `make up` is at work here"):
        settings = with_secrets(Settings.load())
    out.print(f"runtime     {settings['RUNTIME']}")
    chosen = stack(settings)
    chosen.up()
    chosen.print_urls()
    # SYSTEMS from make's command line holds for this command only, so the hint for the next one repeats it.
    systems = f' SYSTEMS="{settings["SYSTEMS"]}"' if settings.chosen_for_this_command("SYSTEMS") else ""
    out.print(f"\n`make status` shows its state, `make smoke{systems}` sends test requests, `make down` stops it.")


def locust() -> None:
    settings = Settings.load()
    check_free(settings, ["LOCUST_PORT"])
    out.print(f"Locust      {settings.url('LOCUST_PORT')}  (Ctrl-C stops it)")
    stack(settings).locust()


COMMANDS = {
    "up": up,
    "down": lambda: stack(Settings.load()).down(),
    "status": lambda: 0 if stack(Settings.load()).status() else 1,
    "logs": lambda: stack(Settings.load()).logs(follow=sys.stdout.isatty()),
    "models": lambda: stack(Settings.load()).models(),
    "loadtest": lambda: stack(Settings.load()).loadtest(),
    "locust": locust,
    "dashboards": lambda: stack(Settings.load()).dashboards(),
    "build": lambda: stack(Settings.load()).build(),
    "clean": lambda: stack(Settings.load()).clean(),
}


def main() -> int | None:
    parser = argparse.ArgumentParser(prog="python -m scripts.stack", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    return COMMANDS[parser.parse_args().command]()


if __name__ == "__main__":
    run(main)
