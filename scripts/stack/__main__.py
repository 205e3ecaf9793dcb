"""Run the stack's commands in either runtime: python -m scripts.stack up | down | status | ..."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable

from export.added_adapters import FACT
from export.record import FORMAT_OF, read_record
from export.selection import check_formats
from loadtest.load.workload import Workload, worker_count
from scripts.stack.base import WOULD_DISTURB, WOULD_UNLOAD, Stack
from triton_transformers.cli import err, one_interrupt, out, run
from triton_transformers.files import exclusive
from triton_transformers.ports import check_free
from triton_transformers.settings import ROOT, Settings, UserError, save, saved, with_secrets
from triton_transformers.triton import TritonError

# Two commands that write .env at once would lose what one of them wrote.
ANOTHER_UP = "another `make up` is at work here"


def stack(settings: Settings) -> Stack:
    """Return the stack of the chosen runtime. The other runtime's module stays unimported: it needs other packages."""
    if settings.runtime == "docker":
        from scripts.stack.docker.stack import DockerStack

        return DockerStack(settings)
    from scripts.stack.local.stack import LocalStack

    return LocalStack(settings)


def complete_settings() -> Settings:
    """Return the settings with the secrets, which two first runs at once must not generate twice."""
    settings = Settings.load()
    with exclusive(ROOT, ANOTHER_UP):
        return with_secrets(settings)


def up() -> None:
    """Serve exactly SYSTEMS if the user set it; if not, a running server keeps its systems."""
    settings = complete_settings()
    current = stack(settings)
    served = current.served_now()
    systems = settings.systems if settings.chosen("SYSTEMS") or not served else served
    bring_up(current, systems, systems, [name for name in served if name not in systems])
    # SYSTEMS from make's command line holds for this command only, so the hint for the next one repeats it.
    temporary = settings.chosen_for_this_command("SYSTEMS")
    hint = f' SYSTEMS="{settings["SYSTEMS"]}"' if temporary else ""
    out.print(f"\n`make status` shows its state, `make smoke{hint}` sends test requests, `make down` stops it.")


def bring_up(
    current: Stack,
    systems: list[str],
    assembled: list[str],
    unload: Collection[str] = (),
    refresh: Collection[str] | None = None,
) -> None:
    """Check everything, then assemble systems, then change what runs."""
    out.print(f"runtime     {current.settings['RUNTIME']}")
    current.check(systems)
    if unload:
        current.check_no_comparison(WOULD_UNLOAD)
    current.models(assembled)
    current.up(systems, unload, refresh)
    current.print_urls()


def bring_up_beside(current: Stack, more: Iterable[str] = ()) -> list[str]:
    """Serve SYSTEM and more beside the systems of the running server; a stopped one serves SYSTEMS too. Return all."""
    settings = current.settings
    served = current.served_now()
    others = served or (settings.systems if settings.chosen("SYSTEMS") else [])
    own = [settings.system, *more]
    systems = list(dict.fromkeys([*others, *own]))
    # The others are in place, and HF_MODEL and its like apply to one system.
    bring_up(current, systems, own if served else systems, refresh=own)
    return systems


def measure(program: str) -> int:
    """Serve SYSTEM beside the other systems, then run loadtest or tune."""
    settings = complete_settings()
    if program == "tune":
        from loadtest.tune.goal import Goal

        Goal.from_settings(settings)
    worker_count(settings, Workload.from_settings(settings))
    current = stack(settings)
    if program == "loadtest" and settings.formats:
        return compare_formats(current)
    current.check_comparison()
    bring_up_beside(current)
    if program == "loadtest":
        return current.run(program)
    from scripts.stack import apply

    return apply.tune(current)


def compare_formats(current: Stack) -> int:
    """Serve SYSTEM in each of FORMATS too, compare them, and unload them again."""
    check_formats(current.settings)
    current.check_comparison()
    with one_interrupt():
        try:
            bring_up_beside(current, current.settings.variants())
            return current.run("loadtest")
        except BaseException:  # a format was refused, or the user stopped this
            print_kept_formats(current.settings)
            raise
        finally:
            unload_formats(current)


def print_kept_formats(settings: Settings) -> None:
    """Print which formats of SYSTEM are on disk, for the next comparison, and how to delete them."""
    for name in settings.variants():
        if read_record(name, settings.model_repository):
            err.print(f"{name} stays on disk for the next comparison: `make remove SYSTEM={name}` deletes it")


