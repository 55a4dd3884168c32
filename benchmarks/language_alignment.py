"""Do words help to recommend items that nobody has met? A small language model, three seeds.

A tenth of the items, by a hash of their keys, are taken out of all histories; the catalog keeps them, with
titles and semantic IDs of their texts. A user whose newest event is one of them is a question: the rest of
the history is what is known, and the item is the answer. `item_language` is trained
from random weights, on histories of codes alone, and with alignment prompts beside them: title ↔ codes of
items with training events only, or of the whole catalog. All have the same epochs, so what prompts cost in
tokens is not counted. Bars, of the whole catalog's prompts over codes alone:

* `language-alignment-cold`: recall@50 of those questions, the median of three seeds; the lowest of the three
  has to reach 1. All items are ranked.
* `language-alignment-among-cold`: the same where the items that nobody has met are ranked alone.
* `language-alignment-warm`: recall@10 of 1,000 users of the test split; no less than 0.95.

RAYREC_BENCH_DATA is a folder with the source `amazon14-beauty`. Without it, a small log is made of users who
stay with one kind of items, which titles name, to see that the benchmark works: nothing is claimed of it.
With data, each run takes half an hour of a core, and its figures are written to
`benchmarks/quality/language-alignment.json` at once: the benchmark makes the runs that the file lacks, so it
may be stopped and started again. RAYREC_BENCH_STEPS, if set, are epochs.

On another machine, which needs neither Ray nor the sources:

    python -m benchmarks.language_alignment prepare SOURCE FOLDER       here: the data set and what is asked
    python -m benchmarks.language_alignment run FOLDER --device cuda --at-once 9 --out RECORD    there

`run` makes the runs that RECORD lacks, several at once, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_page import RECORDS
from benchmarks.word_tokenizer import learn_tokenizer
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, target_places, user_scores
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, tokenize
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.console import log
from rayrec.platform.devices import HOST, Device, device_named
from rayrec.platform.hashing import combine64
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE
from rayrec.samples.prepare.ids import hash_strings
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import evaluation_batches

RECORD = RECORDS / "language-alignment.json"
SOURCE = "amazon14-beauty"
SEEDS = (0, 1, 2)
COLD_SHARE = 0.1
_COLD_SALT = 0x43_4F
MOST_QUESTIONS = 1_000
ALIGNMENT = [
    {"prompt": "The code of {title} is ", "completion": "{codes}", "weight": 1.0},
    {"prompt": "{codes} is called ", "completion": "{title}", "weight": 0.5},
    {"prompt": "Who bought {history.codes} buys next ", "completion": "{title}", "weight": 0.25},
]
ARMS: dict[str, dict[str, Any]] = {
    "codes": {},
    "words of trained items": {"alignment": ALIGNMENT, "aligned_items": "trained"},
    "words of the catalog": {"alignment": ALIGNMENT, "aligned_items": "catalog"},
}
OURS, PEER = "words of the catalog", "codes"


@dataclass(frozen=True)
class Size:
    """Of a measurement."""

    epochs: int
    dim: int
    vocabulary: int
    codebook_size: int | None
    batch_size: int
    learning_rate: float


BEAUTY = Size(epochs=10, dim=128, vocabulary=4_000, codebook_size=256, batch_size=128, learning_rate=0.001)
SMALL = Size(epochs=20, dim=32, vocabulary=400, codebook_size=8, batch_size=32, learning_rate=0.005)


@dataclass(frozen=True)
class Question:
    user: str
    history: tuple[str, ...]
    answer: str


def bench(options: BenchOptions) -> list[Bar]:
    size = SMALL if options.data is None else BEAUTY
    epochs = size.epochs if options.steps == BenchOptions.steps else options.steps
    record = _Record(size, epochs, RECORD if options.data is not None else None)
    with TemporaryDirectory(prefix="rayrec-bench-") as name:
        folder = Path(name)
        with _source(options, folder) as source:
            made = Made.of(source, folder, size, options.data is None)
        for arm, seed in record.missing():
            figures = _measured(made, arm, size, epochs, seed, HOST)
            record.add(arm, seed, HOST, figures, len(made.questions))
    is_claimed = options.data is not None
    return [
        _bar("language-alignment-cold", "cold recall@50", record, 1.0, is_claimed),
        _bar("language-alignment-among-cold", "cold recall@50 among cold items", record, 1.0, is_claimed),
        _bar("language-alignment-warm", "recall@10", record, 0.95, is_claimed),
    ]


@dataclass(frozen=True)
class Made:
    """What runs learn from, and what they are asked."""

    folder: Path
    questions: Sequence[Question]

    @classmethod
    def of(cls, source: Path, folder: Path, size: Size, is_small: bool) -> Made:
        data, questions = without_cold_items(source, folder)
        _tokenized(data, folder, size, is_small)
        return cls(folder, questions)

    def save(self) -> None:
        questions = [asdict(question) for question in self.questions]
        (self.folder / "questions.json").write_text(json.dumps(questions))

    @classmethod
    def load(cls, folder: Path) -> Made:
        questions = json.loads((folder / "questions.json").read_text())
        return cls(
            folder, [Question(each["user"], tuple(each["history"]), each["answer"]) for each in questions]
        )

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def base(self) -> Path:
        """The tokenizer's folder."""
        return self.folder / "base"


