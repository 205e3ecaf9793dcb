"""HTML pages, of Jinja templates that lie beside the code that fills them."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def page(package: str, template: str, **values: object) -> Markup:
    environment = Environment(
        loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return Markup(environment.get_template(template).render(values))
