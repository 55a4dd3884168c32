"""Dead links and anchors of Markdown files are found without a network."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from rayrec.platform.checkout import CHECKOUT


@pytest.fixture
def check_links(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("check_links", CHECKOUT / "docs" / "check_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_what_does_not_exist_is_named_and_the_rest_is_not(check_links, tmp_path):
    (tmp_path / "other.md").write_text("# A `name`, twice\n\n## Again\n\n## Again\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n\n[a](other.md#a-name-twice) [b](other.md#again-1) [c](#here) [d](https://example.com/x)\n\n"
        "`[code](nothing.md)` ![picture](picture.png) [e](other.md#again-2) [f](../outside.md)\n"
    )

    assert check_links.broken_links(page) == [
        "page.md: picture.png does not exist, or git ignores it",
        "page.md: other.md#again-2 names no heading of other.md",
        "page.md: ../outside.md leaves the repository",
    ]


def test_a_generated_page_is_missing_even_where_it_was_generated(check_links, tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("/generated/*.md\n!/generated/index.md\n")
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "index.md").touch()
    (tmp_path / "generated" / "page.md").touch()
    page = tmp_path / "page.md"
    page.write_text("[a](generated/index.md) [b](generated/page.md) [c](generated)\n")

    assert check_links.broken_links(page) == ["page.md: generated/page.md does not exist, or git ignores it"]
