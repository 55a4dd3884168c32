"""Writes docs/reference/*.md from the code: commands, settings, HTTP routes and the public Python API.

    python docs/generate_reference

The pages are not committed; `make docs` writes them and builds the site strictly, which tests them.
"""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

import commands  # noqa: E402
import http_routes  # noqa: E402
import python_api  # noqa: E402
import settings  # noqa: E402

FOLDER = CHECKOUT / "docs" / "reference"


def main() -> None:
    pages = {"cli": commands.page(), "http": http_routes.page(), **settings.pages(), **python_api.pages()}
    for old in FOLDER.glob("*.md"):
        if old.stem != "index" and old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        path = FOLDER / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    print(f"{len(pages)} pages in {FOLDER.relative_to(CHECKOUT)}")


if __name__ == "__main__":
    main()
