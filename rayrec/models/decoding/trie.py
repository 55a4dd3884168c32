"""The prefix tree of all items' code tuples, as flat tensors.

Depth d holds the distinct prefixes of d codes; the root is the only node of
depth 0 and the leaves, at depth L, are the items. The children of a node are
neighbors, ordered by code, and the nodes of a depth are numbered in the order
of their prefixes: so a child's number at depth d + 1 is also its place in that
depth's arrays, and walking the tree is two gathers.

    depth d                child_offsets[d]    child_codes[d]       depth d + 1
    node n ───────────────► [n], [n + 1] ─────► one entry per child = its node

The top levels have tables besides (`dense_levels`), made when they are first asked for.

Axes: I items (leaves), L codes of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from rayrec.models.decoding.dense_levels import ChildTable, is_dense
from rayrec.platform.code_tree import CodeTree


@dataclass(frozen=True)
class CodeTrie:
    """Compressed sparse rows of every depth; all tensors int64 on one device."""

    child_offsets: tuple[Tensor, ...]
    """Per depth [nodes + 1]: node n owns child_codes[depth][offsets[n]:offsets[n + 1]]."""
    child_codes: tuple[Tensor, ...]
    """Per depth [children]: the code that leads to each node of the next depth."""
    leaf_items_I: Tensor
    """Catalog position of each leaf."""
    first_leaves: tuple[Tensor, ...]
    """Per depth, leaves included, [nodes + 1]: below node n are leaves first[n] to first[n + 1] - 1."""
    max_children: tuple[int, ...]
    """Per depth, the most children of one node: a plain number, so that decoding asks no device for it."""
    child_keys: tuple[Tensor, ...]
    """Per depth [children], ascending: parent * number of codes + code, by which `child` finds a node."""
    num_codes: tuple[int, ...]
    """Per depth, one more than the largest code."""

    @property
    def depth(self) -> int:
        """Codes of an item, L."""
        return len(self.child_codes)

    @property
    def num_items(self) -> int:
        return len(self.leaf_items_I)

    @property
    def device(self) -> torch.device:
        return self.leaf_items_I.device

    def num_nodes(self, depth: int) -> int:
        """Distinct prefixes of `depth` codes."""
        return len(self.child_codes[depth - 1]) if depth else 1

    def children(
        self, depth: int, nodes: Tensor, count: int, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """So many children of nodes [...] of a depth.

        Args:
            start: [...] the first child of each that is wanted; None: its first.

        Returns:
            [..., count] nodes of the next depth, and whether each is a child: rows with fewer are filled up
            with arbitrary nodes. Node -1 has none.
        """
        if start is None and count == self.max_children[depth] and (table := self.child_tables[depth]):
            return table.nodes_VC[nodes], table.is_child_VC[nodes]
        return self._sparse_children(depth, nodes, count, start)

    def codes_of_children(self, depth: int, nodes: Tensor, children: Tensor) -> Tensor:
        """[..., count] codes of what `children` gave, from the first child on."""
        table = self.child_tables[depth]
        if table is None or children.shape[-1] != self.max_children[depth]:
            return self.child_codes[depth][children]
        return table.codes_VC[nodes]

    def _sparse_children(
        self, depth: int, nodes: Tensor, count: int, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        offsets = self.child_offsets[depth]
        known = nodes.clamp(min=0)
        first = offsets[known] if start is None else offsets[known] + start
        children = first.unsqueeze(-1) + torch.arange(count, device=self.device)
        is_child = children < torch.where(nodes < 0, 0, offsets[known + 1]).unsqueeze(-1)
        return children.clamp(max=len(self.child_codes[depth]) - 1), is_child

    def child(self, depth: int, nodes: Tensor, codes: Tensor) -> Tensor:
        """[...] the child of each node [...] by a code [...]; -1 where there is none, or for node -1."""
        num_codes, keys = self.num_codes[depth], self.child_keys[depth]
        if (child_VK := self.children_by_code[depth]) is not None:
            # Codes beyond the last have no column, and share one of the end, which has no child.
            return child_VK[nodes, codes.clamp(max=num_codes)]
        wanted = nodes * num_codes + codes
        found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        is_there = (keys[found] == wanted) & (nodes >= 0) & (codes < num_codes)
        return torch.where(is_there, found, -1)

    # What is kept is made outside of inference mode, even if that asks first: training reads it, too.

    @cached_property
    @torch.inference_mode(False)
    def leaf_of_I(self) -> Tensor:
        """Leaf of each catalog position: the inverse of `leaf_items_I`."""
        leaf_of_I = torch.empty_like(self.leaf_items_I)
        leaf_of_I[self.leaf_items_I] = torch.arange(self.num_items, device=self.device)
        return leaf_of_I

    @cached_property
    @torch.inference_mode(False)
    def nodes_IL(self) -> Tensor:
        """[I, L] the node of each prefix of each item, by catalog position."""
        return torch.stack(
            [torch.searchsorted(first, self.leaf_of_I, right=True) - 1 for first in self.first_leaves[1:]],
            dim=1,
        )

    @cached_property
    @torch.inference_mode(False)
    def child_tables(self) -> tuple[ChildTable | None, ...]:
        """By depth; None where there are sparse rows alone."""
        tables: list[ChildTable | None] = []
        for depth, count in enumerate(self.max_children):
            num_nodes = self.num_nodes(depth)
            if not is_dense(depth, num_nodes * count, len(self.child_codes[depth])):
                tables.append(None)
                continue
            nodes_VC, is_child_VC = self._sparse_children(depth, self._nodes_and_none(depth), count)
            tables.append(ChildTable(nodes_VC, self.child_codes[depth][nodes_VC], is_child_VC))
        return tuple(tables)

    @cached_property
    @torch.inference_mode(False)
    def children_by_code(self) -> tuple[Tensor | None, ...]:
        """By depth [V, K + 1], -1 where there is no child; None where there are sparse rows alone."""
        tables: list[Tensor | None] = []
        for depth, num_codes in enumerate(self.num_codes):
            num_nodes, codes = self.num_nodes(depth), self.child_codes[depth]
            if not is_dense(depth, num_nodes * num_codes, len(codes)):
                tables.append(None)
                continue
            child_VK = torch.full((num_nodes + 1, num_codes + 1), -1, device=self.device)
            children = torch.arange(len(codes), device=self.device)
            parents = torch.searchsorted(self.child_offsets[depth], children, right=True) - 1
            child_VK[parents, codes] = children
            tables.append(child_VK)
        return tuple(tables)

    def _nodes_and_none(self, depth: int) -> Tensor:
        nodes = torch.arange(self.num_nodes(depth) + 1, device=self.device)
        nodes[-1] = -1
        return nodes

    @classmethod
    def from_codes(cls, codes_IL: ArrayLike | Tensor, may_share: bool = False) -> CodeTrie:
        """Build the tree on the CPU.

        Args:
            codes_IL: [I, L] non-negative integers, a tuple per catalog position.
            may_share: whether items may share a tuple; a leaf is then a tuple, and has the first of its
                items.

        Raises:
            ValueError: no items, a negative code, or items that share a tuple.
        """
        codes = codes_IL.cpu().numpy() if isinstance(codes_IL, Tensor) else codes_IL
        tree = CodeTree.of(codes)
        num_leaves = tree.num_nodes(tree.depth)
        if num_leaves < len(tree.order_I) and not may_share:
            raise ValueError(
                f"{len(tree.order_I)} items have only {num_leaves} distinct code tuples; "
                "apply a collision policy before building the trie"
            )
        first_leaves, leaf_items_I = tree.first_items, tree.order_I
        if num_leaves < len(tree.order_I):
            starts = tree.first_items[-1]
            first_leaves = tuple(np.searchsorted(starts, first) for first in tree.first_items)
            leaf_items_I = tree.order_I[starts[:-1]]
        return cls(
            tuple(map(_tensor, tree.offsets)),
            tuple(map(_tensor, tree.codes)),
            _tensor(leaf_items_I),
            tuple(map(_tensor, first_leaves)),
            tree.max_children,
            tuple(map(_tensor, tree.keys)),
            tree.num_codes,
        )

    def to(self, device: torch.device | str) -> CodeTrie:
        """The same on another device, copied there once: networks ask at every step, as a trie is none of the
        buffers that they move."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self._copies:
            self._copies[device] = self._copied_to(device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, CodeTrie]:
        return {}

    def __deepcopy__(self, memo: object) -> CodeTrie:
        return self  # nobody changes it

    @torch.inference_mode(False)
    def _copied_to(self, device: torch.device) -> CodeTrie:
        return CodeTrie(
            tuple(offsets.to(device) for offsets in self.child_offsets),
            tuple(codes.to(device) for codes in self.child_codes),
            self.leaf_items_I.to(device),
            tuple(first.to(device) for first in self.first_leaves),
            self.max_children,
            tuple(keys.to(device) for keys in self.child_keys),
            self.num_codes,
        )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
