"""Fill templates. Every value is escaped: only Markup, which our own code makes, is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bokeh
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis.view.text import plain, visible

TEMPLATES = Path(__file__).with_name("templates")
STATIC = Path(__file__).with_name("static")
BOKEH_SCRIPT = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
# Within a script element only these could end it, or be read as markup.
ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&'\u2028\u2029"}


def html(template: str, **values: object) -> Markup:
    """Return a filled template of ours."""
    return Markup(_environment.get_template(template).render(**values))


def json_script(value: Any, *, kind: str) -> Markup:
    """Return data for a script: an element of the class `kind` that no browser executes."""
    text = json.dumps(value).translate(ESCAPED)
    return Markup('<script type="application/json" class="{}">{}</script>').format(
        kind, Markup(text)
    )


def number(value: object) -> str:
    """Return a number for people: 1,234,567 or 0.123."""
    if not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: object) -> str:
    """Return a fraction as "62 %"."""
    return f"{value:.0%}".replace("%", " %") if isinstance(value, int | float) else "–"


def _make_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Any] = {
        "visible": visible,
        "plain": plain,
        "number": number,
        "percent": percent,
    }
    environment.filters.update(filters)
    return environment


_environment = _make_environment()
