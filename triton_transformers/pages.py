"""HTML pages made of Jinja templates."""

from __future__ import annotations

import functools
import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def page(package: str, template: str, **values: object) -> Markup:
    """Fill in a template of that package's folder. Raise for a value that is missing."""
    return Markup(_environment(package).get_template(template).render(values))


@functools.cache
def _environment(package: str) -> Environment:
    """Return the environment of the package, which keeps its compiled templates."""
    loader = PackageLoader(package, ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["prose"] = prose
    return environment


def prose(text: str) -> Markup:
    """Return a sentence as HTML, with the commands between its backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
