"""How codes are written as text: `<a_12><b_3><c_77>`, a letter for the level and the number of the code.

It is the form of the semantic IDs that LETTER (arXiv:2405.07314) and MiniOneRec (arXiv:2510.24431) publish.
Needs numpy alone.

Axes: I items, L code levels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayrec.models.tokenizers.code_tuples import IntArray
from rayrec.platform.arrays import Int64Array

MAX_LEVELS = 26
"""As many as there are letters."""

_TOKEN = re.compile(r"<([a-z])_([0-9]{1,9})>")


def code_token(level: int, code: int) -> str:
    """The token of a code of a level, both from 0."""
    assert 0 <= level < MAX_LEVELS, f"level {level} has no letter"
    return f"<{chr(ord('a') + level)}_{code}>"


def read_token(level: int, token: str) -> int | None:
    """The code, if this is a token of the level; a tuple in another order would be other codes."""
    match = _TOKEN.fullmatch(token)
    return int(match[2]) if match and ord(match[1]) - ord("a") == level else None


class CodeTexts:
    """The text of every item of a catalog, and back."""

    def __init__(self, codes_IL: IntArray) -> None:
        """
        Args:
            codes_IL: all levels, no two rows the same.
        """
        assert codes_IL.shape[1] <= MAX_LEVELS, f"{codes_IL.shape[1]} levels are more than there are letters"
        self._codes_IL = codes_IL
        # Sorted bytes instead of a dictionary, which takes ten times their memory.
        keys_I = _keys(codes_IL)
        self._order_I = np.argsort(keys_I, kind="stable")
        self._sorted_I = keys_I[self._order_I]

    @property
    def num_levels(self) -> int:
        """Tokens of an item."""
        return self._codes_IL.shape[1]

    def text(self, item: int) -> str:
        """The tokens of an item, by its position in the catalog."""
        return "".join(code_token(level, code) for level, code in enumerate(self._codes_IL[item].tolist()))

    def items(self, text: str) -> list[int]:
        """Positions of the items that a text is made of, one after the other; white space between tokens
        means nothing.

        Raises:
            ValueError: a token is none or not of the level that comes next, the last item is not whole, or no
                item has its codes; says which.
        """
        tokens = _split(text)
        num_levels = self.num_levels
        codes = []
        for place, token in enumerate(tokens):
            level = place % num_levels
            code = read_token(level, token)
            if code is None:
                raise ValueError(
                    f"token {place} is {token[:40]!r}; expected one of level {level + 1} of {num_levels}, "
                    f"such as {code_token(level, 0)}"
                )
            codes.append(code)
        if len(codes) % num_levels:
            raise ValueError(
                f"the last item has {len(codes) % num_levels} of {num_levels} tokens; give all of every item"
            )
        return self._found(np.array(codes, dtype=np.int64).reshape(-1, num_levels))

    def _found(self, codes_NL: Int64Array) -> list[int]:
        keys_N = _keys(codes_NL)
        places_N = np.searchsorted(self._sorted_I, keys_N).clip(max=len(self._sorted_I) - 1)
        unknown_N = self._sorted_I[places_N] != keys_N
        if unknown_N.any():
            place = int(unknown_N.argmax())
            written = "".join(code_token(level, code) for level, code in enumerate(codes_NL[place].tolist()))
            raise ValueError(f"no item has the codes {written}, those of item {place}")
        items: list[int] = self._order_I[places_N].tolist()
        return items


def _split(text: str) -> Sequence[str]:
    """A text after every `>`, without white space around the parts."""
    parts = [part.strip() for part in re.split(r"(?<=>)", text)]
    return [part for part in parts if part]


def _keys(codes_NL: IntArray) -> NDArray[np.bytes_]:
    """[N] a text of bytes for each tuple; all are of one length, so that closing zeros do no harm."""
    codes = np.ascontiguousarray(codes_NL, dtype=">i4")
    keys: NDArray[np.bytes_] = codes.view(f"S{4 * codes.shape[1]}").reshape(len(codes))
    return keys
