"""Whole searches of a small model that is really trained, in this process."""

from __future__ import annotations

import csv
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL, MODEL_UNMASKED
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.run_list import list_runs
from rayrec.pipelines.training.train import train
from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.folder import FINALISTS_FILE, TuningFolder
from rayrec.pipelines.tuning.running import TrialsHere, trials_here
from rayrec.pipelines.tuning.space import SearchSpace
from rayrec.pipelines.tuning.starts import Starts
from rayrec.pipelines.tuning.trial import OUTCOME_FILE, TrialSpec, run_trial
from rayrec.pipelines.tuning.tune import TuningResult, tune
from rayrec.platform.config import set_value
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.files import unfinished_suffix
from tests.helpers.examples import cases
from tests.helpers.impressions import ctr_config, impression_dataset
from tests.helpers.training_runs import EPOCHS, settings, walks

RATE = "training.optimizer.learning_rate"
SPACE = {
    RATE: {"kind": "float", "low": 0.0001, "high": 0.05, "log": True},
    "model.backbone.dropout": {"kind": "float", "low": 0, "high": 0.4, "step": 0.1},
}
STEPS_PER_EPOCH = 5


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuning")
    path = folder / "run.yaml"
    values = settings(walks(folder)).model_dump(mode="json", exclude_unset=True)
    path.write_text(yaml.safe_dump(values))
    return path


def tuning(run_file: Path, **more: Any) -> TuningConfig:
    values = {"config": str(run_file), "space": SPACE, "trials": 3, "random_trials": 2}
    return TuningConfig.parse(values | more)


def here(train_one: Any = train) -> Any:
    """Where trials run, with something else in the place of a training."""
    return lambda *_: nullcontext(TrialsHere(lambda spec: run_trial(spec, train_one)))


