"""What the trie costs in a beam search: dense top levels against sparse rows alone, and against STATIC's.

A catalog of a million items, four codes of 2,048 each, first codes of Zipf's popularity; rows of 2, beams of
70, as STATIC's authors have them. The model is a table of logits: nearly all that is timed is the decoder.

* `decode-dense-levels`: the same search of a trie with tables of its top levels, and with sparse rows alone;
  the same bits, which is checked.
* `decode-static`: ours against YouTube's `sparse_transition_torch` (arXiv:2602.22647), whose checkout
  `RAYREC_BENCH_STATIC` names (github.com/youtube/static-constraint-decoding); without, it is not measured.
  Theirs has two dense levels, as recommended. Ours normalizes over the codes that lead to an item, theirs
  over all codes, so the two may find other items; that both find distinct items of the catalog is checked.
  On a CPU ours asks no model about prefixes that one item alone has; on a GPU both ask about all.

`RAYREC_BENCH_ROWS` is the number of items, `RAYREC_BENCH_STEPS` that of searches in a window; on the device
`RAYREC_BENCH_DEVICE` (cpu).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.decoding.beam import BeamResult, beam_search
from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.decoding.trie import CodeTrie
from rayrec.platform.arrays import Int64Array
from rayrec.platform.console import log
from rayrec.platform.devices import synchronize
from rayrec.platform.errors import InputError

NUM_ITEMS, NUM_CODES, NUM_LEVELS = 1_000_000, 2_048, 4
ROWS, BEAMS = 2, 70
KINDS = 97
"""Of codes, by the logits that follow them."""
DENSE_TARGET, STATIC_TARGET = 0.9, 1.0
"""On a CPU tables gain nothing in a search, and should cost nothing."""
STATIC = "YouTube's static-constraint-decoding"


def bars(options: BenchOptions) -> list[Bar]:
    device = torch.device(os.environ.get("RAYREC_BENCH_DEVICE", "cpu"))
    codes_IL = catalog(options.rows or NUM_ITEMS)
    logits_KV = torch.from_numpy(
        np.random.default_rng(1).normal(scale=3.0, size=(KINDS, NUM_CODES)).astype(np.float32)
    ).to(device)
    dense, sparse = (Ours(codes_IL, logits_KV, has_tables) for has_tables in (True, False))
    check(dense.search(), codes_IL)
    assert torch.equal(dense.search().items_BW, sparse.search().items_BW)
    assert torch.equal(dense.search().log_probs_BW, sparse.search().log_probs_BW)
    ratios = measured("decode-dense-levels", dense.search, sparse.search, device, options)
    found = [Bar.of("decode-dense-levels", ratios, "the same trie, sparse rows alone", DENSE_TARGET)]
    folder = os.environ.get("RAYREC_BENCH_STATIC")
    if not folder:
        peer = f"{STATIC}: RAYREC_BENCH_STATIC names no checkout of it"
        return [*found, Bar.of("decode-static", [], peer, STATIC_TARGET)]
    static = Static(Path(folder), codes_IL, logits_KV)
    check_codes(static.search().cpu().numpy(), codes_IL)
    ratios = measured("decode-static", dense.search, static.search, device, options)
    return [*found, Bar.of("decode-static", ratios, f"{STATIC}, sparse_transition_torch", STATIC_TARGET)]


def catalog(num_items: int) -> Int64Array:
    """[I, L] distinct tuples, sorted."""
    random = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, NUM_CODES + 1) ** 0.5
    first = random.choice(NUM_CODES, 2 * num_items, p=weights / weights.sum())
    others = random.integers(NUM_CODES, size=(2 * num_items, NUM_LEVELS - 1))
    codes = np.unique(np.column_stack([first, others]), axis=0)
    chosen = np.sort(random.choice(len(codes), min(num_items, len(codes)), replace=False))
    return codes[chosen]


class Ours:
    """A search of the trie."""

    def __init__(self, codes_IL: Int64Array, logits_KV: Tensor, has_tables: bool) -> None:
        self._trie = CodeTrie.from_codes(codes_IL).to(logits_KV.device)
        self._logits_KV = logits_KV
        if not has_tables:
            self._trie.__dict__["child_tables"] = (None,) * self._trie.depth

    @torch.inference_mode()
    def search(self) -> BeamResult:
        return beam_search(ItemDistribution(self._step, self._trie, ROWS), BEAMS)

    def _step(self, depth: int, codes_BWd: Tensor, parent_BW: Tensor | None) -> Tensor:
        if depth == 0:
            return self._logits_KV[:1].expand(len(codes_BWd), 1, -1)
        return self._logits_KV[codes_BWd[:, :, -1] % KINDS]


class Static:
    """The same by the peer, which is imported from its checkout."""

    def __init__(self, folder: Path, codes_IL: Int64Array, logits_KV: Tensor) -> None:
        """
        Raises:
            InputError: there is no such package.
        """
        sys.path.insert(0, str(folder))
        try:
            from static_decoding import csr_utils, decoding_pt
        except ImportError as error:
            raise InputError(
                f"RAYREC_BENCH_STATIC: {folder} is no checkout of {STATIC} ({error}); clone "
                "github.com/youtube/static-constraint-decoding and name its folder"
            ) from error
        finally:
            sys.path.remove(str(folder))
        self._device = logits_KV.device
        packed, offsets, self._branches, *dense = csr_utils.build_static_index(codes_IL, NUM_CODES, 2)
        self._tensors = [torch.from_numpy(each).to(self._device) for each in (packed, offsets, *dense)]
        self._search, self._model = decoding_pt.sparse_transition_torch, _Model(logits_KV)

    def search(self) -> Tensor:
        """[B, W, L] codes."""
        packed, offsets, start, mask, states = self._tensors
        found: Tensor = self._search(
            self._model,
            ROWS,
            BEAMS,
            BEAMS,
            0,
            NUM_LEVELS,
            NUM_CODES,
            tuple(map(int, self._branches)),
            packed,
            offsets,
            start,
            mask,
            states,
            self._device,
        )
        return found


class _Model(nn.Module):
    def __init__(self, logits_KV: Tensor) -> None:
        super().__init__()
        self._logits_KV = logits_KV

    def forward(self, tokens_N1: Tensor) -> Tensor:
        return self._logits_KV[tokens_N1 % KINDS]


def check(found: BeamResult, codes_IL: Int64Array) -> None:
    assert bool((found.num_valid_B == BEAMS).all()), "every beam is an item"
    check_codes(codes_IL[found.items_BW.cpu().numpy()], codes_IL)


def check_codes(codes_BWL: Any, codes_IL: Int64Array) -> None:
    """Distinct items of the catalog."""
    known = np.ascontiguousarray(codes_IL).view([("", codes_IL.dtype)] * codes_IL.shape[1]).ravel()
    for codes_WL in codes_BWL.astype(codes_IL.dtype):
        assert len(np.unique(codes_WL, axis=0)) == len(codes_WL), "an item twice"
        named = np.ascontiguousarray(codes_WL).view(known.dtype).ravel()
        assert np.isin(named, known).all(), "codes of no item"


def measured(
    name: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    device: torch.device,
    options: BenchOptions,
) -> list[float]:
    def rate(search: Callable[[], object]) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(options.steps):
            search()
        synchronize(device)
        return options.steps / (time.perf_counter() - started)

    def show(a: float, b: float) -> None:
        log.print(f"{name}: {1e3 / a:.2f} ms, peer {1e3 / b:.2f}, ratio {a / b:.2f}", highlight=False)

    interleaved(lambda: rate(ours), lambda: rate(peer), repeats=1)  # thrown away
    return interleaved(lambda: rate(ours), lambda: rate(peer), options.pairs, show)
