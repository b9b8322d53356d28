"""HTML pages from the templates in this folder: one file each, no network, no library, one look.

Templates are autoescaped: text of models, data and settings is text, whatever it spells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """The page. A value that the template names and nobody gives is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
