"""The archives of GroupLens, in both of their older generations."""

from pathlib import Path

import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers import load_source

GENRE_FLAGS = "|".join("1" if at in (3, 5) else "0" for at in range(19))


def write(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="latin-1")
    return folder


@pytest.fixture
def archives(tmp_path):
    return {
        "ml-100k": write(
            tmp_path / "ml-100k",
            u__data="1\t7\t5\t100\n2\t7\t3\t50\n",
            u__item=f"7|Amélie (2001)|01-Jan-2001||http://x|{GENRE_FLAGS}\n",
            u__user="1|24|M|technician|85711\n2|53|F|other|94043\n",
        ),
        "ml-1m": write(
            tmp_path / "ml-1m",
            ratings__dat="1::7::5::100\n2::7::3::50\n",
            movies__dat="7::Amélie (2001)::Animation|Comedy\n",
        ),
    }


@pytest.mark.parametrize("name", ["ml-100k", "ml-1m"])
def test_archives_are_recognized_and_read_alike(archives, name):
    tables, layout = load_source(archives[name], PrepareConfig())

    assert layout == "movielens"
    assert tables.name == name
    assert tables.interactions.table.to_pylist() == [
        {"user_id": "1", "item_id": "7", "timestamp": "100", "rating": 5.0},
        {"user_id": "2", "item_id": "7", "timestamp": "50", "rating": 3.0},
    ]
    assert tables.items.table.to_pylist() == [
        {"item_id": "7", "title": "Amélie (2001)", "genres": "Animation Comedy"}
    ]


@pytest.mark.parametrize("name", ["ml-100k", "ml-1m"])
def test_the_folder_that_one_is_in_has_its_name(archives, name, monkeypatch):
    """The data set had no name."""
    monkeypatch.chdir(archives[name])
    tables, _ = load_source(Path(), PrepareConfig())
    assert tables.name == name


def test_a_line_with_missing_values_is_named(tmp_path):
    source = write(tmp_path / "ml-100k", u__data="1\t7\t5\t100\n2\t7\n")

    with pytest.raises(InputError, match=r"u\.data line 2: 2 values, expected 4"):
        load_source(source, PrepareConfig())
