"""Jagged sequences: N tokens of B rows one after the other, with their offsets.

Everything pointwise (projections, feed-forward, losses) runs on the N real
tokens; only attention may see a padded view. Histories are short and of very
different lengths, so a padded batch would be mostly padding.

Axes: N tokens of B rows, T the longest row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class JaggedLayout:
    """Where each of N tokens stands in a padded [B, T] rectangle, T the longest row."""

    num_rows: int
    longest: int
    row_N: Tensor
    place_N: Tensor
    """Place of each token in its row, from 0."""
    slot_N: Tensor
    """row_N * longest + place_N."""
    last_B: Tensor
    """Index of each row's last token; rows without tokens point at an arbitrary one (see `last`)."""
    offsets_B1: np.ndarray
    """First token of each row, in the host's memory; the last element is N."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def from_offsets(
        offsets_B1: np.ndarray, device: torch.device, copied: Callable[[np.ndarray], Tensor] | None = None
    ) -> JaggedLayout:
        """Build the layout of rows whose ends are known.

        Args:
            copied: how an array gets to the device, where it goes beside other work; see
                `rayrec.platform.device_copies`.
        """
        on_device = copied or (lambda values: torch.from_numpy(values).to(device))
        lengths_B = np.diff(offsets_B1)
        num_rows, longest = len(lengths_B), int(lengths_B.max(initial=0))
        row_N = np.repeat(np.arange(num_rows), lengths_B)
        place_N = np.arange(offsets_B1[-1]) - np.repeat(offsets_B1[:-1], lengths_B)
        return JaggedLayout(
            num_rows,
            longest,
            on_device(row_N),
            on_device(place_N),
            on_device(row_N * longest + place_N),
            on_device(np.maximum(offsets_B1[1:] - 1, 0)),
            np.asarray(offsets_B1, dtype=np.int64),
        )

    @staticmethod
    def even(num_rows: int, length: int, device: torch.device) -> JaggedLayout:
        """Rows of one length. Made on the device: a copy from the host would be waited for."""
        token_N = torch.arange(num_rows * length, device=device)
        row_B, place_T = torch.arange(num_rows, device=device), torch.arange(length, device=device)
        return JaggedLayout(
            num_rows,
            length if num_rows else 0,
            row_B[:, None].expand(-1, length).flatten(),
            place_T.expand(num_rows, -1).flatten(),
            token_N,
            ((row_B + 1) * length - 1).clamp(min=0),
            np.arange(num_rows + 1) * length,
            {"lengths": torch.full((num_rows,), length, device=device)},
        )

    def repeated(self, count: int) -> JaggedLayout:
        """`count` tokens in the place of each one."""
        make = lambda: JaggedLayout.from_offsets(count * self.offsets_B1, self.device)  # noqa: E731
        return self.derived(("repeated", count), make)

    def some_rows(self, rows: slice) -> tuple[JaggedLayout, slice]:
        """The layout of neighboring rows alone, and which tokens are theirs."""
        offsets_R1 = self.offsets_B1[rows.start : rows.stop + 1]
        tokens = slice(int(offsets_R1[0]), int(offsets_R1[-1]))
        return JaggedLayout.from_offsets(offsets_R1 - offsets_R1[0], self.device), tokens

    def behind(self, lengths_B: np.ndarray) -> tuple[JaggedLayout, Tensor]:
        """The layout of what is behind the first so many tokens of each row, and which tokens that is."""
        left_B = self.lengths_B - lengths_B
        layout = JaggedLayout.from_offsets(np.concatenate([[0], np.cumsum(left_B)]), self.device)
        shift_N = np.repeat(self.offsets_B1[:-1] + lengths_B - layout.offsets_B1[:-1], left_B)
        return layout, torch.from_numpy(shift_N + np.arange(layout.num_tokens)).to(self.device)

    def followed_by(self, other: JaggedLayout) -> tuple[JaggedLayout, Tensor]:
        """The layout in which each row's tokens come before the tokens that it has in another layout.

        Returns:
            The layout, and [N] which tokens it has: of those of self and of the other, one after the other.
        """
        layout = JaggedLayout.from_offsets(self.offsets_B1 + other.offsets_B1, self.device)
        if self.num_rows == 1:
            return layout, torch.arange(layout.num_tokens, device=self.device)
        row_N = np.concatenate(
            [np.repeat(np.arange(each.num_rows), each.lengths_B) for each in (self, other)]
        )
        return layout, torch.from_numpy(np.argsort(row_N, kind="stable")).to(self.device)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_B1[-1])

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each row, in the host's memory."""
        return np.diff(self.offsets_B1)

    @property
    def device(self) -> torch.device:
        return self.row_N.device

    def lengths_on_device_B(self) -> Tensor:
        return self.derived("lengths", lambda: torch.from_numpy(self.lengths_B).to(self.device))

    def derived(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once: all layers of a network attend over one layout."""
        if what not in self._derived:
            self._derived[what] = make()
        return self._derived[what]

    def last(self, x_ND: Tensor) -> Tensor:
        """[B, D] the last token of each row; zeros for a row without tokens."""
        if not self.num_tokens:
            return x_ND.new_zeros(self.num_rows, *x_ND.shape[1:])
        is_there_B = self.lengths_on_device_B() > 0
        return x_ND.index_select(0, self.last_B) * is_there_B.view(-1, *[1] * (x_ND.ndim - 1))

    @property
    def is_padded(self) -> bool:
        """Whether the host takes padding for tokens, and only the device knows where rows end."""
        return False

    @property
    def is_even(self) -> bool:
        """Whether all rows are of one length, so that nothing is padded."""
        return self.num_tokens == self.num_rows * self.longest

    def pad(self, x_ND: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...], zeros after the end of each row."""
        inner = x_ND.shape[1:]
        if self.is_even:
            return x_ND.reshape(self.num_rows, self.longest, *inner)
        padded = x_ND.new_zeros(self.num_rows * self.longest, *inner)
        return padded.index_copy(0, self.slot_N, x_ND).view(self.num_rows, self.longest, *inner)

    def unpad(self, x_BTD: Tensor) -> Tensor:
        """[B, T, ...] to [N, ...]; the inverse of `pad`."""
        x_ND = x_BTD.flatten(0, 1)
        return x_ND if self.is_even else x_ND.index_select(0, self.slot_N)


def length_class(length: int, short: int, ratio: float) -> int:
    """Rows of one class may be padded together: all up to `short` are one, and of the others the longest is
    at most `ratio` times the shortest."""
    return 0 if length <= short else math.ceil(math.log(length / short, ratio))
