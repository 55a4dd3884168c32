"""The ids of all spaces while rows pass by: hashed, counted, held against collisions, the rare ones replaced.

Axes: R rows or elements, D distinct keys of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.impressions.ids import ids_and_checks, null_id, rare_id
from rayrec.samples.impressions.tally import IdCollisionError, IdTally
from rayrec.samples.prepare.ids import plain_spelling

_ODD = r"^0+[0-9]|^[0-9]+\.0+$"
_MOST_ODD = 10_000


class Vocabulary:
    """Ids of keys. The memory that it takes grows with the distinct ids, 24 bytes for each."""

    def __init__(self, spaces: Iterable[str]) -> None:
        self._tallies = {space: IdTally() for space in spaces}
        self._frequent: dict[str, Int64Array] = {}
        """By space: ids that are kept, ascending; none if all are."""
        self._has_rare = dict.fromkeys(self._tallies, False)
        self._odd: dict[str, dict[int, tuple[str, str]]] = {space: {} for space in self._tallies}
        """By space: id of a key without leading zeros or `.0` -> the key with them, and the one without."""

    @classmethod
    def without_rare(cls, counted: Vocabulary, min_count: int) -> tuple[Vocabulary, dict[str, int]]:
        """One that replaces what `counted` has met less than `min_count` times, or never; and how many of
        the ids that it has met these are, by space."""
        made, num_rare = cls(counted._tallies), {}
        for space, tally in counted._tallies.items():
            ids_D, counts_D = counted._tallied(space, tally)
            made._frequent[space] = ids_D[counts_D >= min_count]
            num_rare[space] = len(ids_D) - len(made._frequent[space])
        return made, num_rare

    def like(self) -> Vocabulary:
        """One that keeps the same ids, and has met nothing."""
        made = Vocabulary(self._tallies)
        made._frequent = self._frequent
        return made

    def ids(self, space: str, keys: pa.StringArray) -> pa.Int64Array:
        """[R] ids; null stays null.

        Raises:
            InputError: two keys have one id.
        """
        encoded = keys.dictionary_encode()
        indices = encoded.indices
        missing_R = indices.is_null().to_numpy(zero_copy_only=False)
        indices_R = indices.fill_null(0).to_numpy()
        if not len(encoded.dictionary):
            return pa.nulls(len(keys), pa.int64())
        ids_D, checks_D = ids_and_checks(space, encoded.dictionary)
        self._remember_odd(space, encoded.dictionary)
        counts_D = np.bincount(indices_R[~missing_R], minlength=len(ids_D))
        try:
            self._tallies[space].add(ids_D, checks_D, counts_D)
        except IdCollisionError as error:
            raise _collision(space, error) from error
        return pa.array(self._written(space, ids_D)[indices_R], mask=missing_R)

    def merge(self, other: Vocabulary) -> None:
        """Add what another has met, of rows that come after those of this one.

        Raises:
            InputError: two keys have one id. It may come with a later call.
        """
        for space, tally in other._tallies.items():
            try:
                self._tallies[space].add(tally.ids_D, tally.checks_D, tally.counts_D)
            except IdCollisionError as error:
                raise _collision(space, error) from error
            self._has_rare[space] |= other._has_rare[space]
            for id_, keys in list(other._odd[space].items())[: _MOST_ODD - len(self._odd[space])]:
                self._odd[space].setdefault(id_, keys)

    def num_ids(self) -> dict[str, int]:
        """Distinct ids that `ids` has given, by space.

        Raises:
            InputError: two keys have one id, or one has the id that stands for null or for rare ids.
        """
        all_ids = []
        num_ids = {}
        for space, tally in self._tallies.items():
            ids_D, _ = self._tallied(space, tally)
            all_ids += [ids_D, np.array([null_id(space), rare_id(space)])]
            num_ids[space] = (
                len(self._frequent[space]) + self._has_rare[space] if space in self._frequent else len(ids_D)
            )
        ids = np.sort(np.concatenate(all_ids)) if all_ids else np.zeros(0, np.int64)
        if (again := ids[1:] == ids[:-1]).any():
            raise InputError(
                f"two ids of different spaces have the same 64 bits, {ids[1:][again][0]}; name one of the "
                f"spaces ({', '.join(self._tallies)}) otherwise"
            )
        return num_ids

    def written_in_two_ways(self) -> dict[str, tuple[int, str, str]]:
        """By space, how many keys differ from others only in leading zeros or `.0`, and an example."""
        found = {}
        for space, odd in self._odd.items():
            ids_D, _ = self._tallied(space, self._tallies[space])
            both = np.intersect1d(np.array([*odd], dtype=np.int64), ids_D)
            if len(both):
                found[space] = (len(both), *odd[int(both[0])])
        return found

    def _remember_odd(self, space: str, keys: pa.StringArray) -> None:
        odd, room = self._odd[space], _MOST_ODD - len(self._odd[space])
        if room <= 0:
            return
        keys = keys.filter(pc.match_substring_regex(keys, _ODD))[:room]
        plain = plain_spelling(keys)
        ids, _ = ids_and_checks(space, plain)
        for id_, key, without in zip(ids.tolist(), keys.to_pylist(), plain.to_pylist(), strict=True):
            odd.setdefault(id_, (key, without))

    def _written(self, space: str, ids_D: Int64Array) -> Int64Array:
        frequent = self._frequent.get(space)
        if frequent is None:
            return ids_D
        kept_D = np.zeros(len(ids_D), dtype=bool)
        if len(frequent):
            indices_D = np.minimum(np.searchsorted(frequent, ids_D), len(frequent) - 1)
            kept_D = frequent[indices_D] == ids_D
        self._has_rare[space] |= not kept_D.all()
        return np.where(kept_D, ids_D, rare_id(space))

    def _tallied(self, space: str, tally: IdTally) -> tuple[Int64Array, Int64Array]:
        try:
            return tally.ids_D, tally.counts_D
        except IdCollisionError as error:
            raise _collision(space, error) from error


def _collision(space: str, error: IdCollisionError) -> InputError:
    return InputError(
        f"two different keys of the space {space!r} have the same 64-bit id {error.id}; find them with "
        "rayrec.samples.impressions.ids.id_of, and write one of them otherwise in the source"
    )
