"""Train a run: a config in, a run folder with snapshots out.

train ─► supervise ─► Attempt.run ─► TrainingPipeline.run
            ▲              │ a server or trainer is lost: back to the last snapshot
            └──────────────┘ a node is bad: on from a snapshot of now, elsewhere
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from rayrec.models.program.program import DivergedError
from rayrec.pipelines.cluster.leaving import NodeLeftError
from rayrec.pipelines.cluster.rollbacks import Rollbacks
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import SparseConfig
from rayrec.pipelines.runs.run_copy import RunCopy
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import Snapshot, read_snapshot
from rayrec.pipelines.tasks.assembly import Assembly, assemble, check_continues
from rayrec.pipelines.tasks.sizes import with_sizes
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.pipelines.training.memory_plan import plan_memory
from rayrec.pipelines.training.placements import Placement, on_ray
from rayrec.pipelines.training.progress import RunProgress, TrainingResult, is_over
from rayrec.pipelines.training.run import Attempt, OnStep, OnValidation
from rayrec.pipelines.training.trackers import check_trackers
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.platform.ray_errors import ActorDeathError, StageHungError
from rayrec.samples.reading.reader import SampleReader

logger = logging.getLogger(__name__)

SHOWN_INTERVALS = 8
"""Places of a batch's rows that an error message names."""


def train(
    config: RunConfig,
    run: str | Path,
    resume: bool | Literal["if_begun"] = False,
    on_step: OnStep | None = None,
    snapshot: str = "last",
    cluster: Placement = on_ray,
    on_validation: OnValidation | None = None,
) -> TrainingResult:
    """Train a model as the config says.

    A reader or feature worker that dies is replaced. When a server or trainer is lost the run goes back to
    its last snapshot by itself, as often as `recovery` allows.

    Args:
        run: folder of the run; new or empty, unless it is resumed.
        resume: continue the run that the folder, or its copy (`snapshots.copy_to`), holds. `if_begun`: if it
            holds one, and begin it otherwise; for jobs that are started again when they fail.
        snapshot: to resume from, in words of `RunFolder.chosen_snapshot`.
        cluster: where the actors run: `on_ray`, or `in_process`, which needs no Ray; the bits are the same.
        on_validation: called after validations; it may end the run.

    Raises:
        StoppedError: `on_validation` has ended the run, which has a snapshot of then.
        InputError: the config, the data, the device or the folder cannot be used, or a run is alive in it:
            nothing was started, and no run was changed. Or the cluster has too little of something, which
            shows when it has been joined; `run.json` says so.
        Exception: a stage's own error, after every actor has been stopped.
    """
    if config.model.quantization is not None:
        raise InputError(
            "model.quantization is set: quantized weights cannot be trained; train without it, and then "
            "rayrec quantize"
        )
    if resume:
        config = RunFolder.as_begun(Path(run), config)
    config = with_sizes(config.with_absolute_paths())
    assembly = assemble(config)
    assembly.task.check_validation()
    check_trackers(config.tracking)
    for note in [*unread_settings(assembly), *assembly.task.notes()]:
        logger.warning("%s", note)
    # Footers are read, and operations fit, also what is validated, before anything starts.
    assembly.task.validation(assembly.features)
    cluster.check(assembly)
    is_here = cluster.trains_here(assembly)
    if is_here:
        get_device(config.device)  # elsewhere there may be what this machine lacks
    path = Path(run)
    takes_empty = resume == "if_begun"
    copy_to = None if config.snapshots.copy_to is None else RunCopy(config.snapshots.copy_to)
    copy = None  # of a run whose folder is gone, and which is brought back
    if copy_to is not None:
        with _copy_at_hand(config):
            if resume and not (path / "run.json").exists() and copy_to.holds_run():
                copy = copy_to
                if resume == "if_begun":
                    copy.check_brings_back(path)
            else:
                copy_to.check_free(path, takes_empty)
    if resume == "if_begun":
        resume = copy is not None or (path / "run.json").exists()
    memory = plan_memory(assembly, is_here)
    memory.check()
    memory.log()
    initial = None if resume else initial_snapshot(assembly)  # which refuses what does not fit
    with RunFolder.locked(path, "part" if copy is not None else "run" if resume else "nothing"):
        if copy is not None and not (path / "run.json").exists():
            copy.restore(path)
        folder = RunFolder.resume(path, config) if resume else RunFolder.create(path, config)
        begins_with = _snapshot_to_resume(folder, assembly, snapshot)
        if begins_with is not None and _is_finished(folder, assembly, begins_with):
            logger.info("%s: is finished already", folder.path)
            return replace(TrainingResult(**folder.state["result"]), run=str(folder.path))
        if begins_with is None and initial is None:
            initial = initial_snapshot(assembly)
        assembly = assembly.learning_on(begins_with or initial)
        _log_beginning(folder, assembly, begins_with)
        folder.mark_start()
        if copy_to is not None:
            try:
                with _copy_at_hand(config):
                    copy_to.claim(path, takes_empty)
            except InputError as error:
                if not resume:
                    folder.update(state="failed", error=str(error))
                raise
        folder.begin(config)
        folder.keep_columns(assembly.rows.columns)
        try:
            return supervise(folder, assembly, begins_with, initial, cluster, on_step, on_validation)
        finally:
            if copy_to is not None:
                with contextlib.suppress(Exception):  # of whatever kind the other place's are
                    copy_to.release(path)


@contextlib.contextmanager
def _copy_at_hand(config: RunConfig) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not isinstance(error, OSError):  # of an SDK of a cloud, or a mistake of ours
            logger.warning("%s: does not answer", config.snapshots.copy_to, exc_info=error)
        raise InputError(
            f"{config.snapshots.copy_to}: cannot be used ({error}); mend it, or choose another "
            "snapshots.copy_to"
        ) from error