class _Record:
    """Figures of runs by arm and seed, kept in a file; those of other settings do not count."""

    def __init__(self, size: Size, epochs: int, path: Path | None) -> None:
        self._path = path
        self._made: dict[str, Any] = {
            "settings": asdict(size) | {"epochs": epochs, "cold_share": COLD_SHARE, "arms": ARMS},
            "results": {arm: {} for arm in ARMS},
        }
        if path is not None and path.is_file():
            before = json.loads(path.read_text())
            if before["settings"] == self._made["settings"]:
                self._made = before

    def missing(self) -> list[tuple[str, int]]:
        """Arms and seeds; what the bars compare comes first."""
        all_runs = dict.fromkeys((*product(SEEDS, (PEER, OURS)), *product(SEEDS, ARMS)))
        return [(arm, seed) for seed, arm in all_runs if str(seed) not in self._made["results"][arm]]

    def add(self, arm: str, seed: int, device: Device, figures: dict[str, float], num_questions: int) -> None:
        said = ", ".join(f"{figure} {value:.4f}" for figure, value in figures.items())
        log.print(f"seed {seed}, {arm}: {said}", highlight=False)
        self._made["results"][arm][str(seed)] = {**figures, "device": device.kind}
        self._made |= {"date": datetime.now(UTC).date().isoformat(), "questions": num_questions}
        if self._path is not None:
            self._path.write_text(json.dumps(self._made, indent=2) + "\n")

    def of(self, arm: str, figure: str) -> list[float]:
        return [self._made["results"][arm][str(seed)][figure] for seed in SEEDS]


def _bar(name: str, figure: str, record: _Record, target: float, is_claimed: bool) -> Bar:
    pairs = zip(record.of(OURS, figure), record.of(PEER, figure), strict=True)
    ratios = [ours / max(peer, 1e-4) for ours, peer in pairs]
    low = min(ratios)
    ok = low >= target if is_claimed else None
    return Bar(name, statistics.median(ratios), low, f"{figure} of codes alone", target, ok)


def without_cold_items(source: Path, folder: Path) -> tuple[Path, list[Question]]:
    """A data set in whose histories some items of its catalog are not, and the questions that they answer."""
    prepare(source, folder / "whole", PrepareConfig(allow=frozenset({"duplicates", "short-users"})))
    whole = Dataset.open(folder / "whole")
    keys_I = np.array(whole.items.keys.to_pylist(), dtype=object)
    bound = np.uint64(COLD_SHARE * 2.0**64)
    is_cold_I = combine64(_COLD_SALT, hash_strings(keys_I.tolist())) < bound
    table = whole.read(HISTORY_FILE, ["item_ids", TIMES])
    ids_N, offsets_U1 = list_values(table["item_ids"])
    times_N, _ = list_values(table[TIMES])
    items_N = whole.item_positions(ids_N)
    users = whole.users["user_key"].to_pylist()
    is_warm_N = ~is_cold_I[items_N]
    user_N = np.repeat(np.arange(len(users)), np.diff(offsets_U1))
    (folder / "warm").mkdir()
    kept = {
        "user_id": [users[user] for user in user_N[is_warm_N]],
        "item_id": keys_I[items_N[is_warm_N]].tolist(),
        "timestamp": times_N[is_warm_N],
    }
    pq.write_table(pa.table(kept), folder / "warm" / "interactions.parquet")
    described = {"item_id": keys_I.tolist(), "title": whole.items.titles, "text": whole.items.texts}
    pq.write_table(pa.table(described), folder / "warm" / "items.parquet")
    allow = frozenset({"duplicates", "short-users", "cold-items"})
    prepare(folder / "warm", folder / "data", PrepareConfig(allow=allow))
    questions = []
    for user, (start, stop) in enumerate(pairwise(offsets_U1)):
        known = items_N[start : stop - 1]
        known = known[~is_cold_I[known]]
        if stop > start and not is_warm_N[stop - 1] and len(known):
            history = tuple(keys_I[known].tolist())
            questions.append(Question(users[user], history, keys_I[items_N[stop - 1]]))
    return folder / "data", questions[:MOST_QUESTIONS]


