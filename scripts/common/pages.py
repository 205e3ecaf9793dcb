"""HTML pages made of Jinja templates."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(package: str, template: str, **values: object) -> Markup:
    """Fill in a template of that package's folder. Raise for a value that is missing."""
    environment = Environment(
        loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return Markup(environment.get_template(template).render(values))