def _snapshot_to_resume(folder: RunFolder, assembly: Assembly, which: str = "last") -> Snapshot | None:
    """The snapshot, checked; None for a run that has none yet.

    Raises:
        InputError: it is damaged, or does not continue with this data or order.
    """
    if folder.state["last"] is None:
        return None
    path = folder.chosen_snapshot(which)
    try:
        snapshot = read_snapshot(path)
    except InputError as error:
        raise InputError(f"{error}; --snapshot previous goes on from the one before it") from error
    assembly.task.check_state(snapshot.state, str(snapshot.path))
    check_continues(snapshot, assembly.going_on_from(snapshot, folder.path))
    return snapshot


def _log_beginning(folder: RunFolder, assembly: Assembly, snapshot: Snapshot | None) -> None:
    total = "" if assembly.total_steps is None else f" of {assembly.total_steps:,}"
    if snapshot is None:
        init_from = assembly.config.training.init_from
        weights = "" if init_from is None else f" and the weights of {init_from}"
        logger.info("%s: begins with step 1%s%s", folder.path, total, weights)
    else:
        step = snapshot.committed_step + 2  # counted from 1
        logger.info("%s: goes on from %s with step %s%s", folder.path, snapshot.path.name, f"{step:,}", total)


def _is_finished(folder: RunFolder, assembly: Assembly, snapshot: Snapshot) -> bool:
    """Whether the run ended by itself, and these settings leave nothing to train."""
    progress = RunProgress(**snapshot.state.progress)
    return folder.state["state"] == "finished" and is_over(assembly, snapshot.committed_step + 1, progress)


def supervise(
    folder: RunFolder,
    assembly: Assembly,
    snapshot: Snapshot | None,
    initial: Snapshot | None,
    cluster: Placement,
    on_step: OnStep | None,
    on_validation: OnValidation | None = None,
) -> TrainingResult:
    """Make attempts, each with actors of its own, until the run is over; how it ends is left in the folder.

    Args:
        snapshot: to go on from; every later attempt goes on from what the one before has left.
        initial: of another run, whose weights are begun with where there is none.

    Raises: as `train`.
    """
    recovery = assembly.config.recovery
    rollbacks = Rollbacks(recovery.max_rollbacks, folder)
    result: TrainingResult | None = None

    def explained(cause: BaseException) -> BaseException:
        """An error with what only this run knows of it."""
        if isinstance(cause, DivergedError):
            rows = rows_of_step(assembly.going_on_from(None, folder.path), cause.step)
            folder.update(refused_steps=folder.state.get("refused_steps", 0) + 1)
            return cause.with_note(f"Rows of the batch: {rows}")
        return cause

    with folder.ending(explained), cluster.connected(assembly):
        while result is None:
            hang_timeout_s = rollbacks.patience * recovery.hang_timeout_s
            current = assembly.going_on_from(snapshot, folder.path)
            try:
                # An attempt is closed when its actors are gone: nothing then writes to the folder.
                with (
                    ExitStack() as closing,
                    cluster.running(folder.name, current, folder.path.resolve(), hang_timeout_s) as stages,
                ):
                    while result is None:
                        attempt = Attempt(current, folder, stages, on_step, snapshot, initial, on_validation)
                        closing.callback(attempt.close)
                        try:
                            result = attempt.run()
                        except Exception as error:
                            # What the actors that stay hold is of steps after a snapshot, or of no use.
                            has_any = folder.state["last"] is not None
                            replaced = stages.without_lost(error, stages) if has_any else None
                            if replaced is None:
                                raise
                            closing.close()
                            rollbacks.allow(replaced.death, is_alone=True)
                            stages, snapshot = replaced.stages, _snapshot_to_resume(folder, assembly)
                            current = assembly.going_on_from(snapshot, folder.path)
            except NodeLeftError as left:
                # No step is lost, and no return to the last snapshot is used up.
                last = folder.state["last"]
                folder.log_recovery({"time": time.time(), "reason": str(left), "snapshot": last})
                snapshot = _snapshot_to_resume(folder, assembly)
            except (ActorDeathError, StageHungError) as error:
                rollbacks.allow(error)
                snapshot = _snapshot_to_resume(folder, assembly)
    assert result is not None, "attempts end with a result or an error"
    folder.update(state="finished", error=None, result=asdict(result))
    return result


def rows_of_step(assembly: Assembly, step: int) -> str:
    """Which rows of which files a step trains on; the reader gives the same ones every time."""
    try:
        batch = assembly.plan.batch(step)
        assert batch is not None, "it has been trained on"
        spec = replace(assembly.plan.spec, preparation=None)  # where they lie, not what is made of them
        with SampleReader(spec) as reader:
            cursor = reader.read_batch(batch).cursor
    except InputError as error:
        return f"not to be had any more ({error})"
    shown = [f"{part.file} {part.start} to {part.stop - 1}" for part in cursor[:SHOWN_INTERVALS]]
    more = len(cursor) - len(shown)
    return "; ".join(shown) + (f"; and {more} more places" if more else "")


def unread_settings(assembly: Assembly) -> Iterator[str]:
    """Sentences about settings of rows on servers that the model has not."""
    sparse = assembly.config.sparse
    unread = sorted(set(sparse.tables) - {table.name for table in assembly.tables})
    if unread:
        yield f"the model does not read {', '.join(unread)}, which sparse.tables has settings of"
    if not assembly.tables:
        default = SparseConfig()
        changed = [
            f"sparse.{name}"
            for name in SparseConfig.model_fields
            if name not in ("tables", "num_servers") and getattr(sparse, name) != getattr(default, name)
        ]
        if changed:
            yield f"the model has no rows on servers: {', '.join(changed)} will have no effect"
