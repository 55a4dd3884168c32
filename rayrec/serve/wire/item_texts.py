"""Items as text: the tokens of their semantic IDs, or their ids."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from rayrec.models.tokenizers.code_tokens import CodeTexts
from rayrec.models.tokenizers.code_tuples import IntArray


class ItemTexts:
    """Reads histories and writes items; may be used by several threads.

    An item is the tokens of all levels of its codes, the level included that tells items of one tuple apart:
    so each text is one item's, whatever the collision policy.
    """

    def __init__(self, item_keys: pd.Index, codes_IL: IntArray) -> None:
        """
        Args:
            item_keys: by position in the catalog.
            codes_IL: [I, L] of the same items.
        """
        self._item_keys = item_keys
        self._codes = CodeTexts(codes_IL)
        # The index makes its table when it is first asked, which two threads must not do at once.
        self._item_keys.get_indexer(item_keys[:1])

    @property
    def num_tokens(self) -> int:
        """Tokens of an item."""
        return self._codes.num_levels

    def texts_of(self, item_keys: Sequence[str]) -> list[str]:
        """The tokens of items of the catalog. Looked up together, many take hardly longer than one."""
        items = self._item_keys.get_indexer(list(item_keys))
        assert (items >= 0).all(), "an item that was recommended is not in the catalog"
        return [self._codes.text(item) for item in items.tolist()]

    def keys_in(self, text: str) -> list[str]:
        """Keys of the items that a text consists of: tokens such as `<a_12><b_3>`, or ids of items between
        white space. A text that begins with a token is of tokens.

        Raises:
            ValueError: tokens that are none of an item, or an id that is not in the catalog.
        """
        if text.lstrip().startswith("<a_"):
            return [str(self._item_keys[item]) for item in self._codes.items(text)]
        keys = text.split()
        known = self._item_keys.get_indexer(keys) >= 0
        if not known.all():
            raise ValueError(
                f"the catalog has no item {keys[int(known.argmin())][:80]!r}; give tokens such as "
                f"{self._codes.text(0)}, or ids of items with spaces between them"
            )
        return keys
