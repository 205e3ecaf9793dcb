"""HTML pages made of Jinja templates."""

from __future__ import annotations

import functools

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(package: str, template: str, inherits: str = "", **values: object) -> Markup:
    """Fill in a template of that package's folder. Raise for a value that is missing.

    The template may also name those of the package `inherits`.
    """
    packages = (package, inherits) if inherits else (package,)
    return Markup(_environment(*packages).get_template(template).render(values))


@functools.cache
def _environment(*packages: str) -> Environment:
    """Return the environment of the packages, which keeps its compiled templates."""
    loader = ChoiceLoader([PackageLoader(package, ".") for package in packages])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
