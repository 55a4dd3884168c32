"""`make quality`: rows of docs/benchmarks/quality.md, trained and evaluated from the published data sets.

    python -m benchmarks.reproduction SOURCES beauty/shuffled/generative [--seed 1] ...
    python -m benchmarks.reproduction SOURCES yelp/shuffled/neighbors    what needs no training
    python -m benchmarks.reproduction SOURCES --missing        every row not measured as its recipe is now
    python -m benchmarks.reproduction --table                  write the table anew from what was measured

SOURCES holds the folders that `DATASETS` names. A row is (data set, order of ties, method, seed): the data
set is prepared and tokenized once, kept below .cache/quality, and one recipe per method (a file of configs/)
is run unchanged on all of them. What comes out is a record of benchmarks/quality/, and the table is made of
the records alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.processes import ProcessorTime
from benchmarks.quality_data import Row, config_of, made_of, prepared
from benchmarks.quality_page import neighbors_of, write_page
from benchmarks.quality_pairs import are_of_one_recipe, keep_positions, ranking_details
from benchmarks.quality_rows import DATASETS, METHODS, NEIGHBORS, TIES, Ties
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.training.placements import Placement, in_process, on_ray
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log, progress_bar
from rayrec.platform.files import write_atomically
from rayrec.samples.dataset.dataset import Dataset

SEVERAL_SEEDS = ("beauty", "movielens")
"""Data sets on which methods have more than one seed, where ties are shuffled."""
ONE_SEED = {
    "sasrec-bce",
    "sasrec-stored",
    "sasrec-cosine",
    "gnn",
    "gnn-full",
    "lazy-text",
    "causal-lm",
    "causal-lm-words",
    "ids-kmeans",
    "ids-rqvae",
    "ids-letter",
    "light-sasrec-ids",
    "lazy-sasrec",
    "generative-sasrec",
}
"""Methods that have one there, too, with those of published IDs: earlier recipes, controls and variants."""
CAP_MINUTES = 120.0
"""Of processors, that a training may take, its start and its validations included."""
DECIDING = ("rayrec", "configs", "benchmarks/*.py")
"""What a result could depend on, in words of git. Records and the page change while rows are measured."""


def all_rows() -> Iterator[Row]:
    """What the table is to have: the most asked for first."""
    for ties, dataset, method in itertools.product(TIES, DATASETS, (NEIGHBORS, *METHODS)):
        measured = DATASETS[dataset]
        if ties not in measured.ties or not (method == NEIGHBORS or measured.measures(method, ties)):
            continue
        yield from (Row(dataset, ties, method, seed) for seed in range(_num_seeds(dataset, ties, method)))


def _num_seeds(dataset: str, ties: Ties, method: str) -> int:
    has_one = method == NEIGHBORS or method in ONE_SEED or METHODS[method].vectors == "published"
    return 1 if has_one or ties == "file order" or dataset not in SEVERAL_SEEDS else 3


def is_measured(row: Row) -> bool:
    """Whether there is a record of it, and of the recipe as it is now."""
    if not row.record.exists():
        return False
    if row.method == NEIGHBORS:  # which have no recipe
        return True
    return are_of_one_recipe(json.loads(row.record.read_text()), {"made_of": made_of(row)})


class OverCapError(RuntimeError):
    """A training took longer than it may."""


def measure_neighbors(row: Row, sources: Path, commit: str) -> dict[str, Any]:
    """Evaluate what needs no training, and write its positions; the record is what `rayrec evaluate
    --neighbors --json` prints."""
    dataset = Dataset.open(prepared(row, sources))
    with progress_bar("evaluate") as progress:
        report = evaluate_neighbors(dataset, "test", on_batch=progress)
    made = {"commit": commit, "dataset": dataset.fingerprint}
    date = datetime.now(UTC).date().isoformat()
    shown = [name for name in neighbors_of(row.dataset).values() if name in report.results]
    kept = keep_positions(row.record, report, shown)
    return report.to_json() | {"run": row.dataset, **kept, "made_of": made, "date": date}


def measure(
    row: Row, sources: Path, commit: str, placement: Placement = on_ray, runs: Path | None = None
) -> dict[str, Any]:
    """Train and evaluate one row, and write its positions; the record of it.

    Args:
        commit: of the code that measures.
        placement: where actors run; results do not depend on it.
        runs: where runs are kept, so that one that was interrupted goes on; None: it is not kept.

    Raises:
        OverCapError: the training took longer than a row's may.
    """
    method, shown = METHODS[row.method], DATASETS[row.dataset].shown_list
    config = config_of(row, sources)
    assembly = assemble(config)
    with tempfile.TemporaryDirectory(prefix="rayrec-quality-") as folder:
        run = Path(folder) / "run" if runs is None else runs / row.record.stem
        goes_on = (run / "run.json").exists()
        with progress_bar("train") as progress, ProcessorTime() as spent:

            def on_step(done: int, total: int | None, _: float) -> None:
                progress(done, total)
                if spent.seconds > 60 * CAP_MINUTES:
                    raise OverCapError(
                        f"{row.name}, seed {row.seed}: step {done} of {total} after more than the "
                        f"{CAP_MINUTES:g} minutes of processors that a row may train"
                    )

            result = train(config, run, "if_begun", on_step=on_step, cluster=placement)
        with progress_bar("evaluate") as progress:
            report = evaluate(run, on_batch=progress, baselines=False)  # neighbors are a row of their own
    return {
        **asdict(row),
        "config": method.config,
        "results": report.to_json()["results"],
        **ranking_details(report, shown),
        **keep_positions(row.record, report, [shown]),
        "num_users": report.count,
        "num_parameters": sum(parameter.numel() for parameter in assembly.task.network().parameters())
        + _sparse_parameters(assembly),
        "training_minutes": result.training_s / 60,
        **({} if goes_on else {"processor_minutes": spent.seconds / 60}),
        "epochs": result.epochs,
        "best_step": result.best_step,
        "semantic_ids": None if assembly.task.registry is None else assembly.task.registry.method,
        **provenance(row, commit, assembly.task.dataset, assembly.task.semantic_ids_version),
    }


def provenance(
    row: Row,
    commit: str,
    dataset: Dataset,
    semantic_ids: str | None,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What the record of a model says of what it was made of, and when.

    Args:
        semantic_ids: their version.
        settings: where they are not those of the row's recipe; see `recorded`.
        more: said beside the commit.
    """
    made = {
        "commit": commit,
        "dataset": dataset.fingerprint,
        "semantic_ids": semantic_ids,
        **made_of(row),
        **({} if settings is None else {"settings": settings}),
        **more,
    }
    return {"made_of": made, "date": datetime.now(UTC).date().isoformat()}


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record atomically, and the page from all records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    write_page()


