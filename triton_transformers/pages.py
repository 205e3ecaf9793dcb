"""HTML pages made of Jinja templates."""

from __future__ import annotations

import functools

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(package: str, template: str, **values: object) -> Markup:
    """Fill in a template of that package's folder. Raise for a value that is missing."""
    return Markup(_environment(package).get_template(template).render(values))


@functools.cache
def _environment(package: str) -> Environment:
    """Return the environment of the package, which keeps its compiled templates."""
    return Environment(loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
