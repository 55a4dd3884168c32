"""Figures of a run while it trains, sent to where people look: TensorBoard, Weights & Biases, MLflow.

`metrics.jsonl` in the run's folder has the same figures, and is what the run itself reads.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import TrackerName, TrackingConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tensorboard"


class Tracker(Protocol):
    """One place where figures are shown."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_trackers(config: TrackingConfig) -> None:
    """Refuse a tracker whose package is not installed, before anything starts.

    Raises:
        InputError: names the setting and what to install.
    """
    for name in config.to:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"tracking.to: {name!r} needs the package {name}, which is not installed; install it "
                f"(pip install {name}), or leave it out"
            )


class Trackers:
    """All trackers of a run. One that fails is left out from then on: a run does not end with a web site."""

    def __init__(self, folder: RunFolder, config: RunConfig, step: int = 0) -> None:
        """
        Args:
            step: that the run goes on from; what was shown of later ones is dropped where that can be done.
        """
        self._trackers: dict[str, Tracker] = {}
        self._left_out: dict[str, Tracker] = {}
        """Closed with the others: one whose network is down may wait for it then, and not in a step."""
        try:
            for name in config.tracking.to:
                self._guarded(name, lambda name=name: self._open(name, folder, config, step))  # type: ignore[misc]
        except BaseException:
            self.close()
            raise

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda tracker=tracker: tracker.log(step, figures))  # type: ignore[misc]

    def close(self) -> None:
        opened = {**self._left_out, **self._trackers}
        self._left_out, self._trackers = {}, {}
        for name, tracker in opened.items():
            self._guarded(name, tracker.close)

    def _open(self, name: TrackerName, folder: RunFolder, config: RunConfig, step: int) -> None:
        self._trackers[name] = _TRACKERS[name](folder, config, step)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            logger.warning("%s takes no figures of this run any more: %s", name, error)
            if name in self._trackers:
                self._left_out[name] = self._trackers.pop(name)


class _TensorBoard:
    def __init__(self, folder: RunFolder, config: RunConfig, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # It hides this step's figures, too; those of the step that the run goes on from are not sent again.
        self._writer: Any = SummaryWriter(str(folder.path / TENSORBOARD_FOLDER), purge_step=step + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, folder: RunFolder, config: RunConfig, step: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        # The id makes a run that is resumed go on in the same line.
        self._run = wandb.init(
            project=config.tracking.project or "rayrec",
            name=folder.name,
            id=folder.state.get("id"),
            resume="allow",
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _MlFlow:
    def __init__(self, folder: RunFolder, config: RunConfig, step: int) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.set_experiment(config.tracking.project or "rayrec")
        known = folder.state.get("mlflow_run")
        run = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        try:
            folder.update(mlflow_run=run.info.run_id)
            if known is None:
                self._mlflow.log_dict(config.model_dump(mode="json"), "config.json")
        except BaseException:
            self.close()  # it is the process's active run, beside which none can be started
            raise

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        # It allows no `@` in names.
        named = {name.replace("@", "_at_"): value for name, value in figures.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_TRACKERS: dict[TrackerName, Callable[[RunFolder, RunConfig, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MlFlow,
}
