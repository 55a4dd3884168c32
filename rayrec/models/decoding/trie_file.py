"""The trie of a large catalog in a file: made once, and mapped by every process of a node.

It is a copy of what the codes say, kept because it takes seconds to make and some 100 bytes an item in each
process. One that is missing, damaged or of other codes is made again, and where its folder cannot be written,
made for this process alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rayrec.models.decoding.trie import CodeTrie
from rayrec.platform.files import written_whole
from rayrec.platform.mapped_tensors import mapped_tensors, write_tensors

TRIE_FILE = "trie.safetensors"
FEWEST_ITEMS = 100_000
"""Of smaller catalogs a trie is made as fast as it is read."""
_FORMAT = "1"
_PER_DEPTH = ("child_offsets", "child_codes", "first_leaves", "child_keys")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrieFile:
    """Where the trie of some codes is kept."""

    path: Path
    version: str
    """Of the registry whose codes they are."""

    def trie(self, codes_IL: np.ndarray) -> CodeTrie:
        """The trie of these codes, mapped where there is a file or one can be written.

        Raises:
            ValueError: as of `CodeTrie.from_codes`.
        """
        if len(codes_IL) < FEWEST_ITEMS:
            return CodeTrie.from_codes(codes_IL)
        if (found := self.load()) is not None and found.num_items == len(codes_IL):
            return found
        trie = CodeTrie.from_codes(codes_IL)
        try:
            self.save(trie)
        except OSError as error:  # a folder that is read-only, full, or not of this node
            logger.info("%s: the trie is not kept (%s)", self.path, error)
            return trie
        del trie  # before the same is mapped
        return self.load() or CodeTrie.from_codes(codes_IL)

    def save(self, trie: CodeTrie) -> None:
        """Write the file, whole or not at all. Raises OSError where that cannot be done."""
        arrays = {"leaf_items_I": trie.leaf_items_I.cpu().numpy()}
        for name in _PER_DEPTH:
            for depth, tensor in enumerate(getattr(trie, name)):
                arrays[f"{name}.{depth}"] = tensor.cpu().numpy()
        metadata = {
            "format": _FORMAT,
            "version": self.version,
            "max_children": json.dumps(trie.max_children),
            "num_codes": json.dumps(trie.num_codes),
        }
        metadata["checksum"] = _checksum(arrays, metadata)
        with written_whole(self.path) as unfinished:
            write_tensors(unfinished, arrays, metadata)

    def load(self) -> CodeTrie | None:
        """The trie in the file; None if there is none, or one of other codes or damaged."""
        from safetensors import SafetensorError

        try:
            metadata, arrays = mapped_tensors(self.path)
            if metadata.get("format") != _FORMAT or metadata.get("version") != self.version:
                return None
            if metadata["checksum"] != _checksum(arrays, metadata):
                return None
            max_children, num_codes = (
                tuple(json.loads(metadata[name])) for name in ("max_children", "num_codes")
            )
            depths = range(len(num_codes))
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            return CodeTrie(
                tuple(tensors[f"child_offsets.{depth}"] for depth in depths),
                tuple(tensors[f"child_codes.{depth}"] for depth in depths),
                tensors["leaf_items_I"],
                tuple(tensors[f"first_leaves.{depth}"] for depth in (*depths, len(depths))),
                max_children,
                tuple(tensors[f"child_keys.{depth}"] for depth in depths),
                num_codes,
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError):
            return None


def _checksum(arrays: dict[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """Of the arrays and of what the header says of them."""
    from xxhash import xxh3_64

    digest = xxh3_64()
    for name in ("version", "max_children", "num_codes"):
        digest.update(f"{name} {metadata[name]}".encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
