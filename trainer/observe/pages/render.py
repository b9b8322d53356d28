"""HTML pages from the templates in this folder: self-contained files with a common style.

Templates are autoescaped, so text of models, data and settings cannot become markup. Pages are valid UTF-8 whatever the
text in them.
"""

from __future__ import annotations

import os
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
    page = environment.get_template(template).render(**values)
    return page.encode(errors="replace").decode()  # messages in a file may hold surrogates


def write_page(path: Path, page: str) -> None:
    """Write a page and create its directories. On failure an older file is kept. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        path.write_text(page, encoding="utf-8")
        return
    path = path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
