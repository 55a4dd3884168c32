"""Tables of docs/benchmarks/quality.md after equal tuning: the same search for every method.

    python -m benchmarks.equal_tuning SOURCES movielens/shuffled/sasrec movielens/shuffled/tiger ...

A row is named as for `benchmarks.reproduction`, and its search begins with that row's recipe. Budget and
space are those of all files of configs/tuning. Trials run in this process, one after the other. A search that
was interrupted goes on, from its folder or from what is kept of it beside the records. Only the trial that
was best on validation users is judged on test users.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.kept_searches import FOLDER as SEARCHES
from benchmarks.kept_searches import KeptSearch
from benchmarks.quality_data import KEPT, Row, config_of, made_of, recorded
from benchmarks.quality_pairs import keep_positions, ranking_details
from benchmarks.quality_rows import DATASETS, METHODS
from benchmarks.quality_tuned import FOLDER
from benchmarks.reproduction import commit_of, provenance, write_record
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tuning.config import Dimension, TuningConfig
from rayrec.pipelines.tuning.folder import TuningFolder
from rayrec.pipelines.tuning.running import trials_here
from rayrec.pipelines.tuning.search import Tried
from rayrec.pipelines.tuning.tune import tune
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.config import has_setting
from rayrec.platform.console import log, progress_bar
from rayrec.platform.files import write_atomically

BUDGET = CHECKOUT / "configs" / "tuning" / "beauty-sasrec.yaml"
"""Its budget and space are those of the files beside it."""
ELSEWHERE = {"model.backbone.num_layers": "model.backbone.network.num_layers"}
"""Where a setting of the space lies in recipes that do not have it there."""


def space_in(recipe: RunConfig, space: Mapping[str, Dimension]) -> dict[str, Dimension]:
    """The space, by the keys that a recipe has its settings at."""
    return {key if has_setting(recipe, key) else ELSEWHERE.get(key, key): space[key] for key in space}


def measure(row: Row, sources: Path, commit: str, searches: Path) -> None:
    """Search for settings of a row on validation users, judge the best trial on test users, and record it.

    Args:
        commit: of the code that measures.
        searches: where searches are kept; one that is there goes on.
    """
    base = config_of(row, sources)
    record = row.record.parent / FOLDER / row.record.name
    folder = TuningFolder(searches / row.record.stem)
    is_over = folder.holds_search and record.is_file()
    before = json.loads(record.read_bytes())["made_of"]["commit"].split() if is_over else []
    begin = searches / f"{row.record.stem}.yaml"
    tuning = TuningConfig.load(BUDGET, [f"config={begin}"])
    tuning = tuning.model_copy(update={"space": space_in(base, tuning.space)})
    what = {"recipe": made_of(row), "budget": tuning.model_dump(mode="json", exclude={"config", "folder"})}
    kept = KeptSearch(row.record.parent / SEARCHES / row.record.stem, what)
    if (ids := kept.begin(base.data.semantic_ids, [*before, commit])) is not None:
        base = base.model_copy(update={"data": base.data.model_copy(update={"semantic_ids": str(ids)})})
    searches.mkdir(parents=True, exist_ok=True)
    write_atomically(begin, base.to_yaml().encode())
    kept.restore(folder, tuning)

    with progress_bar("tune") as progress:

        def on_trial(tried: Tried, best: Tried | None) -> None:
            kept.keep(folder)
            progress(tried.number + 1, tuning.trials)

        result = tune(tuning, folder.path, resume="if_begun", open_trials=trials_here, on_trial=on_trial)
    best = folder.trial_path(result.best)
    with progress_bar("evaluate") as progress:
        report = evaluate(best, on_batch=progress, baselines=False)
    shown, tuned = DATASETS[row.dataset].shown_list, RunFolder.open(best).config
    task = assemble(tuned).task
    states = [trial["state"] for trial in result.trials]
    measured = {
        **asdict(row),
        "search": {
            "trials": {state: states.count(state) for state in ("complete", "pruned", "failed")},
            "space": tuning.model_dump(mode="json", include={"space"})["space"],
            "metric": result.metric,
            "of_recipe": result.trials[0]["value"],
            "of_best": result.best_value,
            "best": result.best,
            "judged": result.judged,
            "settings": result.best_settings,
            "processor_minutes": sum(trial["cpu_minutes"] or 0 for trial in result.trials),
        },
        "results": report.to_json()["results"],
        **ranking_details(report, shown),
        **keep_positions(record, report, [shown]),
        "num_users": report.count,
        **provenance(row, kept.commits, task.dataset, task.semantic_ids_version, recorded(tuned)),
    }
    write_record(record, measured)
    kept.forget()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.equal_tuning")
    parser.add_argument("sources", type=Path, help="folder of the published data sets")
    parser.add_argument("rows", nargs="+", help="DATASET/TIES/METHOD")
    parser.add_argument("--searches", type=Path, default=KEPT / "searches", help="keep searches here")
    options = parser.parse_args(arguments)
    rows = [Row.named(name, seed=0) for name in options.rows]
    untrained = [row.name for row in rows if row.method not in METHODS]
    if untrained:
        parser.error(f"nothing of {', '.join(untrained)} is trained, so nothing can be tuned")
    commit = commit_of(CHECKOUT)
    for row in rows:
        log.print(row.name)
        measure(row, options.sources, commit, options.searches)


if __name__ == "__main__":
    main()
