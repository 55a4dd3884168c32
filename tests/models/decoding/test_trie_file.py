"""The trie of a large catalog is kept in a file that fits its codes, or made again."""

import numpy as np
import pytest
import torch

from rayrec.models.decoding import trie_file
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.decoding.trie_file import TrieFile

CODES_IL = np.array([[0, 1, 2], [3, 0, 0], [0, 1, 1], [2, 2, 2], [0, 0, 5]], dtype=np.int16)


@pytest.fixture(autouse=True)
def every_catalog_is_large(monkeypatch):
    monkeypatch.setattr(trie_file, "FEWEST_ITEMS", 1)


@pytest.fixture
def made(monkeypatch):
    """Tries that were made of codes."""
    found = []
    of_codes = CodeTrie.from_codes

    def from_codes(codes_IL):
        found.append(len(codes_IL))
        return of_codes(codes_IL)

    monkeypatch.setattr(trie_file.CodeTrie, "from_codes", from_codes)
    return found


def same(one, other):
    for name in ("child_offsets", "child_codes", "first_leaves", "child_keys"):
        assert all(map(torch.equal, getattr(one, name), getattr(other, name)))
    assert torch.equal(one.leaf_items_I, other.leaf_items_I)
    return (one.max_children, one.num_codes) == (other.max_children, other.num_codes)


def test_a_trie_is_made_once_and_read_by_others(tmp_path, made):
    file = TrieFile(tmp_path / "trie", "v1")
    first, second = file.trie(CODES_IL), file.trie(CODES_IL)

    assert made == [5]
    assert same(first, CodeTrie.from_codes(CODES_IL))
    assert same(second, first)
    assert second.leaf_of_I.tolist() == first.leaf_of_I.tolist()


def test_a_trie_of_other_codes_is_made_again(tmp_path, made):
    TrieFile(tmp_path / "trie", "v1").trie(CODES_IL)
    TrieFile(tmp_path / "trie", "v2").trie(CODES_IL[:3])

    assert made == [5, 3]
    assert TrieFile(tmp_path / "trie", "v1").load() is None
    assert TrieFile(tmp_path / "trie", "v2").load().num_items == 3


@pytest.mark.parametrize("damage", ["shorter", "changed", "header", "other"])
def test_a_damaged_file_is_made_again(damage, tmp_path, made):
    file = TrieFile(tmp_path / "trie", "v1")
    file.trie(CODES_IL)
    content = bytearray(file.path.read_bytes())
    if damage == "changed":
        content[-1] ^= 1
    header = content.replace(b'"[4, ', b'"[5, ', 1)  # of the numbers of codes, or of the most children
    assert (damage != "header") or header != content
    damaged = {
        "shorter": content[:-8],
        "changed": content,
        "header": header,
        "other": b"no such file at all",
    }[damage]
    file.path.unlink()
    file.path.write_bytes(damaged)

    assert same(file.trie(CODES_IL), CodeTrie.from_codes(CODES_IL))
    assert file.load() is not None


def test_where_nothing_can_be_written_a_process_makes_its_own(tmp_path, made):
    file = TrieFile(tmp_path / "missing" / "trie", "v1")
    assert same(file.trie(CODES_IL), CodeTrie.from_codes(CODES_IL))
    assert not file.path.parent.exists()


def test_threads_that_write_one_file_do_not_meet(tmp_path, monkeypatch):
    file, trie = TrieFile(tmp_path / "trie", "v1"), CodeTrie.from_codes(CODES_IL)
    write, others = trie_file.write_tensors, [CodeTrie.from_codes(CODES_IL[:3])]

    def interrupted(path, arrays, metadata):
        write(path, arrays, metadata)
        if others:
            file.save(others.pop())  # as another thread of this process does meanwhile

    monkeypatch.setattr(trie_file, "write_tensors", interrupted)
    file.save(trie)

    assert file.load().num_items == 5
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]
