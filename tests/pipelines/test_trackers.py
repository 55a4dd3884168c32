"""Where figures of a run go: stand-ins for packages that need not be installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import TrackingConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.training import trackers
from rayrec.pipelines.training.trackers import Trackers, check_trackers
from rayrec.platform.errors import InputError


def config(*to: str) -> RunConfig:
    tracking = {"to": list(to), "project": "mine"}
    return RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}, "tracking": tracking})


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", config())


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_tracker_without_its_package_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(
        InputError, match=r"^tracking\.to: 'wandb' needs the package wandb.*pip install wandb"
    ):
        check_trackers(TrackingConfig(to=("wandb",)))
    check_trackers(TrackingConfig())


def test_figures_reach_every_tracker(folder, monkeypatch):
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            calls.append(("tensorboard", log_dir.removeprefix(str(folder.path)), purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append(("tensorboard", name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None:
            calls.append(("tensorboard", "closed"))

    def wandb_init(**settings: Any) -> Any:
        calls.append(("wandb", settings["project"], settings["id"], settings["resume"]))
        return SimpleNamespace(
            log=lambda figures, step: calls.append(("wandb", figures, step)),
            finish=lambda: calls.append(("wandb", "closed")),
        )

    def start_run(run_id: str | None, run_name: str | None) -> Any:
        calls.append(("mlflow", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="theirs"))

    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    stand_in(monkeypatch, "wandb", init=wandb_init)
    stand_in(
        monkeypatch,
        "mlflow",
        set_experiment=lambda name: None,
        start_run=start_run,
        log_dict=lambda values, file: None,
        log_metrics=lambda figures, step: calls.append(("mlflow", figures, step)),
        end_run=lambda: calls.append(("mlflow", "closed")),
    )

    found = Trackers(folder, config("tensorboard", "wandb", "mlflow"), step=40)
    found.log(60, {"valid/recall@10": 0.5})
    found.close()

    assert calls == [
        ("tensorboard", "/tensorboard", 41),  # the first step whose figures it hides
        ("wandb", "mine", folder.state["id"], "allow"),
        ("mlflow", None, "run"),
        ("tensorboard", "valid/recall@10", 0.5, 60),
        ("wandb", {"valid/recall@10": 0.5}, 60),
        ("mlflow", {"valid/recall_at_10": 0.5}, 60),
        ("tensorboard", "closed"),
        ("wandb", "closed"),
        ("mlflow", "closed"),
    ]
    calls.clear()
    Trackers(folder, config("mlflow"))
    assert calls == [("mlflow", "theirs", None)]  # the run that it has begun before


def test_a_tracker_that_fails_does_not_end_the_run(folder, monkeypatch, caplog):
    def fails(figures: Any, step: int) -> None:
        calls.append(step)
        raise ConnectionError("no network")

    calls: list[int] = []
    stand_in(monkeypatch, "wandb", init=lambda **_: SimpleNamespace(log=fails, finish=lambda: None))
    found = Trackers(folder, config("wandb"))

    found.log(1, {"loss": 1.0})
    found.log(2, {"loss": 1.0})

    assert calls == [1]
    assert "wandb takes no figures of this run any more: no network" in caplog.text


def test_a_tracker_that_fails_is_closed_with_the_others(folder, monkeypatch):
    """At the end of the run: it may wait for a network that is down."""
    calls: list[str] = []

    def fails(figures: Any, step: int) -> None:
        raise ConnectionError("no network")

    def finish() -> None:
        calls.append("finish")
        raise ConnectionError("no network")

    stand_in(monkeypatch, "wandb", init=lambda **_: SimpleNamespace(log=fails, finish=finish))
    found = Trackers(folder, config("wandb"))
    found.log(1, {"loss": 1.0})
    assert calls == []

    found.close()
    found.close()

    assert calls == ["finish"]


def test_what_was_opened_is_closed_where_opening_the_next_one_is_interrupted(folder, monkeypatch):
    calls: list[str] = []

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    stand_in(monkeypatch, "wandb", init=lambda **_: SimpleNamespace(finish=lambda: calls.append("finish")))
    stand_in(monkeypatch, "mlflow", set_experiment=interrupted)

    with pytest.raises(KeyboardInterrupt):
        Trackers(folder, config("wandb", "mlflow"))

    assert calls == ["finish"]


def test_a_run_of_mlflow_that_takes_no_settings_is_ended(folder, monkeypatch, caplog):
    """The next one of this process was refused, as one was active."""
    calls: list[str] = []

    def refused(values: Any, file: str) -> None:
        raise ConnectionError("no store of artifacts")

    stand_in(
        monkeypatch,
        "mlflow",
        set_experiment=lambda name: None,
        start_run=lambda run_id, run_name: SimpleNamespace(info=SimpleNamespace(run_id="theirs")),
        log_dict=refused,
        end_run=lambda: calls.append("ended"),
    )

    found = Trackers(folder, config("mlflow"))

    assert calls == ["ended"]
    assert "mlflow takes no figures of this run any more: no store of artifacts" in caplog.text
    found.log(1, {"loss": 1.0})
    found.close()
    assert calls == ["ended"]
