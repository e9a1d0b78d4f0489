"""Write docs/reference from the code: python docs/make_reference.py

settings.md  every setting, from configs/schema.py and its comments
commands.md  every command's own help, from cli/
configs.md   every YAML file of configs/, with the first sentence of its comment

The pages are committed, so they can be read in a checkout. A test compares them with the code.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # our packages are run from a checkout
from cli.__main__ import SECTIONS, program
from configs import schema

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
MADE = "This page is made from the code by `docs/make_reference.py`; do not edit it.\n"
WIDTH = 100


def settings_page() -> str:
    notes = _comments(ROOT / "configs" / "schema.py")
    sections: list[str] = []
    _add_section(sections, schema.Config, prefix="", notes=notes)
    intro = (
        "Give a setting in a YAML file or on the command line: `learner.steps=20`. What is not\n"
        "given has its default. `gigpo train CONFIG --dry-run` shows what a config changes, with\n"
        "`--all` every setting. Combinations that would hang or mislead are refused by name."
    )
    return "\n".join(["# Settings", "", MADE, intro, "", *sections])


def _add_section(lines: list[str], section: type, *, prefix: str, notes: dict[str, str]) -> None:
    """Add the table of a section, and then those of the sections inside it."""
    hints = get_type_hints(section)
    lines += [f"## {prefix.rstrip('.') or 'The run'}", ""]
    doc = ast.get_docstring(ast.parse((ROOT / "configs/schema.py").read_text()))
    if (
        section.__doc__
        and section.__doc__ != doc
        and not section.__doc__.startswith(f"{section.__name__}(")
    ):
        lines += [_paragraph(section.__doc__), ""]
    lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
    inner: list[tuple[str, type]] = []
    for field in fields(section):
        if is_dataclass(hints[field.name]):
            inner.append((field.name, hints[field.name]))
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        note = notes[f"{section.__name__}.{field.name}"]
        name = f"{prefix}{field.name}"
        cells = f"`{name}`", _type_name(hints[field.name]), f"`{_yaml(default)}`", note
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines.append("")
    for name, each in inner:
        _add_section(lines, each, prefix=f"{prefix}{name}.", notes=notes)


def _comments(path: Path) -> dict[str, str]:
    """Return the comment of each setting, by `Class.field`: above it, beside it, or both."""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            first = field.lineno - 1
            while (above := lines[first - 1].strip()).startswith(
                "#"
            ) and "Rarely changed" not in above:
                first -= 1
            comment = [line.strip().lstrip("# ") for line in lines[first : field.lineno - 1]]
            beside = lines[field.end_lineno - 1][field.end_col_offset :].strip().lstrip("# ")
            words = " ".join([*comment, beside]).strip()
            # a comment above may speak of several settings; the last line above is this one's
            found[f"{node.name}.{field.target.id}"] = words[:1].upper() + words[1:]
    return found


def _type_name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
    return names.get(
        name,
        {
            "list[str]": "list of texts",
            "bool | None": "true, false or null",
            "int | configs.schema.WorkerRange": "whole number or range",
        }.get(str(hint), "mapping"),
    )


def _yaml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case "":
            return '""'
        case list():
            return f"[{', '.join(value)}]"
        case float():
            return f"{value:g}"
    return str(value)


def _paragraph(text: str) -> str:
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text.strip()).replace("\n    ", "\n")


def commands_page() -> str:
    lines = ["# Commands", "", MADE]
    lines += ["`gigpo COMMAND --help` shows the same in a terminal.", ""]
    parent = click.Context(program, info_name="gigpo")
    for title, commands in SECTIONS.items():
        lines += [f"## {title}", ""]
        for command in commands:
            context = click.Context(
                command, info_name=command.name, parent=parent, terminal_width=WIDTH
            )
            shown = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
            lines += [f"### gigpo {command.name}", "", "```text", shown, "```", ""]
    return "\n".join(lines)


def configs_page() -> str:
    lines = ["# Configs that are ready to start", "", MADE]
    lines += ["`gigpo train FILE --dry-run` shows what a start would do and need.", ""]
    lines += ["| file | what it is |", "|---|---|"]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        comment = []
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        first = (
            re.split(r"(?<=[a-z)\d])\. (?=[A-Z])|: gigpo ", " ".join(comment))[0]
            .strip()
            .rstrip(".")
        )
        lines.append(f"| [{path.name}](../../configs/{path.name}) | {first} |")
    return "\n".join([*lines, ""])


PAGES = {"settings.md": settings_page, "commands.md": commands_page, "configs.md": configs_page}


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
    print(f"{len(PAGES)} pages in {REFERENCE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
