"""Checks the relative links and anchors of every Markdown file of the checkout, without a network.

    python docs/check_links.py

The strict build of the site checks its own pages; this also covers files that are not part of it, and checks
anchors as a code host resolves them. What git ignores, such as a generated page, does not exist for a reader
there: a link to it is broken, even in a checkout where it was generated.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
_PARSER = MarkdownIt("commonmark").enable("table")


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]
    problems = [problem for file in files for problem in broken_links(file)]
    print("\n".join([*problems, f"{len(files)} Markdown files, {len(problems)} broken links"]))
    return 1 if problems else 0


def broken_links(file: Path) -> list[str]:
    """One line for each link of the file whose target or anchor does not exist."""
    problems = []
    for link in _links(file):
        url = urlsplit(link)
        if url.scheme or url.netloc:
            continue
        target = (file.parent / unquote(url.path)).resolve() if url.path else file
        if not target.is_relative_to(ROOT):
            problems.append(f"{file.relative_to(ROOT)}: {link} leaves the repository")
        elif not target.exists() or _is_ignored(target):
            problems.append(f"{file.relative_to(ROOT)}: {link} does not exist, or git ignores it")
        elif url.fragment and target.suffix == ".md" and url.fragment not in _anchors(target):
            problems.append(
                f"{file.relative_to(ROOT)}: {link} names no heading of {target.relative_to(ROOT)}"
            )
    return problems


@functools.cache
def _is_ignored(path: Path) -> bool:
    command = ["git", "check-ignore", "--quiet", "--", str(path)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def _links(file: Path) -> list[str]:
    links = []
    for token in _tokens(file):
        for child in token.children or ():
            if target := child.attrGet("href") or child.attrGet("src"):
                links.append(str(target))
    return links


@functools.cache
def _anchors(file: Path) -> frozenset[str]:
    """Anchors of the headings as a code host makes them: lower case, hyphens, numbers for repetitions."""
    anchors: list[str] = []
    tokens = _tokens(file)
    for heading, inline in itertools.pairwise(tokens):
        if heading.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            taken = re.compile(rf"{re.escape(slug)}(-\d+)?")
            repeated = sum(taken.fullmatch(anchor) is not None for anchor in anchors)
            anchors.append(f"{slug}-{repeated}" if repeated else slug)
    return frozenset(anchors)


@functools.cache
def _tokens(file: Path) -> list[Token]:
    return _PARSER.parse(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