def commit_of(checkout: Path) -> str:
    """Of the code that measures, marked where anything differs from it that could change a result."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *DECIDING)
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def _sparse_parameters(assembly: Assembly) -> int:
    """Numbers in the rows of the catalog's ids, for models whose tables are on the servers."""
    ids = {table.name: assembly.task.ids_of(table.name) for table in assembly.tables}
    counts = {name: each if isinstance(each, int) else len(each) for name, each in ids.items()}
    return sum(counts[table.name] * table.dim for table in assembly.tables)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reproduction")
    parser.add_argument("sources", nargs="?", type=Path, help="folder of the published data sets")
    parser.add_argument("rows", nargs="*", help="DATASET/TIES/METHOD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--missing", action="store_true", help="every row without a record of its recipe as it is"
    )
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--runs", type=Path, help="keep runs in this folder, and go on with those there")
    parser.add_argument("--local", action="store_true", help="train in this process, with the same result")
    options = parser.parse_args(arguments)
    rows = [Row.named(name, options.seed) for name in options.rows]
    if options.missing:
        rows = [row for row in all_rows() if not is_measured(row)]
    if not options.table and (options.sources is None or not rows):
        parser.error("say where the data sets are and which rows to measure, or --table")
    # Once, before hours of training: outside of a git checkout there is none.
    commit = commit_of(CHECKOUT) if rows else ""
    for row in rows:
        log.print(f"{row.name}, seed {row.seed}")
        if row.method == NEIGHBORS:
            record = measure_neighbors(row, options.sources, commit)
        else:
            placement = in_process if options.local else on_ray
            record = measure(row, options.sources, commit, placement, options.runs)
        write_record(row.record, record)
    write_page()


if __name__ == "__main__":
    main()
