"""How fast items come out of a language model: our decoder against `generate` of Hugging Face transformers.

The same network with the same weights on both sides: Qwen3-shaped, 4 layers of width 256, float32, random
weights made large, so that what follows depends on the history and scores differ. Beams of 50 over the
semantic IDs of a catalog; a history enters as the codes of its items. Bars, ratios of rows per second:

* `decode-batch-32`: 32 histories at once.
* `decode-batch-1`: one at a time, as a request comes.
* `decode-dense-levels` and `decode-static`: the trie alone, see `benchmarks.decode_trie`.

The peer is given what it can use: `prefix_allowed_tokens_fn` looks its answer up in one dict of tensors made
before; `renormalize_logits`, so that it means the same probabilities; a cache; SDPA attention; inference
mode. Both sides have one thread, as a replica has beside others. The peer pads the histories of a batch and
reads each of them once per beam: it expands its input before its first forward pass, and `generate` has no
way around that. Ours asks the network about no code that is certain; the results are the same.

Both sides decode the same histories, none of them twice. Before anything is timed, their items and scores are
compared: scores have to agree to 1e-4, items wherever scores do not tie with another within that.

`RAYREC_BENCH_DATA` names a prepared data set with semantic IDs; without one, the catalog is synthetic, of
the size of Amazon Beauty's: 12,101 items, three levels of 256 codes and a digit. Lengths of histories are
drawn as they are there: 4 to 50 items, half of them no longer than 5, 8 in the mean.
`RAYREC_BENCH_STEPS` is the number of single histories in a window; a batch of 32 is a window of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import decode_trie
from benchmarks.generate_peer import GeneratePeer
from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.decoding.beam import BeamResult, beam_search
from rayrec.models.generative.causal_lm_config import CausalLmConfig
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.console import log
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.features.features import SequenceFeatures

BEAMS = 50
TARGETS = {32: 20.0, 1: 8.0}
"""Batch size to what is claimed."""
NUM_ITEMS, LEVEL_SIZES = 12_101, (256, 256, 256, 24)
"""Of Amazon Beauty's semantic IDs."""
MIN_LENGTH, MAX_LENGTH, LENGTH_EXPONENT = 4, 50, 1.5
TOLERANCE = 1e-4
PEER = "transformers generate(), prefix_allowed_tokens_fn"

Histories = list[Int64Array]


def bench(options: BenchOptions) -> list[Bar]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_of_language_model(options), *decode_trie.bars(options)]
    finally:
        torch.set_num_threads(before)


def _of_language_model(options: BenchOptions) -> list[Bar]:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        peer = f"transformers, which is not installed ({error}): pip install 'rayrec[hf]'"
        return [Bar.of(f"decode-batch-{size}", [], peer, target) for size, target in TARGETS.items()]
    return _bars(options)


def _bars(options: BenchOptions) -> list[Bar]:
    codes_IL, level_sizes = catalog(options)
    model = recommender(codes_IL, level_sizes)
    ours, peer = Ours(model, codes_IL), Peer(model)
    check_same_results(ours, peer, HistoryDraws(len(codes_IL), seed=1), sizes=tuple(TARGETS))
    bars = []
    for size, target in TARGETS.items():
        num_batches = options.steps if size == 1 else 1
        ratios = _ratios(f"decode-batch-{size}", ours, peer, size, num_batches, options)
        bars.append(Bar.of(f"decode-batch-{size}", ratios, PEER, target))
    return bars


def catalog(options: BenchOptions) -> tuple[Int64Array, tuple[int, ...]]:
    """([I, L] codes of the items, codes of each level)."""
    if options.data is not None:
        registry = SemanticIdRegistry.load(options.data / SEMANTIC_IDS_FOLDER)
        return registry.codes_IL.astype(np.int64), registry.level_sizes
    return synthetic_codes(), LEVEL_SIZES


def synthetic_codes() -> Int64Array:
    """[I, L] with a few hundred tuples that several items share but for the digit."""
    random = np.random.default_rng(0)
    popular = 1.0 / np.arange(1, 257) ** 0.7
    columns = [random.choice(size, NUM_ITEMS, p=popular / popular.sum()) for size in LEVEL_SIZES[:-1]]
    _, tuple_I = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    order_I = np.argsort(tuple_I, kind="stable")
    starts_I = np.flatnonzero(np.diff(tuple_I[order_I], prepend=-1))
    digit_I = np.empty(NUM_ITEMS, dtype=np.int64)
    digit_I[order_I] = np.arange(NUM_ITEMS) - np.repeat(starts_I, np.diff(starts_I, append=NUM_ITEMS))
    assert digit_I.max() < LEVEL_SIZES[-1]
    return np.stack([*columns, digit_I], axis=1)


def recommender(
    codes_IL: Int64Array, level_sizes: tuple[int, ...], dim: int = 256, num_layers: int = 4
) -> GenerativeRecommender:
    network = {
        "kind": "qwen3",
        "dim": dim,
        "num_layers": num_layers,
        "num_heads": 4,
        "num_key_heads": 2,
        "feedforward_dim": 3 * dim,
    }
    config = CausalLmConfig.parse(
        {"name": "causal_lm", "backbone": {"network": network, "max_length": MAX_LENGTH}}
    )
    model = build_model(config, Catalog(len(codes_IL), codes_IL, level_sizes), seed=0)
    assert isinstance(model, GenerativeRecommender)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval()


