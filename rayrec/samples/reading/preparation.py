"""Row groups that are decoded and have gone through a run's operations, once: the next time from local disk.

A run that is started again, and every epoch behind the first, reads what the operations made.
"""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa

from rayrec.samples.base.keys import row_keys
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.reading.decoding import DecodedGroup, GroupDecoder, Preparation, ReadSpec, RowGroup
from rayrec.samples.reading.prepared_cache import PreparedCache, cache_key

_ROW_COLUMN = "__row"
"""Column of a cache entry, besides the program's: row numbers in the file."""


class PreparedGroups:
    """RowGroup -> DecodedGroup with the program's columns; may be called by several threads at once."""

    def __init__(self, spec: ReadSpec, decoder: GroupDecoder, preparation: Preparation) -> None:
        self._spec = spec
        self._decoder = decoder
        self._preparation = preparation
        self._fingerprint = preparation.program.fingerprint
        self._of_thread = threading.local()

    def decode(self, group: RowGroup) -> DecodedGroup:
        """The prepared rows of a row group, from the cache if they are there.

        Raises:
            InputError: an operation refuses a row; or as `GroupDecoder.decode`.
            CorruptGroupError: as `GroupDecoder.decode`.
        """
        rows = self._cache().get_or_make(self._key(group), lambda: self._make(group))
        *columns, row_G = rows.columns
        return DecodedGroup(group, columns, row_G.to_numpy())

    def _cache(self) -> PreparedCache:
        if not hasattr(self._of_thread, "cache"):  # one is for one thread, its folder for any number
            preparation = self._preparation
            self._of_thread.cache = PreparedCache(preparation.folder, preparation.max_bytes)
        cache: PreparedCache = self._of_thread.cache
        return cache

    def _key(self, group: RowGroup) -> str:
        spec = self._spec
        file = [spec.folder.url, group.name, group.size, group.version]
        # The file's number: it is part of its rows' keys, and these seed random numbers.
        index = [group.file, group.group, group.first_row]
        return cache_key(file, index, repr(spec.filters), self._fingerprint, self._preparation.seed)

    def _make(self, group: RowGroup) -> pa.RecordBatch:
        decoded = self._decoder.decode(group)
        rows = pa.RecordBatch.from_arrays(decoded.columns, schema=self._spec.schema)
        keys_G = row_keys(np.full(len(decoded.row_G), group.file), decoded.row_G)
        made = self._preparation.program(rows, RowContext(keys_G, self._preparation.seed, step=0))
        return made.append_column(_ROW_COLUMN, pa.array(decoded.row_G))
