"""`canary`: a published version for a share of the users, until it is taken back or serves all."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayrec.cli.app import canary_app
from rayrec.cli.run_options import EvaluationSplit, refuse_without_effect
from rayrec.cli.versions import StoreArgument
from rayrec.platform.console import Answer, command, out, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.pipelines.versions.canary import Canaries, Canary, OfflineEvaluation
    from rayrec.pipelines.versions.manifest import ModelVersion
    from rayrec.pipelines.versions.store import VersionStore
    from rayrec.samples.dataset.dataset import Dataset
    from rayrec.samples.dataset.manifest import Split

logger = logging.getLogger(__name__)

DataOption = Annotated[
    Path, typer.Option(help="Data set with held-out events of the users, as `rayrec prepare` wrote it.")
]
SplitOption = Annotated[EvaluationSplit, typer.Option(help="Held-out events of the data set to predict.")]
MaxUsersOption = Annotated[
    int | None, typer.Option(min=1, help="Evaluate so many users, a fixed sample \\[all of them].")
]


@command(canary_app, "start")
def start_command(
    context: typer.Context,
    store: StoreArgument,
    version: Annotated[int | None, typer.Option(help="Version to try \\[the newest].")] = None,
    settings: Annotated[
        Path | None,
        typer.Option(help="YAML file that says what it has to show \\[see the guide's defaults]."),
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the users \\[that of --settings, else 0.05].")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Data set to evaluate it on first; where it is worse, it is not started \\[none]."),
    ] = None,
    split: SplitOption = EvaluationSplit.test,
    max_users: MaxUsersOption = None,
) -> Answer:
    """Let a version answer a share of the users, beside the one that serves."""
    if data is None:
        refuse_without_effect(context, {"split", "max_users"}, "says what of --data is predicted")
    from rayrec.pipelines.versions.canary import Canaries, CanarySettings
    from rayrec.pipelines.versions.store import VersionStore

    chosen = CanarySettings() if settings is None else CanarySettings.load(settings)
    if share is not None:
        chosen = CanarySettings.parse({**chosen.model_dump(), "share": share}, source="--share")
    versions = VersionStore(store)
    canaries = Canaries(versions)
    baseline = canaries.check_start()
    if version is None:
        version = versions.numbers()[-1]
    found = None
    if data is not None:
        found = _evaluated(versions, baseline, version, data, split.value, max_users)
        if (why := found.failure(chosen)) is not None:
            raise InputError(f"{store}: version {version} is not started as a canary: {why}")
    canary = canaries.start(version, chosen)
    if found is not None:
        canaries.note_evaluation(canary, found)
    share_in_words = f"{100 * chosen.share:.3g} % of the users"
    out.print(f"Version {version} answers {share_in_words}; version {baseline} is held meanwhile")
    return {"canary": canary.id, "version": version, "baseline": baseline, "share": chosen.share}


@command(canary_app, "status")
def status_command(store: StoreArgument) -> Answer:
    """Show the last canary: what became of the requests of both versions, and how it stands or ended."""
    canaries, canary = _last(store)
    counts, end = canaries.counts(canary), canaries.end(canary)
    verdict, evaluation = canaries.verdict(canary), canaries.evaluation(canary)
    state = verdict.state if end is None else end.state
    reason = verdict.reason if end is None else end.reason
    more = counts.more_errors()
    rows = [
        ("share of the users", f"{100 * canary.settings.share:.3g} %"),
        ("since", datetime.fromtimestamp(canary.began_at, UTC).strftime("%Y-%m-%d %H:%M:%S")),
    ]
    arms: dict[str, Any] = {}
    for name, arm in (("canary", counts.canary), ("baseline", counts.baseline)):
        p50, p95 = arm.quantile_s(0.5), arm.quantile_s(0.95)
        shown = f"{arm.num_requests:,}, {arm.num_errors:,}, {arm.num_users:,}"
        times = f"{1000 * p50:.1f} ms, {1000 * p95:.1f} ms"
        rows.append((f"{name}: requests, errors, users, p50, p95", f"{shown}, {times}"))
        arms[name] = {
            "requests": arm.num_requests,
            "errors": arm.num_errors,
            "users": arm.num_users,
            "p50_ms": 1000 * p50,
            "p95_ms": 1000 * p95,
        }
    if min(counts.canary.num_requests, counts.baseline.num_requests):
        rows.append(("more errors", f"{more.value:.2%} ({more.low:.2%} to {more.high:.2%})"))
    if evaluation is not None:
        ratio = evaluation.ratio
        rows.append((f"{evaluation.metric}, times", f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"))
    rows.append((state, reason))
    print_rows(f"Canary: version {canary.version} beside version {canary.baseline}", rows)
    return {
        "canary": canary.id,
        "version": canary.version,
        "baseline": canary.baseline,
        "state": state,
        "reason": reason,
        "arms": arms,
        "evaluation": None if evaluation is None else evaluation.model_dump(),
    }


@command(canary_app, "promote")
def promote_command(store: StoreArgument) -> Answer:
    """Let the canary serve all users, whatever was counted so far."""
    canaries, canary = _running(store)
    return _ended(canaries, canary, "promoted", "by rayrec canary promote", store)


@command(canary_app, "stop")
def stop_command(store: StoreArgument) -> Answer:
    """Let the version before serve all users again."""
    canaries, canary = _running(store)
    return _ended(canaries, canary, "stopped", "by rayrec canary stop", store)


@command(canary_app, "evaluate")
def evaluate_command(
    store: StoreArgument,
    data: DataOption,
    split: SplitOption = EvaluationSplit.test,
    max_users: MaxUsersOption = None,
) -> Answer:
    """Compare the canary with the version that serves on held-out data; where it is worse, it ends, and where
    it may be, it is not promoted by itself."""
    from rayrec.pipelines.versions.store import VersionStore

    canaries, canary = _running(store)
    found = _evaluated(VersionStore(store), canary.baseline, canary.version, data, split.value, max_users)
    canaries.note_evaluation(canary, found)
    why, ratio = found.failure(canary.settings), found.ratio
    out.print(
        f"{found.metric} of {found.num_users:,} users: {found.canary:.4f} instead of {found.baseline:.4f}, "
        f"{ratio[0]:.3f} times ({ratio[1]:.3f} to {ratio[2]:.3f})"
    )
    if why is not None:
        _ended(canaries, canary, "returned", why, store)
    elif found.doubt(canary.settings) is not None:
        more = "a longer log has" if max_users is None else "--max-users evaluates, or a longer log has"
        out.print(f"It may be worse: it is not promoted by itself before more users tell, as {more}")
    return {"evaluation": found.model_dump(), "is_worse": why is not None}


def _ended(canaries: Canaries, canary: Canary, state: Any, reason: str, store: str) -> Answer:
    from rayrec.pipelines.versions.store import VersionStore

    end = canaries.finish(canary, state, reason)
    serving = VersionStore(store).serving().number
    out.print(
        f"The canary, version {canary.version}, is {end.state} ({end.reason}); version {serving} serves",
        markup=False,
    )
    pointer = VersionStore(store).current()
    if pointer is not None and pointer.is_held:
        out.print(
            f"It stays although newer ones come; rayrec rollback {store} --undo lets these serve",
            markup=False,
        )
    return {"version": canary.version, "state": end.state, "reason": end.reason, "serving": serving}


def _last(store: str) -> tuple[Canaries, Canary]:
    from rayrec.pipelines.versions.canary import Canaries
    from rayrec.pipelines.versions.store import VersionStore

    canaries = Canaries(VersionStore(store))
    if (canary := canaries.last()) is None:
        raise InputError(
            f"{store}: no canary was started here; rayrec publish RUN STORE --canary SHARE does it, where a "
            "version serves"
        )
    return canaries, canary


def _running(store: str) -> tuple[Canaries, Canary]:
    canaries, canary = _last(store)
    canaries.settle()
    if (end := canaries.end(canary)) is not None:
        raise InputError(
            f"{store}: the canary, version {canary.version}, is {end.state} already: {end.reason}"
        )
    return canaries, canary


def _evaluated(
    store: VersionStore, baseline: int, canary: int, data: Path, split: Split, max_users: int | None
) -> OfflineEvaluation:
    from rayrec.pipelines.evaluation.paired import paired_scores
    from rayrec.pipelines.inference.recommender import Recommender
    from rayrec.pipelines.metrics.text_metrics import ratio
    from rayrec.pipelines.versions.canary import OFFLINE_METRIC, OfflineEvaluation
    from rayrec.pipelines.versions.loading import load_version
    from rayrec.samples.dataset.dataset import Dataset

    versions = [store.version(number) for number in (baseline, canary)]
    models = [load_version(store, version).model for version in versions]
    before, after = (Recommender(model) for model in models)
    # Lists as the run that serves is validated by: where users come back, seen items are what is wanted.
    exclude_seen = models[0].assembly.task.config.evaluation.exclude_seen
    dataset = Dataset.open(data, checksums=False)
    _warn_of_longer_logs(versions, dataset)
    with progress_bar("users") as update:
        scores = paired_scores(
            before,
            after,
            dataset,
            split,
            OFFLINE_METRIC,
            max_users=max_users,
            on_batch=update,
            exclude_seen=exclude_seen,
        )
    if not scores.before_U.any():
        raise InputError(
            f"{data}: version {baseline}, which serves, finds none of what is held out, so there is "
            "nothing to lose; name the data set that it was trained on, or more users"
        )
    found = ratio(scores.after_U, scores.before_U)
    return OfflineEvaluation(
        metric=OFFLINE_METRIC,
        split=split,
        num_users=len(scores.before_U),
        baseline=float(scores.before_U.mean()),
        canary=float(scores.after_U.mean()),
        ratio=(found.value, found.low, found.high),
    )


def _warn_of_longer_logs(versions: Sequence[ModelVersion], dataset: Dataset) -> None:
    """Of two versions, one that was trained on a longer log has learned what this data set holds out."""
    trained_on = [version.run_state.dataset_fingerprint for version in versions]
    if len(set(trained_on)) == 1:
        return
    for version, fingerprint in zip(versions, trained_on, strict=True):
        if fingerprint != dataset.fingerprint:
            logger.warning(
                "version %d was trained on another data set than %s: if that is a longer log, it has learned "
                "what is predicted here; name data whose held-out events are later than what either knows",
                version.number,
                dataset.root,
            )