def unload_formats(current: Stack) -> None:
    """Unload the formats of SYSTEM, also those that a killed comparison left. What SYSTEMS names stays."""
    settings = current.settings
    try:
        served = [name for name in current.served_now() if name not in settings.systems]
        records = filter(None, (read_record(name, settings.model_repository) for name in served))
        current.unload([record.system for record in records if record.facts.get(FORMAT_OF) == settings.system])
    except (UserError, TritonError) as error:  # printed, because the error that ended the comparison says more
        hint = f"Formats of {settings.system} may be loaded: the next comparison of them unloads them"
        err.print(f"{error}. {hint}", markup=False)


def locust() -> int:
    settings = complete_settings()
    check_free(settings, ["LOCUST_PORT"])
    current = stack(settings)
    bring_up_beside(current)
    out.print(f"Locust      {settings.url('LOCUST_PORT')}  (Ctrl-C stops it)")
    return current.run("locust")


def add() -> None:
    """Assemble SYSTEM, serve it beside the others if the server runs, and add it to SYSTEMS in .env."""
    settings = complete_settings()
    system = named_system(settings, "add")
    current = stack(settings)
    if current.running():
        current.check_no_comparison(WOULD_DISTURB)
        served = bring_up_beside(current)
    else:
        current.models([system])
        served = []
    with exclusive(ROOT, ANOTHER_UP):
        # If .env sets no SYSTEMS, a server keeps its systems. Save them too, or the next `make up` unloads them.
        systems = dict.fromkeys([*saved("SYSTEMS", " ".join(served)).split(), system])
        if list(systems) != saved("SYSTEMS").split():
            save_systems(systems)
    current.print_first_request(system)


def remove() -> None:
    """Unload SYSTEM, delete its files, and take it out of SYSTEMS in .env. SYSTEM=name:adapter is only an adapter."""
    settings = Settings.load()
    system, has_adapter, adapter = named_system(settings, "remove").partition(":")
    if has_adapter:
        return remove_adapter(settings, system, adapter)
    models = stack(settings).remove(system)
    with exclusive(ROOT, ANOTHER_UP):
        systems = saved("SYSTEMS").split()
        if (rest := [name for name in systems if name not in models]) != systems:
            save_systems(rest)


def remove_adapter(settings: Settings, system: str, adapter: str) -> None:
    """Delete an adapter. A running server goes on answering for the system and its other adapters."""
    record = read_record(system, settings.model_repository)
    if not record or adapter not in (adapters := record.facts.get(FACT, {})):
        others = ", ".join(f"{system}:{name}" for name in adapters) if record else ""
        raise UserError(f"there is no adapter {system}:{adapter}; there is {others or 'none'}")
    current = stack(settings.replace(ADAPTERS=f"{adapter}="))
    current.check_no_comparison(WOULD_DISTURB)
    current.models([system])
    if system in current.served_now():
        current.refresh(system)


def named_system(settings: Settings, target: str) -> str:
    """Return SYSTEM of make's command line: its default and .env's are meant for the comparison."""
    if not settings.chosen_for_this_command("SYSTEM"):
        raise UserError(f"name one system: make {target} SYSTEM=name")
    return settings.system


def save_systems(systems: Iterable[str]) -> None:
    value = " ".join(systems)
    save("SYSTEMS", value)
    out.print(f'.env: SYSTEMS="{value}"' if value else ".env: SYSTEMS is empty: `make up` starts with the default")


def models() -> None:
    settings = Settings.load()
    if not settings.list:
        return stack(settings).models(settings.systems)
    from export.listing import print_list

    try:
        index = stack(settings).triton.index()
    except TritonError:
        index = {}
    named = [settings[name].split() for name in ("SYSTEM", "SYSTEMS") if settings.chosen_for_this_command(name)]
    print_list(settings, named[0] if named else [], {model for model, (state, _) in index.items() if state == "READY"})


def unchecked() -> Stack:
    """Return the stack for a command that only looks at it or stops it: a wrong setting must not prevent that."""
    return stack(Settings.load(checked=False).corrected())


COMMANDS = {
    "up": up,
    "add": add,
    "remove": remove,
    "down": lambda: unchecked().down(),
    "status": lambda: 0 if unchecked().status() else 1,
    "logs": lambda: unchecked().logs(follow=sys.stdout.isatty()),
    "models": models,
    "loadtest": lambda: measure("loadtest"),
    "tune": lambda: measure("tune"),
    "locust": locust,
    "dashboards": lambda: stack(Settings.load()).run("dashboards"),
    "build": lambda: stack(Settings.load()).build(),
    "clean": lambda: unchecked().clean(),
}


def main() -> int | None:
    parser = argparse.ArgumentParser(prog="python -m scripts.stack", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    return COMMANDS[parser.parse_args().command]()


if __name__ == "__main__":
    run(main)
