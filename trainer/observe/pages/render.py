"""HTML pages from the templates in this folder: self-contained files with a common style.

Templates are autoescaped, so text of models, data and settings cannot become markup.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """Render a page. A missing template value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
