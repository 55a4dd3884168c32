"""Tuning a language model: packed rows against a padded loop and TRL's packing, and what a snapshot takes.

A small llama on synthetic records of which a few are long, as questions and answers are. Ours is the whole
training loop of `rayrec train --local`, tokens made of texts included; the others get tokens. Rates are of
tokens that are given or learned, without those that pad, and without the first step. Bars:

* `language-padded`: tokens per second over a plain loop over batches padded to their longest row, with
  transformers' own attention and the same optimizer; target 1.5 where mean over longest is at most 0.4.
* `language-trl`: over TRL's trainer, which packs rows by best fit into as many tokens as a batch of ours has.
* `language-lora-snapshot`: 3 % over what a snapshot of adapters and their optimizer has, of what one of all
  weights has, of a network with the shape of SmolLM2-135M.

TRL is not a requirement of anything else: without it (pip install trl), its bar says so. It takes two minutes
a pair.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Bar, BenchOptions, interleaved
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.language.config import LanguageModelConfig
from rayrec.models.language.text_program import TextProgram, TextProgramSpec
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.language import LanguageTask
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.console import log
from rayrec.platform.devices import HOST
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.reading.reader import SampleReader
from rayrec.samples.text.prepare import TextPrepareConfig, prepare_text

ROWS, BATCH, WORDS, LONGEST = 480, 24, 800, 512
NETWORK = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
SMOLLM2_TOKENS, NEW_TOKENS = 49_152, 1024
SNAPSHOT_SHARE = 0.03


def bench(options: BenchOptions) -> list[Bar]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [*_speeds(Path(folder), options), _snapshot_bar()]
    finally:
        torch.set_num_threads(threads)


def _speeds(folder: Path, options: BenchOptions) -> Iterator[Bar]:
    config = _config(folder)
    steps = min(options.steps, ROWS // BATCH * 9 // 10)
    rows = _rows(config, steps)
    lengths_R = np.array([len(row["input_ids"]) for step in rows for row in step])
    log.print(f"language: rows of {lengths_R.mean():.0f} tokens, the longest {lengths_R.max()}")
    ours = _numbered(lambda number: _our_rate(config, folder / f"run-{number}", rows))
    yield Bar.of(
        "language-padded",
        interleaved(ours, lambda: _padded_rate(config, rows), options.pairs, _logged),
        "a padded loop",
        1.5,
    )
    if importlib.util.find_spec("trl") is None:
        yield Bar("language-trl", None, None, "trl is not installed", 0.95, None)
        return
    theirs = _numbered(lambda number: _trl_rate(config, folder / f"trl-{number}", rows))
    yield Bar.of(
        "language-trl", interleaved(ours, theirs, options.pairs, _logged), "TRL, packed by best fit", 0.95
    )


def _logged(ours: float, theirs: float) -> None:
    log.print(f"language: {ours:,.0f} tokens/s against {theirs:,.0f}")


def _numbered(measure: Callable[[int], float]) -> Callable[[], float]:
    calls = iter(range(10**6))
    return lambda: measure(next(calls))


def _config(folder: Path) -> RunConfig:
    """A data set of synthetic records, a tokenizer of whole words, and a run over both."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    generator = np.random.default_rng(5)
    words = [f"w{number}" for number in range(WORDS)]
    vocabulary = {"<end>": 0, "<other>": 1} | {word: number + 2 for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<other>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    lengths_R = np.clip(generator.lognormal(4.2, 0.8, ROWS), 4, LONGEST - 8).astype(int)
    with (folder / "records.jsonl").open("w") as file:
        for length in lengths_R:
            said = generator.choice(words, length)
            half = length // 2
            file.write(
                json.dumps({"prompt": " ".join(said[:half]), "completion": " ".join(said[half:])}) + "\n"
            )
    settings = {"valid_fraction": 0.02, "test_fraction": 0.0, "cleaning": {"near_duplicates": None}}
    prepare_text([folder / "records.jsonl"], folder / "data", TextPrepareConfig.parse(settings))
    return RunConfig.parse(
        {
            "data": {"path": str(folder / "data")},
            "model": {
                "name": "language_model",
                "base": {"kind": "settings", "settings": NETWORK},
                "tokenizer": str(folder / "tokenizer"),
                "max_length": LONGEST,
            },
            "pipeline": {"trainer_threads": 1},
            "training": {
                "batch_size": BATCH,
                "epochs": 1,
                "schedule": {"warmup_steps": 0},
                "optimizer": {"max_grad_norm": None},
            },
            "evaluation": {"answers": 0, "max_users": 1},
        }
    )


def _rows(config: RunConfig, steps: int) -> list[list[dict[str, list[int]]]]:
    """Tokens and labels of each step's batch, as our run has them."""
    assembly = assemble(config)
    reader, found = SampleReader(assembly.plan.spec), []
    for step in range(steps):
        batch = assembly.plan.batch(step)
        assert batch is not None, "there are as many rows as steps need"
        (share,) = assembly.features.training(step, reader.read_batch(batch))
        labels_N = np.where(share.is_target_N, share.tokens_N, -100)
        found.append(
            [
                {"input_ids": share.tokens_N[start:stop].tolist(), "labels": labels_N[start:stop].tolist()}
                for start, stop in pairwise(share.offsets_B1)
            ]
        )
    return found


def _tokens(rows: list[list[dict[str, list[int]]]]) -> int:
    return sum(len(row["input_ids"]) for step in rows for row in step)


def _our_rate(config: RunConfig, run: Path, rows: list[list[dict[str, list[int]]]]) -> float:
    times: list[float] = []
    train(
        config, run, on_step=lambda done, total, loss: times.append(time.perf_counter()), cluster=in_process
    )
    return _tokens(rows[1:]) / (times[len(rows) - 1] - times[0])


def _network(config: RunConfig) -> Any:
    assert isinstance(config.model, LanguageModelConfig)
    task = LanguageTask.open(config, config.model)
    program: Any = task.program(assemble(config).dense_optimizer()).build(
        ProgramPlacement(HOST.torch, config.seed)
    )
    network = program.model.network
    network.set_attn_implementation("sdpa")
    return network


def _padded_rate(config: RunConfig, rows: list[list[dict[str, list[int]]]]) -> float:
    network, settings = _network(config), config.training.optimizer
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True
    )
    started = 0.0
    for number, step in enumerate(rows):
        if number == 1:
            started = time.perf_counter()
        longest = max(len(row["input_ids"]) for row in step)
        tokens, labels = (
            torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in step])
            for name, fill in (("input_ids", 0), ("labels", -100))
        )
        mask = torch.tensor(
            [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in step]
        )
        network(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _tokens(rows[1:]) / (time.perf_counter() - started)


def _trl_rate(config: RunConfig, folder: Path, rows: list[list[dict[str, list[int]]]]) -> float:
    import datasets
    import transformers
    import trl

    examples = [row for step in rows for row in step]
    per_step = _tokens(rows) // len(rows)
    packed = trl.pack_dataset(datasets.Dataset.from_list(examples), max(per_step, LONGEST), "bfd")
    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    settings = config.training.optimizer
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        padding_free=True,
        max_length=None,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    assert isinstance(config.model, LanguageModelConfig)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{config.model.tokenizer}/tokenizer.json", pad_token="<end>", eos_token="<end>"
    )
    trainer = trl.SFTTrainer(
        _network(config), arguments, train_dataset=packed, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    later = sum(len(row["input_ids"]) for row in list(packed)[1:])
    return later / (times[-1] - times[0])


def _snapshot_bar() -> Bar:
    sizes = {name: _snapshot_bytes(lora) for name, lora in (("adapters", {"rank": 8}), ("all weights", None))}
    log.print(", ".join(f"{name}: {size / 1e6:,.1f} MB" for name, size in sizes.items()))
    share = sizes["adapters"] / sizes["all weights"]
    return Bar.once("language-lora-snapshot", SNAPSHOT_SHARE / share, "3 % of a whole snapshot", 1.0)


def _snapshot_bytes(lora: dict[str, Any] | None) -> int:
    """Of weights and optimizer behind a step."""
    vocabulary = Vocabulary(SMOLLM2_TOKENS + NEW_TOKENS, SMOLLM2_TOKENS, 0, (0,))
    model = LanguageModelConfig.parse(
        {"name": "language_model", "base": {"kind": "settings", "settings": SMOLLM2}, "lora": lora}
    )
    optimizer = DenseOptimizerSettings(1e-4, 0.01, RateSchedule(), None, fused=True)
    program = TextProgramSpec(model, vocabulary, optimizer).build(ProgramPlacement(HOST.torch, 0))
    assert isinstance(program, TextProgram)
    program.backward(_OneRow(), {})
    program.update()
    arrays = {**program.weights(), **program.optimizer_state()}
    return sum(array.nbytes for array in arrays.values())


class _OneRow:
    """Two tokens, of which the second is learned."""

    step, num_targets = 0, 1
    row_keys_B, offsets_B1 = np.array([0]), np.array([0, 2])
    tokens_N, is_target_N = np.array([5, 9]), np.array([False, True])
    filled_P: dict[str, np.ndarray] = {}  # noqa: RUF012
    lookups: dict[str, Any] = {}  # noqa: RUF012
