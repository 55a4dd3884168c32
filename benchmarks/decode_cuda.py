"""How long a large language model takes to rank a catalog on a GPU: one history, beams of 256, three codes.

A network in the shape of Qwen3-1.7B (28 layers of width 2,048, 16 query and 8 key heads of 128), random
weights in bfloat16; three levels of 8,192 codes and a million items. For contexts of 1,000 and 5,000 tokens
it prints the median time of reading the history, of the beam search, and of both, over some repetitions with
other histories. There is no bar: `generate` of transformers would hold a copy of the context for every beam,
more than a GPU's memory.

Needs torch, numpy and transformers alone; `python -m benchmarks.gpu` runs it too:

    python -m benchmarks.decode_cuda
    python -m benchmarks.decode_cuda --device cpu --small      # checks the program itself
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.gpu_piece import device_and_size
from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.decoding.beam import BeamResult, beam_search
from rayrec.models.decoding.prefixes import ItemDistribution
from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generative.causal_lm import CausalLmBackbone, KeyValueContext
from rayrec.models.language.networks import Wanted, network_from_settings
from rayrec.models.sequence.tensor_batch import TensorBatch

BEAMS = 256
CONTEXTS = (1_000, 5_000)
REPEATS = 10
WARM_UP = 3
QWEN3_1_7B = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
}
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 256}
SMALL_CONTEXTS = (100, 500)


def measure(
    device: torch.device,
    settings: dict[str, object],
    num_items: int,
    num_codes: int,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
) -> list[dict[str, float]]:
    """Time a network of these settings; per context, medians in milliseconds and the worst of both parts."""
    level_sizes = (num_codes,) * 3
    random = np.random.default_rng(0)
    codes_IL = np.unique(random.integers(num_codes, size=(num_items, len(level_sizes))), axis=0)
    longest = max(contexts) // len(level_sizes) + 1
    with device:
        network = network_from_settings(settings, sum(level_sizes), Wanted((longest + 1) * len(level_sizes)))
    backbone = CausalLmBackbone(network, torch.from_numpy(codes_IL).to(device), level_sizes, first_token=0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    backbone = backbone.to(device, dtype).eval()
    trie = CodeTrie.from_codes(codes_IL).to(device)
    return [
        _measure_context(backbone, trie, num_tokens // len(level_sizes), random, repeats)
        for num_tokens in contexts
    ]


@torch.inference_mode()
def _measure_context(
    backbone: CausalLmBackbone,
    trie: CodeTrie,
    num_events: int,
    random: np.random.Generator,
    repeats: int,
) -> dict[str, float]:
    device = trie.device

    def batch() -> TensorBatch:
        layout = JaggedLayout.from_offsets(np.array([0, num_events]), device)
        items_N = torch.from_numpy(random.integers(trie.num_items, size=num_events)).to(device)
        return TensorBatch(layout, torch.zeros_like(items_N), items_N, None, None, {}, {})

    def read() -> KeyValueContext:
        return backbone.encode_context(histories.pop())

    def search() -> BeamResult:
        return beam_search(ItemDistribution(backbone.start(contexts.pop()), trie, num_rows=1), BEAMS)

    histories, contexts, seconds = [], [], {"history": [], "beams": []}
    for _ in range(WARM_UP + repeats):
        histories.append(batch())
        for name, work in (("history", read), ("beams", search)):
            result, elapsed = _timed(device, work)
            seconds[name].append(elapsed)
            if isinstance(result, KeyValueContext):
                contexts.append(result)
            else:
                assert bool((result.num_valid_B == BEAMS).all()), "every beam is an item"
    both = [a + b for a, b in zip(*seconds.values(), strict=True)][WARM_UP:]
    history, beams = (1e3 * statistics.median(seconds[name][WARM_UP:]) for name in seconds)
    figures = {
        "context_tokens": num_events * trie.depth,
        "history_ms": history,
        "beams_ms": beams,
        "both_ms": 1e3 * statistics.median(both),
        "worst_ms": 1e3 * max(both),
    }
    print(
        f"context of {num_events * trie.depth} tokens, {BEAMS} beams, {trie.depth} codes: "
        f"history {history:.1f} ms, beams {beams:.1f} ms, "
        f"both {figures['both_ms']:.1f} ms (worst of {len(both)}: {figures['worst_ms']:.1f})",
        file=sys.stderr,
        flush=True,
    )
    return figures


def _timed(device: torch.device, work: Callable[[], object]) -> tuple[object, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def main() -> None:
    device, is_small = device_and_size(__doc__)
    if is_small:
        found = measure(device, QWEN3_1_7B | SMALL, 20_000, 256, SMALL_CONTEXTS, repeats=2)
    else:
        found = measure(device, QWEN3_1_7B, 1_000_000, 8_192)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
