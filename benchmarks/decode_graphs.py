"""What recorded kernels save a large language model on a GPU: recommendations with graphs on and off.

The network, catalog and contexts of `benchmarks.decode_cuda`: Qwen3-1.7B's shape, random weights in bfloat16,
256 beams, three codes, a million items, items of the history left out. Off: `recommend` as it is, kernel by
kernel. On: the same of the padded batch, recorded once per bucket (`compiled_ranking.captured`) and replayed.
Both from inputs in the host's memory to items there, in turns, other histories each time; medians in
milliseconds. Before that, answers are compared:

* `same_bits`: the recording gives the bits of the padded batch that it repeats;
* `padded_overlap`: of a history that is shorter than the bucket by a tenth, the share of items that eager
  ranking without padding gives, too, and the largest difference of a score. Kernels of other shapes add in
  another order, and bfloat16 has ties.

Needs torch, numpy, transformers, pydantic and PyYAML; `python -m benchmarks.gpu` runs it too:

    python -m benchmarks.decode_graphs
    python -m benchmarks.decode_graphs --device cpu --small    # a stand-in records: checks the program itself
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode_cuda import BEAMS, CONTEXTS, QWEN3_1_7B, SMALL, SMALL_CONTEXTS
from benchmarks.gpu_piece import device_and_size
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.models.compiled_ranking.captured import CapturedRun
from rayrec.models.compiled_ranking.inputs import Signature
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.causal_lm import CausalLmBackbone
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.language.networks import Wanted, network_from_settings
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.devices import device_memory, device_of, synchronize
from rayrec.platform.graphs import Graphs, graphs_of

REPEATS, WARM_UP = 10, 3
SHORTER = 0.9


def recommender(
    device: torch.device, settings: dict[str, object], num_items: int, num_codes: int, longest: int
) -> GenerativeRecommender:
    """A network of these settings with a catalog of random codes.

    Args:
        longest: history, in events.
    """
    level_sizes = (num_codes,) * 3
    random = np.random.default_rng(0)
    codes_IL = np.unique(random.integers(num_codes, size=(num_items, len(level_sizes))), axis=0)
    with device:
        network = network_from_settings(settings, sum(level_sizes), Wanted((longest + 2) * len(level_sizes)))
    codes = torch.from_numpy(codes_IL).to(device)
    backbone = CausalLmBackbone(network, codes, level_sizes, first_token=0)
    dtype = torch.bfloat16 if device_of(device).has_own_memory else torch.float32
    model = GenerativeRecommender(
        backbone.to(device, dtype),
        codes,
        BEAMS,
        len(level_sizes),
        trie=CodeTrie.from_codes(codes_IL).to(device),
    )
    return model.eval()


class Comparison:
    """Graphs on and off, for histories of up to so many events."""

    def __init__(
        self, model: GenerativeRecommender, graphs: Graphs, num_events: int, random: np.random.Generator
    ) -> None:
        self._model, self._random, self._num_events = model, random, num_events
        self._device = model.codes_IL.device
        self._signature, self.bucket = Signature(num_events), Bucket(1, num_events, BEAMS)
        before = self._allocated()
        started = time.perf_counter()
        self._run = CapturedRun(model, self._signature, self.bucket, self._device, graphs)
        synchronize(self._device)
        self.recorded_in_s = time.perf_counter() - started
        self.memory_mib = (self._allocated() - before) / 2**20

    def _allocated(self) -> int:
        found = device_memory(self._device)
        return 0 if found is None else found.allocated

    def history(self, num_events: int) -> np.ndarray:
        return self._random.integers(self._model.trie.num_items, size=num_events)

    def off(self, history: np.ndarray) -> tuple[Tensor, Tensor]:
        """Kernel by kernel."""
        layout = JaggedLayout.from_offsets(np.array([0, len(history)]), self._device)
        items_N = torch.from_numpy(history).to(self._device)
        batch = TensorBatch(layout, torch.zeros_like(items_N), items_N, None, None, {}, {})
        found = self._model.recommend(batch, BEAMS, items_N[None], [BEAMS])
        return found.items_BK.cpu(), found.scores_BK.cpu()

    def on(self, history: np.ndarray) -> tuple[Tensor, Tensor]:
        """Replayed."""
        items, scores = self._run([], self._inputs(history))
        return items.cpu(), scores.cpu()

    def padded(self, history: np.ndarray) -> tuple[Tensor, Tensor]:
        """What is recorded, kernel by kernel."""
        inputs = [each.to(self._device) for each in self._inputs(history)]
        batch, excluded_BE = self._signature.batch(self.bucket, inputs)
        found = self._model.recommend(batch, BEAMS, excluded_BE, [BEAMS])
        return found.items_BK.cpu(), found.scores_BK.cpu()

    def _inputs(self, history: np.ndarray) -> list[Tensor]:
        items = np.zeros((1, self._num_events), dtype=np.int64)
        excluded = np.full((1, self._num_events), -1, dtype=np.int64)
        items[0, : len(history)], excluded[0, : len(history)] = history, history
        return [torch.tensor([len(history)]), torch.from_numpy(items), torch.from_numpy(excluded)]

    def equality(self) -> dict[str, float | bool]:
        """Whether both give the same.

        Raises:
            AssertionError: the recording finds other items than what it repeats.
        """
        same_bits = True
        for num_events in (self._num_events, int(SHORTER * self._num_events)):
            history = self.history(num_events)
            recorded, repeated = self.on(history), self.padded(history)
            same_bits &= all(map(torch.equal, recorded, repeated))
            overlap = _overlap(recorded[0], repeated[0])
            assert overlap > 0.99, f"the recording has {overlap:.3f} of the items of what it repeats"
        eager = self.off(history)
        return {
            "same_bits": same_bits,
            "padded_overlap": _overlap(recorded[0], eager[0]),
            "padded_score_difference": float((recorded[1] - eager[1]).abs().max()),
        }


def _overlap(items: Tensor, other: Tensor) -> float:
    return len(set(items.flatten().tolist()) & set(other.flatten().tolist())) / items.numel()


@torch.inference_mode()
def measure(
    model: GenerativeRecommender, graphs: Graphs, contexts: Sequence[int], repeats: int
) -> list[dict[str, float | bool]]:
    """Per context: medians with graphs off and on, what recording took, and how equal answers are."""
    random = np.random.default_rng(1)
    found = []
    for num_tokens in contexts:
        comparison = Comparison(model, graphs, num_tokens // model.trie.depth, random)
        figures = comparison.equality()
        seconds: dict[str, list[float]] = {"off": [], "on": []}
        for _ in range(WARM_UP + repeats):
            history = comparison.history(comparison.bucket.length)
            for name, work in (("off", comparison.off), ("on", comparison.on)):
                seconds[name].append(_timed(model.codes_IL.device, work, history))
        off, on = (1e3 * statistics.median(seconds[name][WARM_UP:]) for name in seconds)
        figures |= {
            "context_tokens": comparison.bucket.length * model.trie.depth,
            "off_ms": off,
            "on_ms": on,
            "worst_on_ms": 1e3 * max(seconds["on"][WARM_UP:]),
            "times": off / on,
            "recorded_in_s": comparison.recorded_in_s,
            "recording_mib": comparison.memory_mib,
        }
        found.append(figures)
        print(
            f"context of {figures['context_tokens']} tokens, {BEAMS} beams: graphs off {off:.1f} ms, "
            f"on {on:.1f} ms, same bits {figures['same_bits']}",
            file=sys.stderr,
            flush=True,
        )
    return found


def _timed(
    device: torch.device, work: Callable[[np.ndarray], tuple[Tensor, Tensor]], history: np.ndarray
) -> float:
    synchronize(device)
    started = time.perf_counter()
    work(history)
    return time.perf_counter() - started


def main() -> None:
    device, is_small = device_and_size(__doc__)
    graphs = graphs_of(device)
    if graphs is None:
        from tests.helpers.recorded_graphs import RecordingGraphs  # a dry run

        graphs = RecordingGraphs()
    contexts = SMALL_CONTEXTS if is_small else CONTEXTS
    settings = QWEN3_1_7B | SMALL if is_small else QWEN3_1_7B
    sizes = (20_000, 256) if is_small else (1_000_000, 8_192)
    model = recommender(device, settings, *sizes, longest=max(contexts) // 3)
    print(json.dumps(measure(model, graphs, contexts, repeats=2 if is_small else REPEATS)))


if __name__ == "__main__":
    main()
