"""How fast the embedded engine answers on a GPU: some requests at once, against `generate` of transformers.

A network of the shape of Qwen2.5-0.5B, random weights in bfloat16, prompts of 128 tokens and answers of 128,
greedy. For 1, 8 and 32 requests at once it prints tokens per second of the engine, and the median time to a
first token and from one to the next, as the engine's own metrics have them; of `generate`, which answers one
request after the other, the same. The engine here is alone: HTTP and the gateway add to that.

Before that, a small network in float32 answers by both: the tokens have to be equal, of all prompts.

Needs torch, numpy, transformers, pydantic, PyYAML and prometheus-client, and no Ray; `python -m
benchmarks.gpu` runs it too:

    python -m benchmarks.language_serve_cuda
    python -m benchmarks.language_serve_cuda --device cpu --small      # checks the program itself
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_piece import device_and_size
from benchmarks.language_tune_cuda import QWEN2_5_0_5B, QWEN_TOKENS, SMALL, SMALL_TOKENS
from rayrec.models.generation.sampler import Sampling
from rayrec.models.language.networks import Wanted, network_from_settings
from rayrec.platform.devices import device_of, synchronize
from rayrec.serve.language.config import EmbeddedModel
from rayrec.serve.language.engine import EmbeddedEngine, Prompt

EQUAL_PROMPTS, EQUAL_NEW = 8, 24


@dataclass(frozen=True)
class Sizes:
    """What answers, and what is asked."""

    settings: Mapping[str, object]
    num_tokens: int
    prompt: int
    new: int
    """Tokens of an answer."""
    at_once: tuple[int, ...]
    in_turns: int
    """Requests that `generate` answers."""
    repeats: int

    @property
    def context(self) -> int:
        return self.prompt + self.new


LARGE = Sizes(QWEN2_5_0_5B, QWEN_TOKENS, 128, 128, at_once=(1, 8, 32), in_turns=4, repeats=3)
# Weights so large that the best token is far from the next: sums in another order do not change it.
TINY = Sizes(
    QWEN2_5_0_5B | SMALL | {"initializer_range": 0.5}, SMALL_TOKENS, 16, 8, (1, 8), in_turns=2, repeats=1
)


class Served:
    """A network behind the engine, and by itself."""

    def __init__(self, device: torch.device, sizes: Sizes, dtype: str, concurrency: int) -> None:
        self._device, self._sizes = device, sizes
        torch.manual_seed(0)
        wanted = Wanted(sizes.context + EQUAL_NEW, "bench", packed=False)
        network: Any = network_from_settings(sizes.settings, sizes.num_tokens, wanted)
        self._network = network.to(device, getattr(torch, dtype)).eval()
        self._network.set_attn_implementation("sdpa")
        settings = EmbeddedModel.parse(
            {
                "name": "bench",
                "folder": ".",  # of which nothing is read: the network is there
                "device": device.type,
                "dtype": dtype,
                "context_length": sizes.context + EQUAL_NEW,
                "concurrency": concurrency,
                "prefix_cache_tokens": 0,
            }
        )
        self._settings = settings
        self.first_s: list[float] = []
        self.next_s: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block lasts, the engine answers; not before `generate` has, whose attention an engine of
        transformers 5.17 takes away."""
        # No token ends an answer, so that all are of equal length.
        tokenizer = _tokenizer(self._sizes.num_tokens)
        self._engine = EmbeddedEngine(self._network, tokenizer, (), (), self._settings)
        self._engine.measures.tell(
            lambda which, seconds: (self.first_s if which == "first" else self.next_s).append(seconds)
        )
        self._engine.start()
        try:
            yield
        finally:
            self._engine.stop()

    def generated(self, tokens: Sequence[int], count: int) -> list[int]:
        """By the loop of transformers."""
        ids = torch.tensor([tokens], device=self._device)
        with torch.inference_mode():
            found = self._network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
            )
        answer: list[int] = found[0, len(tokens) :].tolist()
        return answer

    def answers(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """By the engine, all at once."""

        async def one(tokens: Sequence[int]) -> list[int]:
            asked = Prompt(tokens, count, Sampling(temperature=0))
            return [chosen.token async for piece in self._engine.submit(asked) for chosen in piece.tokens]

        async def together() -> list[list[int]]:
            return list(await asyncio.gather(*map(one, prompts)))

        return asyncio.run(together())

    def of_generate(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Figures of one answer after the other."""
        count = self._sizes.new
        self.generated(prompts[0], count)
        first_s, all_s = ([self._generate_s(tokens, most) for tokens in prompts] for most in (1, count))
        return {
            "tokens_per_s": count * len(prompts) / sum(all_s),
            "first_token_ms": 1e3 * statistics.median(first_s),
            "next_token_ms": 1e3
            * (statistics.median(all_s) - statistics.median(first_s))
            / max(count - 1, 1),
        }

    def _generate_s(self, tokens: Sequence[int], count: int) -> float:
        synchronize(self._device)
        started = time.perf_counter()
        self.generated(tokens, count)
        return time.perf_counter() - started

    def of_engine(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Figures of answers that are asked for at once."""
        self.answers(prompts, self._sizes.new)
        self.first_s.clear()
        self.next_s.clear()
        seconds = []
        for _ in range(self._sizes.repeats):
            started = time.perf_counter()
            self.answers(prompts, self._sizes.new)
            seconds.append(time.perf_counter() - started)
        return {
            "tokens_per_s": self._sizes.new * len(prompts) / statistics.median(seconds),
            "first_token_ms": 1e3 * statistics.median(self.first_s),
            "next_token_ms": 1e3 * statistics.median(self.next_s),
        }


def _tokenizer(num_tokens: int) -> Any:
    """Of as many words as there are tokens."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"w{number}": number for number in range(num_tokens)}, unk_token="w0"))


def prompts_of(sizes: Sizes, count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(sizes.num_tokens, size=sizes.prompt).tolist() for _ in range(count)]


def equal_answers(device: torch.device) -> int:
    """How many prompts a small network answers in the same way by both.

    Raises:
        SystemExit: not all.
    """
    served = Served(device, TINY, "float32", concurrency=EQUAL_PROMPTS)
    # Of several lengths, so that they are read and written side by side.
    prompts = [tokens[: 2 + 2 * place] for place, tokens in enumerate(prompts_of(TINY, EQUAL_PROMPTS))]
    expected = [served.generated(tokens, EQUAL_NEW) for tokens in prompts]
    with served.running():
        found = served.answers(prompts, EQUAL_NEW)
    equal = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    if equal < len(prompts):
        raise SystemExit(f"the engine answers {equal} of {len(prompts)} prompts as generate does")
    return equal


def measure(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """All figures."""
    equal = equal_answers(device)
    most = max(sizes.at_once)
    dtype = "bfloat16" if device_of(device).has_own_memory else "float32"
    served = Served(device, sizes, dtype, concurrency=most)
    prompts = prompts_of(sizes, most)
    found = {"generate": served.of_generate(prompts[: sizes.in_turns])}
    with served.running():
        for count in sizes.at_once:
            found[f"engine_{count}"] = served.of_engine(prompts[:count])
    for name, figures in found.items():
        said = f"{figures['tokens_per_s']:,.0f} tokens/s, first token {figures['first_token_ms']:.1f} ms"
        print(f"{name}: {said}", file=sys.stderr, flush=True)
    slowest = found["generate"]["tokens_per_s"]
    return {
        "equal_answers": equal,
        "prompt_tokens": sizes.prompt,
        "answer_tokens": sizes.new,
        **found,
        "times_as_fast_as_generate": {
            name: figures["tokens_per_s"] / slowest for name, figures in found.items()
        },
    }


def main() -> None:
    device, is_small = device_and_size(__doc__)
    print(json.dumps(measure(device, TINY if is_small else LARGE)))


if __name__ == "__main__":
    main()