class HistoryDraws:
    """Batches of histories, none of which comes twice."""

    def __init__(self, num_items: int, seed: int) -> None:
        self._num_items = num_items
        self._seed = seed
        self._next = itertools.count()
        weights = 1.0 / np.arange(1, MAX_LENGTH - MIN_LENGTH + 2) ** LENGTH_EXPONENT
        self._length_probabilities = weights / weights.sum()

    def draw(self, size: int) -> Histories:
        """Catalog positions."""
        random = np.random.default_rng([self._seed, next(self._next)])
        lengths = random.choice(
            np.arange(MIN_LENGTH, MAX_LENGTH + 1), size=size, p=self._length_probabilities
        )
        return [random.integers(self._num_items, size=length) for length in lengths]


class Ours:
    """From histories to items, features included."""

    def __init__(self, model: GenerativeRecommender, codes_IL: Int64Array) -> None:
        self._model = model
        self._features = SequenceFeatures(np.arange(len(codes_IL)), max_length=MAX_LENGTH, tables=())

    @torch.inference_mode()
    def decode(self, histories: Histories) -> BeamResult:
        batch = self._batch(histories)
        context = self._model.backbone.encode_context(batch)
        return beam_search(self._model.distribution(context), BEAMS)

    def _batch(self, histories: Histories) -> TensorBatch:
        offsets_B1 = np.cumsum([0, *map(len, histories)])
        keys_B = np.arange(len(histories))
        samples = SampleBatch(0, keys_B, keys_B, np.concatenate(histories), offsets_B1)
        return TensorBatch.build(self._features.ranking(samples), {}, 0, torch.device("cpu"), training=False)


class Peer(GeneratePeer):
    """The same network, as `transformers` would have it used."""

    @torch.inference_mode()
    def decode(self, histories: Histories, with_scores: bool = False) -> Any:
        return self.generate(
            histories,
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            length_penalty=0.0,  # a score is the log-probability of the item
            do_sample=False,
            return_dict_in_generate=with_scores,
            output_scores=with_scores,
        )

    def ranked(self, histories: Histories) -> tuple[Int64Array, Float64Array]:
        """([B, W] items, [B, W] scores), best first."""
        found = self.decode(histories, with_scores=True)
        scores_BW = found.sequences_scores.double().numpy().reshape(len(histories), BEAMS)
        return self.items(found.sequences, len(histories)), scores_BW


def check_same_results(ours: Ours, peer: Peer, draws: HistoryDraws, sizes: Sequence[int]) -> None:
    """Both sides find the same items with the same scores, or nothing is worth timing."""
    for size in sizes:
        histories = draws.draw(size)
        found = ours.decode(histories)
        items_BW, scores_BW = found.items_BW.numpy(), found.log_probs_BW.double().numpy()
        peer_items_BW, peer_scores_BW = peer.ranked(histories)
        worst = np.abs(scores_BW - peer_scores_BW).max()
        assert worst <= TOLERANCE, f"scores of the two sides differ by {worst}"
        for row in range(size):
            # The last of a beam may tie with one that has been left out.
            is_clear_W = scores_BW[row] > scores_BW[row, -1] + TOLERANCE
            is_clear_W[1:] &= -np.diff(scores_BW[row]) > TOLERANCE
            is_clear_W[:-1] &= -np.diff(scores_BW[row]) > TOLERANCE
            assert (items_BW[row] == peer_items_BW[row])[is_clear_W].all(), "the two sides differ in items"
            clear = scores_BW[row] > scores_BW[row, -1] + TOLERANCE
            assert set(items_BW[row, clear].tolist()) <= set(peer_items_BW[row].tolist())


def _ratios(
    name: str, ours: Ours, peer: Peer, size: int, num_batches: int, options: BenchOptions
) -> list[float]:
    draws = HistoryDraws(ours._model.trie.num_items, seed=0)
    windows: list[list[Histories]] = []

    def our_rate() -> float:
        windows.append([draws.draw(size) for _ in range(num_batches)])
        return _rate(ours.decode, windows[-1])

    def show(a: float, b: float) -> None:
        log.print(
            f"{name}: {1e3 * size / a:.1f} ms a batch, peer {1e3 * size / b:.0f}, ratio {a / b:.1f}",
            highlight=False,
        )

    interleaved(our_rate, lambda: _rate(peer.decode, windows[-1]), repeats=1)  # thrown away
    return interleaved(our_rate, lambda: _rate(peer.decode, windows[-1]), options.pairs, show)


def _rate(decode: Callable[[Histories], object], batches: list[Histories]) -> float:
    """Rows per second."""
    started = time.perf_counter()
    for histories in batches:
        decode(histories)
    return sum(map(len, batches)) / (time.perf_counter() - started)
