"""Items as what a language model may say: the tokens of their codes, alone or within a text.

    only items     <a_4><b_0><c_2><a_9><b_3><c_1>
    in a text      You may like <a_4><b_0><c_2>, which ...      between `least` and `most` of them

The trie of semantic IDs says which code may follow, so that each tuple is an item; none comes twice. An item
that has begun is ended before anything else is said.

Axes: V tokens of the vocabulary, L codes of an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rayrec.models.decoding.trie import CodeTrie
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError


@dataclass(frozen=True)
class ItemTokens:
    """Which tokens stand for the codes of items."""

    trie: CodeTrie
    first_tokens_L: Sequence[int]
    """Of each level: the token of its code 0."""
    code_sizes_L: Sequence[int]
    num_tokens: int
    """Of the vocabulary, V."""
    unsaid: frozenset[int] = frozenset()
    """Tokens that come in no text: those that end it, pad or separate."""

    @cached_property
    def text_V(self) -> BoolArray:
        """[V] whether a token is part of a text, and no code."""
        found = np.ones(self.num_tokens, dtype=bool)
        for first, size in zip(self.first_tokens_L, self.code_sizes_L, strict=True):
            found[first : first + size] = False
        found[list(self.unsaid)] = False
        return found

    @cached_property
    def offsets(self) -> list[Int64Array]:
        return [each.cpu().numpy() for each in self.trie.child_offsets]

    @cached_property
    def codes(self) -> list[Int64Array]:
        return [each.cpu().numpy() for each in self.trie.child_codes]

    @cached_property
    def first_leaves(self) -> list[Int64Array]:
        return [each.cpu().numpy() for each in self.trie.first_leaves]


class ItemGrammar:
    """A `TokenGrammar` of items."""

    def __init__(self, tokens: ItemTokens, least: int = 1, most: int = 1, in_text: bool = False) -> None:
        """
        Args:
            least, most: items that are said; all of them are different.
            in_text: whether there may be a text around them.

        Raises:
            InputError: there are not so many items.
        """
        if not 0 <= least <= most or most < 1 or least > tokens.trie.num_items:
            raise InputError(
                f"from {least} to {most} items of {tokens.trie.num_items}: expected at least 1, and no more "
                "than "
                "there are"
            )
        self._tokens, self._least, self._most, self._in_text = tokens, least, most, in_text
        self._said: list[int] = []
        """Leaves of the items so far."""
        self._depth = self._node = 0
        self._allowed_V: BoolArray | None = None

    @property
    def items(self) -> list[int]:
        """Catalog positions of what was said, in its order."""
        return [int(self._tokens.trie.leaf_items_I[leaf]) for leaf in self._said]

    @property
    def is_complete(self) -> bool:
        return not self._depth and len(self._said) >= self._least

    @property
    def is_over(self) -> bool:
        return not self._in_text and not self._depth and len(self._said) >= self._limit

    @property
    def ending(self) -> Sequence[int]:
        tokens: list[int] = []
        said, depth, node = list(self._said), self._depth, self._node
        while depth or len(said) < self._least:
            codes, children = self._children(depth, node, said)
            tokens.append(self._tokens.first_tokens_L[depth] + int(codes[0]))
            depth, node = depth + 1, int(children[0])
            if depth == self._tokens.trie.depth:
                said.append(node)
                depth = node = 0
        return tokens

    def allowed_V(self) -> BoolArray:
        if self._allowed_V is None:
            is_free = self._in_text and not self._depth
            allowed_V = (
                self._tokens.text_V.copy() if is_free else np.zeros(self._tokens.num_tokens, dtype=bool)
            )
            if self._depth or len(self._said) < self._limit:
                codes, _ = self._children(self._depth, self._node, self._said)
                allowed_V[self._tokens.first_tokens_L[self._depth] + codes] = True
            self._allowed_V = allowed_V
        return self._allowed_V

    def fits(self, token: int, left: int) -> bool:
        return bool(self.allowed_V()[token]) and self._needed(token) <= left

    def advance(self, token: int) -> None:
        if not self.allowed_V()[token]:
            raise ValueError(f"token {token} is not allowed")
        if not self._tokens.text_V[token]:
            codes, children = self._children(self._depth, self._node, self._said)
            code = token - self._tokens.first_tokens_L[self._depth]
            self._node = int(children[int(np.searchsorted(codes, code))])
            self._depth += 1
            if self._depth == self._tokens.trie.depth:
                self._said.append(self._node)
                self._depth = self._node = 0
        self._allowed_V = None

    @property
    def _limit(self) -> int:
        return min(self._most, self._tokens.trie.num_items)

    def _needed(self, token: int) -> int:
        """Tokens of the shortest ending behind an allowed token."""
        depth, said = self._depth, len(self._said)
        if not self._tokens.text_V[token]:
            depth += 1
            if depth == self._tokens.trie.depth:
                depth, said = 0, said + 1
        begun = self._tokens.trie.depth - depth if depth else 0
        missing = max(self._least - said - bool(depth), 0)
        return begun + missing * self._tokens.trie.depth

    def _children(self, depth: int, node: int, said: list[int]) -> tuple[Int64Array, Int64Array]:
        """Codes that may follow, ascending, and the nodes that they lead to; without those all of whose items
        were said."""
        tokens = self._tokens
        start, stop = tokens.offsets[depth][node : node + 2]
        children: Int64Array = np.arange(start, stop)
        if said:
            first = tokens.first_leaves[depth + 1]
            sizes = first[children + 1] - first[children]
            leaves = np.sort(np.array(said))
            used = np.searchsorted(leaves, first[children + 1]) - np.searchsorted(leaves, first[children])
            children = children[used < sizes]
        codes: Int64Array = tokens.codes[depth][children]
        return codes, children