def _measured(made: Made, arm: str, size: Size, epochs: int, seed: int, device: Device) -> dict[str, float]:
    """Train a run, and ask it; it stays in the folder of what was made."""
    questions = made.questions
    network = {
        "model_type": "qwen3",
        "hidden_size": size.dim,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size.dim // 4,
        "intermediate_size": 3 * size.dim,
        "tie_word_embeddings": True,
    }
    config = RunConfig.parse(
        {
            "seed": seed,
            "device": device.kind,
            "data": {"path": str(made.data)},
            "model": {
                "name": "item_language",
                "base": {"kind": "settings", "settings": network},
                "tokenizer": str(made.base),
                "prompt": "A user bought {history.codes}",
                "max_tokens": 256,
                "beam_width": 100,
                **ARMS[arm],
            },
            "pipeline": {"trainer_threads": 1},
            "training": {
                "batch_size": size.batch_size,
                "epochs": epochs,
                "optimizer": {"learning_rate": size.learning_rate, "weight_decay": 0.1, "decayed": "linear"},
                "schedule": {"warmup_steps": 60, "decay": "cosine"},
            },
            "evaluation": {"every_epochs": max(1, epochs // 4), "max_users": 500},
            "cluster": {"dashboard": False},
        }
    )
    run = made.folder / f"{arm.replace(' ', '-')}-{seed}"
    train(config, run, cluster=in_process)
    recommender = Recommender.load(run, "best")
    dataset = recommender.dataset
    is_cold_I = dataset.items.train_counts_I == 0
    cold_I = np.isin(
        np.array(dataset.items.keys.to_pylist(), dtype=object), [each.answer for each in questions]
    )
    assert (is_cold_I | ~cold_I).all(), "an item that is asked for is in a history"
    found, among_cold = [], []
    for start in range(0, len(questions), 64):
        some = questions[start : start + 64]
        queries = [_query(dataset, each) for each in some]
        for allowed_I, hits in ((None, found), (is_cold_I, among_cold)):
            asked = [Query(query.history_ids, query.user_id, allowed_I=allowed_I) for query in queries]
            lists = recommender.recommend(asked, 50)
            for each, items in zip(some, lists, strict=True):
                hits.append(each.answer in {item.item_key for item in items})
    return {
        "cold recall@50": float(np.mean(found)),
        "cold recall@50 among cold items": float(np.mean(among_cold)),
        "recall@10": _warm_recall(recommender),
    }


def _warm_recall(recommender: Recommender) -> float:
    """Of the items of the test split, which are in histories of others."""
    dataset, places = recommender.dataset, []
    for samples in evaluation_batches(dataset, "test", 64, MOST_QUESTIONS):
        assert samples.targets_B is not None, "of a split"
        ranked = recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen=True)
        places.append(target_places(ranked.items_BK, dataset.item_positions(samples.targets_B)))
    return float(user_scores(np.concatenate(places))["recall@10"].mean())


def _query(dataset: Dataset, question: Question) -> Query:
    positions = [dataset.position_by_key(key) for key in question.history]
    return Query(dataset.items.ids_I[positions], dataset.user_by_key(question.user))


def _tokenized(data: Path, folder: Path, size: Size, is_small: bool) -> None:
    """Semantic IDs of texts, and a tokenizer that has learned the titles."""
    dataset = Dataset.open(data)
    titles = [title or "" for title in dataset.items.titles.to_pylist()]
    if is_small:
        _write_word_vectors(folder / "words.npy", dataset.items.keys.to_pylist(), titles)
        files = {"words": str(folder / "words.npy")}
        tokenize(
            data, config=TokenizeConfig(vectors="words", vector_files=files, codebook_size=size.codebook_size)
        )
    else:
        tokenize(data, config=TokenizeConfig(vectors="text", codebook_size=size.codebook_size))
    learn_tokenizer(titles, size.vocabulary, folder / "base")


def _write_word_vectors(path: Path, keys: Sequence[str], titles: Sequence[str]) -> None:
    """In place of a sentence model, the sum of the words' own vectors."""

    def of_word(word: str) -> np.ndarray:
        return np.random.default_rng(list(word.encode())).standard_normal(16)

    np.save(path, np.array([np.sum([of_word(word) for word in title.split()], axis=0) for title in titles]))
    path.with_suffix(".txt").write_text("".join(f"{key}\n" for key in keys))


NUM_USERS, NUM_KINDS, OF_KIND, LENGTH = 300, 6, 20, 8


@contextmanager
def _source(options: BenchOptions, folder: Path) -> Iterator[Path]:
    """The public data, or a small log in which users stay with one kind of items, which titles name."""
    if options.data is not None:
        yield options.data / SOURCE
        return
    random = np.random.default_rng(0)
    kinds = ("soap", "brush", "scent", "lotion", "mirror", "powder")
    items = [f"i{item}" for item in range(NUM_KINDS * OF_KIND)]
    titles = [f"{kinds[item // OF_KIND]} {item % 5} number {item % OF_KIND}" for item in range(len(items))]
    rows: list[tuple[str, str, int]] = []
    for user in range(NUM_USERS):
        chosen = random.permutation(OF_KIND)[:LENGTH] + OF_KIND * (user % NUM_KINDS)
        rows += [(f"u{user}", items[item], time) for time, item in enumerate(chosen.tolist())]
    users, met, times = zip(*rows, strict=True)
    source = folder / "source"
    source.mkdir()
    columns = {"user_id": list(users), "item_id": list(met), "timestamp": list(times)}
    pq.write_table(pa.table(columns), source / "interactions.parquet")
    pq.write_table(pa.table({"item_id": items, "title": titles}), source / "items.parquet")
    yield source


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language_alignment")
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="make the data set and what is asked")
    preparing.add_argument("source", type=Path)
    preparing.add_argument("folder", type=Path)
    running = commands.add_parser("run", help="make the runs that the record lacks")
    running.add_argument("folder", type=Path)
    running.add_argument("--device", type=device_named, default=HOST)
    running.add_argument("--epochs", type=int, default=BEAUTY.epochs)
    running.add_argument("--at-once", type=int, default=1)
    running.add_argument("--out", type=Path, default=RECORD)
    one = commands.add_parser("one", help="make one run, and print its figures")
    one.add_argument("folder", type=Path)
    one.add_argument("arm", choices=ARMS)
    one.add_argument("seed", type=int)
    one.add_argument("--device", type=device_named, default=HOST)
    one.add_argument("--epochs", type=int, default=BEAUTY.epochs)
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        options.folder.mkdir(parents=True)
        Made.of(options.source, options.folder, BEAUTY, is_small=False).save()
    elif options.command == "one":
        made = Made.load(options.folder)
        figures = _measured(made, options.arm, BEAUTY, options.epochs, options.seed, options.device)
        print(json.dumps(figures))
    else:
        record = _Record(BEAUTY, options.epochs, options.out)
        num_questions = len(Made.load(options.folder).questions)
        with ThreadPoolExecutor(options.at_once) as processes:
            runs = {processes.submit(_apart, options, *each): each for each in record.missing()}
            for done in as_completed(runs):
                if (found := done.result()) is not None:
                    record.add(*runs[done], options.device, found, num_questions)
        return 1 if record.missing() else 0
    return 0


def _apart(options: argparse.Namespace, arm: str, seed: int) -> dict[str, float] | None:
    """Make a run in a process of its own; nothing where it fails, which is said."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.language_alignment",
        "one",
        str(options.folder),
        arm,
        str(seed),
    ]
    command += ["--device", options.device.kind, "--epochs", str(options.epochs)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        log.print(f"seed {seed}, {arm}: {ended.stderr[-2_000:]}", highlight=False, markup=False)
        return None
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    sys.exit(main())