def journal(folder: Path) -> list[dict[str, Any]]:
    """Without what took time."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    timed = ("minutes", "cpu_minutes")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


@pytest.fixture(scope="module")
def searched(run_file, tmp_path_factory) -> tuple[Path, TuningResult]:
    folder = tmp_path_factory.mktemp("searched") / "search"
    return folder, tune(tuning(run_file), folder, open_trials=trials_here)


def test_every_trial_is_a_run_with_its_settings(searched, run_file):
    folder, result = searched
    runs = list_runs(folder / "trials")

    assert [run.name for run in runs] == ["000", "001", "002"]
    for run, trial in zip(runs, result.trials, strict=True):
        assert (run.condition, run.metric) == ("finished", "ndcg@10")
        assert run.best_value == trial["value"] == trial["validations"][trial["best_step"] // 5 - 1]
        assert len(trial["validations"]) == EPOCHS
        config = RunFolder.open(folder / "trials" / run.name).config
        assert config.training.optimizer.learning_rate == trial["settings"][RATE]
        assert trial["minutes"] > 0
        assert trial["cpu_minutes"] > 0
    assert result.trials[0]["settings"] == {RATE: 0.02, "model.backbone.dropout": 0.1}  # the config's own


def test_the_best_run_can_be_trained_and_evaluated_as_it_is(searched, run_file):
    folder, result = searched
    best = RunConfig.load(folder / "best.yaml")
    base = RunConfig.load(run_file)

    head = (folder / "best.yaml").read_text().splitlines()[0]
    assert head.startswith(f"# Trial {result.best} of `rayrec tune`: ndcg@10 ")
    assert result.best_value == max(trial["value"] for trial in result.trials)
    assert best.training.optimizer.learning_rate == result.best_settings[RATE]
    assert best.model.backbone.dropout == result.best_settings["model.backbone.dropout"]
    assert best.data.path == base.data.path
    assert best.pipeline == base.pipeline
    report = evaluate(folder / "trials" / f"{result.best:03d}", "valid")
    assert report.results["model"]["ndcg@10"].value == pytest.approx(result.best_value)


def test_only_the_best_run_keeps_its_snapshots(searched):
    folder, result = searched

    for number in range(3):
        run = RunFolder.open(folder / "trials" / f"{number:03d}")
        assert bool(run.snapshot_names()) == (number == result.best)
        assert (run.path / "metrics.jsonl").is_file()
        if number != result.best:
            with pytest.raises(InputError, match=r"no snapshot any more.*keep: all"):
                run.chosen_snapshot("best")


def few_users(run_file: Path, **more: Any) -> TuningConfig:
    """Trials are compared by four of the users."""
    return tuning(run_file, settings={"evaluation.max_users": 4}, finalists=2, **more)


@pytest.fixture(scope="module")
def searched_by_few(run_file, tmp_path_factory) -> tuple[Path, TuningResult]:
    folder = tmp_path_factory.mktemp("few") / "search"
    return folder, tune(few_users(run_file, keep="all"), folder, open_trials=trials_here)


@pytest.fixture
def not_judged(searched_by_few, tmp_path) -> Path:
    """The same search, where no finalist was judged yet."""
    folder = tmp_path / "search"
    shutil.copytree(searched_by_few[0], folder)
    (folder / FINALISTS_FILE).unlink()
    return folder


def test_leading_trials_are_judged_on_all_validation_users(searched_by_few):
    folder, result = searched_by_few
    by_value = sorted(result.trials, key=lambda trial: -trial["value"])
    assert set(result.judged) == {0, *(trial["trial"] for trial in by_value[:2])}
    assert result.judged[result.best] == max(result.judged.values())
    report = evaluate(folder / "trials" / f"{result.best:03d}", "valid", baselines=False)
    assert report.count > 4
    assert report.results["model"]["ndcg@10"].value == result.judged[result.best]


def test_the_finalist_that_wins_is_the_best_and_is_not_judged_twice(run_file, not_judged):
    asked = list[str]()

    def judge(trial: Path, metric: str) -> float:
        assert RunFolder.open(trial).snapshot_names()
        asked.append(trial.name)
        return float(len(asked) == 2)  # the second one is better

    def open_trials(*_: Any) -> Any:
        return nullcontext(TrialsHere(judge=judge))

    result = tune(few_users(run_file), not_judged, resume=True, open_trials=open_trials)

    assert asked == [f"{number:03d}" for number in result.judged]
    assert result.best == int(asked[1])
    assert result.best_value == result.trials[result.best]["value"]
    head = (not_judged / "best.yaml").read_text().splitlines()[0]
    assert head == f"# Trial {result.best} of `rayrec tune`: ndcg@10 1.0000 on all validation users."
    assert with_snapshots(not_judged) == [result.best]
    again = tune(few_users(run_file), not_judged, resume=True, open_trials=open_trials)
    assert (again.best, again.judged, len(asked)) == (result.best, result.judged, len(result.judged))


def with_snapshots(folder: Path) -> list[int]:
    """Numbers of trials."""
    return sorted({int(path.parent.parent.name) for path in folder.glob("trials/*/snapshots/*")})


@pytest.mark.parametrize("settings", cases([{}, {"evaluation.max_users": 1000}], [{}]))
def test_nobody_is_judged_twice_where_all_users_were_read(settings, run_file, tmp_path):
    folder = tmp_path / "search"
    result = tune(tuning(run_file, trials=2, finalists=2, settings=settings), folder, open_trials=trials_here)

    assert result.judged == {}
    assert not (folder / FINALISTS_FILE).exists()
    assert with_snapshots(folder) == [result.best]


@pytest.mark.slow
def test_finalists_are_judged_with_or_without_items_of_the_history_as_in_training(run_file, tmp_path):
    settings = {"evaluation.max_users": 4, "evaluation.exclude_seen": False}
    search = tuning(run_file, trials=2, finalists=2, settings=settings)

    result = tune(search, tmp_path / "search", open_trials=trials_here)

    report = evaluate(tmp_path / "search" / "trials" / f"{result.best:03d}", "valid", baselines=False)
    unmasked, masked = (report.results[name]["ndcg@10"].value for name in (MODEL_UNMASKED, MODEL))
    assert result.judged[result.best] == unmasked != masked


def test_a_trial_whose_snapshots_were_deleted_is_no_finalist_any_more(run_file, not_judged, caplog):
    shutil.rmtree(not_judged / "trials" / "000" / "snapshots")
    shutil.rmtree(not_judged / "trials" / "001" / "snapshots")

    search = few_users(run_file).model_copy(update={"finalists": 3})

    after = tune(search, not_judged, resume=True, open_trials=trials_here)

    assert list(after.judged) == [after.best] == [2]
    assert "not judged on all users, since snapshots were deleted" in caplog.text


@pytest.mark.slow
def test_a_search_that_lost_its_runs_trains_those_that_lead_again(
    searched_by_few, run_file, not_judged, caplog
):
    shutil.rmtree(not_judged / "trials")
    trained: list[int] = []

    def train_one(config: RunConfig, folder: Path, *rest: Any, **more: Any) -> Any:
        trained.append(int(folder.name))
        return train(config, folder, *rest, **more)

    found = tune(few_users(run_file, keep="all"), not_judged, resume=True, open_trials=here(train_one))

    before = searched_by_few[1]
    assert sorted(trained) == sorted(before.judged)
    assert (found.best, found.judged) == (before.best, before.judged)
    assert journal(not_judged) == journal(searched_by_few[0])
    assert TuningFolder(not_judged).has_snapshots(found.best)
    assert "was trained again" not in caplog.text  # to the bit

    shutil.rmtree(not_judged / "trials")
    trained.clear()
    found = tune(few_users(run_file, keep="all"), not_judged, resume=True, open_trials=here(train_one))
    assert trained == [found.best]  # what the others are worth is known
    assert found.judged == before.judged


@pytest.mark.slow
def test_a_trial_that_was_cut_short_as_it_was_trained_again_is_trained_to_its_end(
    searched_by_few, run_file, not_judged
):
    """It was judged at the snapshot that it had come to."""
    shutil.rmtree(not_judged / "trials")

    def cut_short(config: RunConfig, folder: Path, *rest: Any, on_validation: Any, **more: Any) -> Any:
        def interrupt(step: int, figures: dict[str, float]) -> None:
            on_validation(step, figures)
            if step > STEPS_PER_EPOCH:
                raise KeyboardInterrupt

        return train(config, folder, *rest, on_validation=interrupt, **more)

    search = few_users(run_file, keep="all")
    with pytest.raises(KeyboardInterrupt):
        tune(search, not_judged, resume=True, open_trials=here(cut_short))
    assert with_snapshots(not_judged)

    found = tune(search, not_judged, resume=True, open_trials=trials_here)

    before = searched_by_few[1]
    assert (found.best, found.judged) == (before.best, before.judged)
    for number in found.judged:
        state = RunFolder.open(not_judged / "trials" / f"{number:03d}").state
        assert state["state"] == "finished"


def test_all_snapshots_stay_where_that_is_asked_for(run_file, tmp_path):
    tune(tuning(run_file, trials=2, keep="all"), tmp_path / "search", open_trials=trials_here)

    for run in sorted((tmp_path / "search" / "trials").iterdir()):
        assert RunFolder.open(run).chosen_snapshot("best").is_dir()


def test_the_table_has_all_trials(searched):
    folder, result = searched
    with open(folder / "trials.csv") as file:
        rows = list(csv.DictReader(file))

    assert [row["trial"] for row in rows] == ["0", "1", "2"]
    for row, trial in zip(rows, result.trials, strict=True):
        assert float(row["ndcg@10"]) == trial["value"]
        assert float(row[RATE]) == trial["settings"][RATE]
        assert row["state"] == "complete"


class Killed(BaseException):
    """As a signal that nobody handles."""


def dying(number: int, at_step: int) -> Any:
    """Trials here, of which one is killed as it trains: nothing that it would have written is there."""

    def train_or_die(config: RunConfig, folder: Path, resume: Any, on_validation: Any, cluster: Any) -> Any:
        def on_step(done: int, total: int, loss: float) -> None:
            if folder.name == f"{number:03d}" and done == at_step:
                raise Killed

        return train(config, folder, resume, on_step=on_step, on_validation=on_validation, cluster=cluster)

    return here(train_or_die)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "at_step"), cases([(0, 2), (2, STEPS_PER_EPOCH + 2)], [(2, STEPS_PER_EPOCH + 2)])
)
def test_a_search_that_is_killed_goes_on_as_if_nothing_had_been(
    searched, run_file, tmp_path, number, at_step
):
    whole, _ = searched
    folder = tmp_path / "search"
    with pytest.raises(Killed):
        tune(tuning(run_file), folder, open_trials=dying(number, at_step))
    assert len(journal(folder)) == 1 + number
    trained: list[int] = []

    def noted(config: RunConfig, path: Path, resume: Any, **more: Any) -> Any:
        trained.append(int(path.name))
        first: list[int] = []
        result = train(config, path, resume, on_step=lambda done, *_: first.append(done), **more)
        if len(trained) == 1:  # the one that was cut short
            assert first[0] == 1 + at_step // STEPS_PER_EPOCH * STEPS_PER_EPOCH
        return result

    tune(tuning(run_file), folder, resume=True, open_trials=here(noted))

    assert trained == list(range(number, 3))
    assert journal(folder) == journal(whole)
    for file in ("best.yaml", "base.yaml"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes()
    for mine, other in zip(list_runs(folder / "trials"), list_runs(whole / "trials"), strict=True):
        assert mine.best_value == other.best_value


@pytest.mark.slow
def test_a_trial_that_was_over_when_the_search_was_killed_is_not_trained_again(searched, run_file, tmp_path):
    whole, _ = searched
    folder = tmp_path / "search"

    def killed_after(spec: TrialSpec) -> Any:
        run_trial(spec)
        raise Killed

    with pytest.raises(Killed):
        tune(tuning(run_file), folder, open_trials=lambda *_: nullcontext(TrialsHere(killed_after)))
    assert (folder / "trials" / "000" / OUTCOME_FILE).is_file()

    def not_the_first(config: RunConfig, path: Path, *arguments: Any, **more: Any) -> Any:
        assert path.name != "000"
        return train(config, path, *arguments, **more)

    tune(tuning(run_file), folder, resume="if_begun", open_trials=here(not_the_first))

    assert journal(folder) == journal(whole)


def test_a_search_may_go_on_with_more_trials(searched, run_file, tmp_path):
    whole, _ = searched
    folder = tmp_path / "search"
    tune(tuning(run_file, trials=2), folder, open_trials=trials_here)

    tune(tuning(run_file), folder, resume=True, open_trials=trials_here)

    assert journal(folder) == journal(whole)
    with pytest.raises(InputError, match=r"trials is 2, and the search .* has tried 3 already"):
        tune(tuning(run_file, trials=2), folder, resume=True, open_trials=trials_here)


def test_what_goes_on_has_to_be_the_same_search(searched, run_file, tmp_path):
    folder, _ = searched
    other_run = tmp_path / "run.yaml"
    other_run.write_text(run_file.read_text().replace("batch_size: 8", "batch_size: 10"))

    with pytest.raises(InputError, match="holds another search, which differs in at_once, seed;"):
        tune(tuning(run_file, seed=1, at_once=2), folder, resume=True, open_trials=trials_here)
    with pytest.raises(InputError, match=r"differs in the run's training\.batch_size;"):
        tune(tuning(other_run), folder, resume=True, open_trials=trials_here)
    with pytest.raises(InputError, match="holds a search already; continue it with --resume"):
        tune(tuning(run_file), folder, open_trials=trials_here)
    with pytest.raises(InputError, match="holds no search to go on with"):
        tune(tuning(run_file), tmp_path / "none", resume=True, open_trials=trials_here)
    with pytest.raises(InputError, match="not an empty folder"):
        tune(tuning(run_file), tmp_path, open_trials=trials_here)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_search_goes_on_where_its_data_set_was_moved(searched, run_file, tmp_path):
    whole, _ = searched
    folder, moved = tmp_path / "search", tmp_path / "moved"
    tune(tuning(run_file, trials=2), folder, open_trials=trials_here)
    values = yaml.safe_load(run_file.read_text())
    shutil.copytree(values["data"]["path"], moved)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"data": {"path": str(moved)}}))

    tune(tuning(tmp_path / "run.yaml"), folder, resume=True, open_trials=trials_here)

    assert journal(folder) == journal(whole)
    assert RunFolder.open(folder / "trials" / "002").config.data.path == str(moved)


@pytest.mark.parametrize("left", [b"", b'{"rayrec": "0.', b'{"rayrec": "0.\n'])
def test_a_journal_that_was_cut_short_in_its_first_line_is_begun_again(run_file, tmp_path, left):
    folder = TuningFolder(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(left)
    search = tuning(run_file)

    assert not folder.holds_search
    folder.check_free()
    folder.begin(search, SearchSpace.of(search), {"metric": "ndcg@10"})

    assert folder.holds_search
    assert folder.read_journal() == ({"metric": "ndcg@10"}, [])


def test_a_search_begins_in_a_folder_in_which_one_was_killed_as_it_wrote_its_first_file(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / f".tuning.yaml.{unfinished_suffix()}").write_text("config: ")

    TuningFolder(tmp_path).check_free()


def test_a_journal_that_lost_its_first_line_only_is_no_empty_folder(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"rayrec": \n{"trial": 0}\n')

    with pytest.raises(InputError, match="holds a search already"):
        TuningFolder(tmp_path).check_free()
    with pytest.raises(InputError, match="does not say how the search began"):
        TuningFolder(tmp_path).read_journal()


@pytest.mark.parametrize("what", ["rayrec", "optuna", "numpy", "metric", "data", "semantic_ids"])
def test_what_a_search_was_begun_with_is_compared(searched, run_file, tmp_path, what):
    shutil.copytree(searched[0], tmp_path / "search")
    path = tmp_path / "search" / "journal.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps({**json.loads(first), what: "another"}) + "\n" + "".join(others))

    with pytest.raises(InputError, match=rf"begun with another {what} \(another then, .* now\), so"):
        tune(tuning(run_file), tmp_path / "search", resume=True, open_trials=trials_here)

    path.write_text("{}\n" + "".join(others))
    with pytest.raises(InputError, match=rf"another {what} \(not noted then"):
        tune(tuning(run_file), tmp_path / "search", resume=True, open_trials=trials_here)


@pytest.mark.parametrize(
    ("key", "value", "is_free"),
    [
        *[
            ("data.path", "elsewhere", True),
            ("data.samples", "rows", False),
            ("model.attention", "reference", False),
        ],
        *[("training.compile", True, False), ("evaluation.every_epochs", 2, False)],
        *[("tracking.every_steps", 7, True), ("recovery.max_rollbacks", 9, True)],
    ],
)
def test_of_the_run_only_what_no_trial_depends_on_may_change(
    searched, run_file, tmp_path, key, value, is_free
):
    values = yaml.safe_load(run_file.read_text())
    set_value(values, key, value, "test")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    other = tuning(tmp_path / "run.yaml")
    folder = TuningFolder(searched[0])

    if is_free:
        folder.check_continues(other, SearchSpace.of(other))
    else:
        with pytest.raises(InputError, match=f"differs in the run's {key};"):
            folder.check_continues(other, SearchSpace.of(other))


@pytest.mark.slow
def test_a_trial_that_fails_says_why_and_the_search_goes_on(run_file, tmp_path):
    def failing(config: RunConfig, folder: Path, *arguments: Any, **more: Any) -> Any:
        if folder.name == "001":
            raise MemoryError("too wide")
        return train(config, folder, *arguments, **more)

    result = tune(tuning(run_file), tmp_path / "search", open_trials=here(failing))

    assert [trial["state"] for trial in result.trials] == ["complete", "failed", "complete"]
    assert result.trials[1]["reason"] == "MemoryError: too wide"
    assert result.best != 1
    assert "MemoryError: too wide" in (tmp_path / "search" / "trials.csv").read_text()


def test_a_training_that_diverges_is_such_a_trial(run_file, tmp_path):
    space = {RATE: {"kind": "choice", "values": [0.02, 1e30]}}

    result = tune(tuning(run_file, space=space, trials=4), tmp_path / "search", open_trials=trials_here)

    reasons = {trial["settings"][RATE]: trial["reason"] or "" for trial in result.trials}
    assert reasons[1e30].startswith("DivergedError: ")
    assert result.best_settings == {RATE: 0.02}


def test_where_all_trials_fail_the_first_reason_is_said(run_file, tmp_path):
    def failing(config: RunConfig, folder: Path, *arguments: Any, **more: Any) -> Any:
        raise InputError(f"{folder.name} does not work")

    with pytest.raises(InputError, match="all 3 trials failed, the first one because: 000 does"):
        tune(tuning(run_file), tmp_path / "search", open_trials=here(failing))


@pytest.mark.slow
def test_a_full_disk_is_no_fault_of_a_trial(run_file, tmp_path):
    def full(*arguments: Any, **more: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        tune(tuning(run_file), tmp_path / "search", open_trials=here(full))

    assert len(journal(tmp_path / "search")) == 1
    assert tune(tuning(run_file), tmp_path / "search", resume=True, open_trials=trials_here).trials


def test_a_machine_that_is_away_is_no_fault_of_a_trial_however_often(run_file, tmp_path):
    spec = TrialSpec(0, tmp_path / "trials" / "000", RunConfig.load(run_file), "ndcg@10", True)

    def away(*arguments: Any, **more: Any) -> Any:
        raise MachineError("device: no driver")

    for _ in range(3):
        with pytest.raises(MachineError):
            run_trial(spec, away)

    assert list((tmp_path / "trials").iterdir()) == []


def test_an_unknown_error_ends_the_search_until_the_trial_has_had_its_tries(run_file, tmp_path):
    spec = TrialSpec(0, tmp_path / "000", RunConfig.load(run_file), "ndcg@10", True, tries=2)

    def odd(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("odd")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="odd"):
            run_trial(spec, odd)
    outcome = run_trial(spec, odd)

    assert outcome.state == "failed"
    assert outcome.reason == (
        "it was started 2 times, and each time it ended with an error, the last time: RuntimeError: odd"
    )
    assert not (tmp_path / "000.starts.json").exists()


def test_a_trial_whose_process_dies_without_a_word_is_not_begun_for_ever(run_file, tmp_path):
    spec = TrialSpec(0, tmp_path / "000", RunConfig.load(run_file), "ndcg@10", True, tries=2)
    for _ in range(2):
        Starts(spec.folder).count()  # and no more is heard of it

    outcome = run_trial(spec, lambda *arguments, **more: pytest.fail("it has had its tries"))

    assert outcome.state == "failed"
    assert outcome.reason == "it was started 2 times, and each time its process died without a word"


def test_starts_are_counted_since_the_last_snapshot(tmp_path):
    config = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})
    run = RunFolder.create(tmp_path / "000", config)
    Starts(run.path).count()
    assert Starts(run.path).number == 1

    run.update(last="step-000000005")

    assert Starts(run.path).number == 0


def test_an_interrupted_trial_has_not_used_up_a_try(run_file, tmp_path):
    spec = TrialSpec(0, tmp_path / "000", RunConfig.load(run_file), "ndcg@10", True)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_trial(spec, interrupted)
    assert Starts(spec.folder).number == 0


def test_a_trial_that_misses_its_bound_ends_there_with_a_reason(run_file, tmp_path):
    config = RunConfig.load(run_file)
    spec = TrialSpec(7, tmp_path / "007", config, "ndcg@10", True, bounds=(0.0, 2.0))

    outcome = run_trial(spec)

    assert (outcome.state, outcome.steps) == ("pruned", 2 * STEPS_PER_EPOCH)
    assert outcome.value == outcome.validations[1]
    assert (outcome.reason or "").endswith("after 10 steps: the median of earlier trials is 2")
    run = RunFolder.open(tmp_path / "007")
    assert (run.condition, run.state["error"]) == ("stopped", outcome.reason)

    # Killed between its end and the record of it: the folder says the same, and nothing is trained.
    (run.path / OUTCOME_FILE).unlink()
    again = run_trial(spec, train=lambda *arguments, **more: pytest.fail("it is over"))
    assert again == replace(outcome, minutes=again.minutes, cpu_minutes=again.cpu_minutes)


def test_the_metric_has_to_be_one_of_validation(run_file, tmp_path):
    with pytest.raises(
        InputError, match=r"cannot compare runs by 'ndgc@10'; did you mean 'ndcg@10'\? It can by recall@"
    ):
        tune(tuning(run_file, metric="ndgc@10"), tmp_path / "search", open_trials=trials_here)
    with pytest.raises(InputError, match="by 'loss'; it can by recall@"):
        tune(tuning(run_file, metric="loss"), tmp_path / "search", open_trials=trials_here)
    assert not (tmp_path / "search").exists()


@pytest.mark.slow
def test_another_metric_is_taken_at_the_snapshot_that_is_kept(run_file, tmp_path):
    result = tune(
        tuning(run_file, trials=2, metric="recall@50"), tmp_path / "search", open_trials=trials_here
    )

    for trial in result.trials:
        records = RunFolder.open(tmp_path / "search" / "trials" / f"{trial['trial']:03d}").records()
        valid = [record["valid"] for record in records if "valid" in record]
        best = max(range(len(valid)), key=lambda place: valid[place]["ndcg@10"])
        assert trial["value"] == valid[best]["recall@50"]


@pytest.mark.slow
def test_of_ranking_models_the_smallest_loss_is_the_best(tmp_path):
    path = tmp_path / "run.yaml"
    config = ctr_config(impression_dataset(tmp_path / "impressions"))
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    space = {RATE: {"kind": "float", "low": 0.0001, "high": 0.05, "log": True}}
    search = tuning(path, space=space, metric="log_loss of click", begin_with_config=False)

    result = tune(search, tmp_path / "search", open_trials=trials_here)

    assert result.best_value == min(trial["value"] for trial in result.trials)
    with pytest.raises(
        InputError, match=r"by 'calibration of click'; .* It can by auc of click, gauc of click"
    ):
        tune(tuning(path, space=space, metric="calibration of click"), tmp_path / "other")


def test_another_process_may_not_search_in_the_folder(run_file, tmp_path):
    with (
        TuningFolder(tmp_path / "search").locked(),
        pytest.raises(MachineError, match="another process searches"),
    ):
        tune(tuning(run_file), tmp_path / "search", open_trials=trials_here)


def test_a_trial_waits_until_nobody_trains_in_its_folder(tmp_path):
    config = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})
    RunFolder.create(tmp_path / "000", config)
    slept: list[float] = []
    spec = TrialSpec(0, tmp_path / "000", config, "ndcg@10", True)

    with (
        RunFolder.locked(tmp_path / "000", "run"),
        pytest.raises(MachineError, match="another process trains this trial"),
    ):
        run_trial(spec, sleep=slept.append)

    assert sum(slept) == 60.0


def test_without_optuna_it_is_said_how_to_install_it(run_file, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(InputError, match=r"needs Optuna, .* pip install 'rayrec\[tune\]'"):
        tune(tuning(run_file), tmp_path / "search", open_trials=trials_here)
