"""Settings of the documentation site, which `make docs` builds strictly and without a network.

The sources are the repository's own Markdown files, README and ARCHITECTURE among them, so every link works
both on the site and on a code host. Pages stay plain Markdown: the navigation is the table below and the
links of the index pages.

Sphinx with MyST and Furo: all have releases of the last twelve months, broken links and anchors are
errors, and neither the build nor the search on the built site needs a network.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sphinx.application import Sphinx

from rayrec import __version__

ROOT = Path(__file__).resolve().parents[1]


def _linked(folder: str) -> list[str]:
    """The pages of a folder, in the order in which its index first links to them."""
    text = (ROOT / folder / "index.md").read_text(encoding="utf-8")
    return [f"{folder}/{name}" for name in dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md[)#]", text))]


NAVIGATION: dict[str, dict[str, list[str]]] = {
    "docs/index": {
        "Start": ["README", "docs/tutorials/index", "docs/guides/index"],
        "Look up": ["docs/reference/index", "docs/benchmarks/index", "docs/devices", "CHANGELOG"],
        "Understand": ["ARCHITECTURE", "docs/explanation/index", "docs/coming-from/index"],
        "Take part": ["CONTRIBUTING", "SECURITY"],
    },
    **{
        f"docs/{folder}/index": {"": _linked(f"docs/{folder}")}
        for folder in ("tutorials", "guides", "explanation", "benchmarks", "coming-from")
    },
    "docs/reference/index": {"": ["docs/reference/*"]},
    "docs/guides/operate-a-service": {"": ["docs/operations/README"]},
    "docs/guides/recipes": {"": ["recipes/*/README"]},
}
"""Page -> caption -> the pages below it. The build fails where an index omits a page of its folder."""

project = "RayRec"
author = "the RayRec authors"
version = release = __version__
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "recipes/*/README.md"]
exclude_patterns = [".*", "build", "data", "runs", "docs/guides/examples"]

myst_heading_anchors = 4

html_theme = "furo"
html_title = f"RayRec {__version__}"
html_extra_path = ["redirect"]
html_copy_source = False
html_show_sphinx = False


def _add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    for caption, pages in NAVIGATION.get(docname, {}).items():
        options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
        source[0] += "\n\n" + "\n".join(
            ["```{toctree}", *options, "", *(f"/{page}" for page in pages), "```"]
        )


def _unlink_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to folders work on a code host; the site has no page for them and shows their text only."""
    folder = (Path(app.srcdir) / docname).parent

    def shown(link: re.Match[str]) -> str:
        return f"`{link[1].strip('`')}`" if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)\)", shown, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _unlink_folders)
    app.connect("source-read", _add_navigation)
