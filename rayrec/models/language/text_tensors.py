"""A batch of rows of tokens as tensors on the training device.

Axes: B rows, N tokens of all rows, P places that are filled by rows of tables, M distinct ids of a table, D
width of its rows, 1 an extra element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.base.keyed_random import token_keys
from rayrec.platform.device_copies import OverlappedCopies


class _Lookup(Protocol):
    @property
    def ids_M(self) -> np.ndarray: ...
    @property
    def inverse(self) -> np.ndarray: ...


class RowsOfTokens(Protocol):
    """Tokens, and which of them are predicted or stand for rows of tables."""

    @property
    def tokens_N(self) -> np.ndarray: ...
    @property
    def is_target_N(self) -> np.ndarray:
        """Whether a token is to be predicted from those before it; never a row's first."""

    @property
    def offsets_B1(self) -> np.ndarray: ...
    @property
    def filled_P(self) -> Mapping[str, np.ndarray]:
        """By table, which tokens stand for a row of it, in ascending order."""


class TextRows(RowsOfTokens, Protocol):
    """What the dense stage reads of rows of tokens."""

    @property
    def step(self) -> int: ...
    @property
    def row_keys_B(self) -> np.ndarray: ...
    @property
    def num_targets(self) -> int:
        """Of all trainers."""

    @property
    def lookups(self) -> Mapping[str, _Lookup]:
        """By table; element p of `inverse` is the row of place p."""


class AskedRows(TextRows, Protocol):
    """Rows to be continued."""

    @property
    def given(self) -> Sequence[str]:
        """The text of each that is asked about, which a form of answers may go by."""


@dataclass(frozen=True)
class Filled:
    """Tokens in whose place rows of a table are read."""

    places_P: Tensor
    inverse_P: Tensor


@dataclass(frozen=True)
class TextTensors:
    """One trainer's share of a batch, or a part of it."""

    tokens_N: Tensor
    is_target_N: Tensor
    layout: JaggedLayout
    filled: dict[str, Filled]
    rows: dict[str, Tensor]
    """Table name to [M, D] leaf tensors; training reads their `.grad`."""
    keys_N: Tensor | None = None
    """Of the tokens, for dropout; only while training."""

    @staticmethod
    def build(
        features: TextRows, rows: Mapping[str, np.ndarray | Tensor], device: torch.device, training: bool
    ) -> TextTensors:
        """Put the features and looked-up rows of a batch on the device.

        Args:
            rows: [M, D] by table; tensors on the device are taken as they are, without a copy.
        """
        with OverlappedCopies(device) as copies:
            given = {
                table: rows_MD.detach() if isinstance(rows_MD, Tensor) else copies.copied(rows_MD)
                for table, rows_MD in rows.items()
            }
            batch = TextTensors.copied(features, features.lookups, given, device, copies)
        for table, rows_MD in batch.rows.items():
            batch.rows[table] = rows_MD.to(device).requires_grad_(training)
        return batch

    @staticmethod
    def copied(
        text: RowsOfTokens,
        lookups: Mapping[str, _Lookup],
        rows: dict[str, Tensor],
        device: torch.device,
        copies: OverlappedCopies,
    ) -> TextTensors:
        """Put rows of tokens on the device, beside the rows of tables that are there."""
        tensor = copies.copied
        return TextTensors(
            tensor(text.tokens_N.astype(np.int64, copy=False)),
            tensor(text.is_target_N),
            JaggedLayout.from_offsets(text.offsets_B1, device, copies.moved),
            {
                table: Filled(tensor(places_P), tensor(lookups[table].inverse))
                for table, places_P in text.filled_P.items()
            },
            rows,
        )

    @property
    def lengths_B(self) -> np.ndarray:
        return self.layout.lengths_B

    def some_rows(self, rows: slice) -> TextTensors:
        """Neighboring rows alone, with the same leaves.

        Args:
            rows: start and stop are given.
        """
        layout, tokens = self.layout.some_rows(rows)
        return TextTensors(
            self.tokens_N[tokens],
            self.is_target_N[tokens],
            layout,
            {table: _some(filled, tokens) for table, filled in self.filled.items()},
            self.rows,
            None if self.keys_N is None else self.keys_N[tokens],
        )

    def keyed(self, row_keys_B: Tensor, seed: int, step: int) -> TextTensors:
        """With keys of its tokens.

        Args:
            row_keys_B: of its rows.
        """
        row_keys_N = row_keys_B.index_select(0, self.layout.row_N)
        return replace(self, keys_N=token_keys(seed, step, row_keys_N, self.layout.place_N))

    def stand_in(self) -> TextTensors:
        """One row of no meaning, whose loss is to be counted zero times; its leaves have a row each."""
        device = self.tokens_N.device
        nothing = Filled(self.tokens_N.new_zeros(1), self.tokens_N.new_zeros(1))
        return TextTensors(
            self.tokens_N.new_zeros(2),
            self.is_target_N.new_tensor([False, True]),
            JaggedLayout.even(1, 2, device),
            dict.fromkeys(self.filled, nothing),
            {
                table: rows_MD if len(rows_MD) else rows_MD.new_zeros(1, *rows_MD.shape[1:])
                for table, rows_MD in self.rows.items()
            },
        )


def _some(filled: Filled, tokens: slice) -> Filled:
    mine_P = (filled.places_P >= tokens.start) & (filled.places_P < tokens.stop)
    return Filled(filled.places_P[mine_P] - tokens.start, filled.inverse_P[mine_P])
