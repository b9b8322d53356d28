"""HTML pages from the templates in this folder: self-contained files with a common style.

Templates are autoescaped, so text of models, data and settings cannot become markup. Pages are valid UTF-8 whatever the
text in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from lockstep.rollout.system.plain_files import write_whole

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
    page = environment.get_template(template).render(**values)
    return page.encode(errors="replace").decode()  # messages in a file may hold surrogates


def write_page(path: Path, page: str) -> None:
    """Write a page and create its directories. On failure an older file is kept. Raises OSError."""
    write_whole(path, page.encode())
