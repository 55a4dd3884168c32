"""Pieces of Markdown that the reference pages are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CODE = re.compile(r"(`+[^`]*`+)")


def escaped(text: str) -> str:
    """The text with characters that Markdown would interpret escaped, outside of code spans."""
    parts = _CODE.split(text)
    return "".join(
        part if i % 2 else re.sub(r"([\[\]<>*{}|\\])", r"\\\1", part) for i, part in enumerate(parts)
    )


def cell(text: str) -> str:
    """One line that fits into a table."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part.replace("|", r"\|") if i % 2 else escaped(part) for i, part in enumerate(parts))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def prose(text: str) -> str:
    """A docstring's text: paragraphs escaped, indented diagrams and examples as code blocks."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        start = next((i for i, line in enumerate(lines) if line.startswith("    ")), len(lines))
        is_code = all(line.startswith("  ") for line in lines[start:])
        if start < len(lines) and is_code:
            if start:
                blocks.append(escaped("\n".join(lines[:start])))
            blocks.append("```text\n" + "\n".join(line[4:] for line in lines[start:]).rstrip() + "\n```")
        else:
            blocks.append(escaped("\n".join(line.lstrip() if i else line for i, line in enumerate(lines))))
    return "\n\n".join(blocks) + "\n"


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")
