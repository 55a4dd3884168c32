"""`plan`, `calibrate`, `replicas`: what runs and services take, before anything of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import (
    ConfigArgument,
    DataOption,
    OverridesOption,
    WhichOption,
    check_new_file,
    check_run,
    refuse_without_effect,
)
from rayrec.platform.console import Answer, command, log, new_table, out, print_rows, progress_bar
from rayrec.platform.errors import InputError
from rayrec.platform.memory import human_size

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help stays quick
    from rayrec.embeddings.capacity import ShardPlan
    from rayrec.pipelines.config.run import RunConfig

CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        help="What `rayrec calibrate` wrote. If not given, a calibration that comes with RayRec, of a small "
        "virtual machine."
    ),
]


@command(app, "plan")
def plan_command(
    config_file: ConfigArgument,
    overrides: OverridesOption = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file of a cluster, such as configs/clusters/h100-1000.yaml."),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="With --cluster: a size of a larger run, such as trainers=1000, servers=512, "
            "dense_parameters=10B, sparse_bytes=10TB; may be repeated.",
        ),
    ] = None,
    calibration: CalibrationOption = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --cluster: draw the plan as SVG files there.")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(min=0.1, max=3650, help="With --cluster: simulate so many days, with failures."),
    ] = None,
) -> Answer:
    """Say what a run takes; starts nothing.

    Without --cluster: what each process will hold in memory, and whether it fits. With it: the time of a step
    on that cluster, what decides it, failures, and money.
    """
    from rayrec.pipelines.config.run import RunConfig

    config = RunConfig.load(config_file, overrides or ())
    if cluster is not None:
        return _plan_cluster(config, cluster, scale or [], calibration, pictures, days)
    for option, value in (
        ("--scale", scale),
        ("--calibration", calibration),
        ("--pictures", pictures),
        ("--days", days),
    ):
        if value:
            raise InputError(f"{option} is about a cluster; name one with --cluster")
    from rayrec.pipelines.tasks.assembly import assemble
    from rayrec.pipelines.tasks.sizes import with_sizes
    from rayrec.pipelines.training.memory_plan import plan_memory

    plan = plan_memory(assemble(with_sizes(config), checksums=False))
    if plan.fullest is not None:
        _print_servers(plan.shards, plan.fullest)
    trainer = plan.trainer
    print_rows(
        f"Each of {trainer.num_trainers} trainers, dense activations aside",
        [
            (
                "dense weights",
                f"{human_size(trainer.dense.weights_bytes)} ({trainer.dense.num_parameters:,})",
            ),
            ("their gradients", human_size(trainer.gradients_bytes)),
            ("optimizer state", human_size(trainer.optimizer_bytes)),
            ("codes, rates of items", human_size(trainer.dense.buffers_bytes)),
            ("cache of rows (sparse.cache_rows)", human_size(trainer.cache_bytes)),
            ("rows and gradients of a batch", human_size(trainer.batch_bytes)),
            ("rows of the catalog, when ranking", human_size(trainer.catalog_bytes)),
            ("peak", human_size(trainer.peak_bytes)),
            *(
                [
                    ("on its device: cache of rows", human_size(trainer.device_cache_bytes)),
                    ("on its device: peak", human_size(trainer.device_bytes)),
                ]
                if trainer.device_batch_bytes
                else []
            ),
        ],
    )
    limits = [("all processes and Ray's objects at their peaks", human_size(plan.machine_bytes))]
    if plan.machine_limit is not None:
        limits.append(("memory of this machine", human_size(plan.machine_limit)))
    if plan.device_limit is not None:
        limits.append(("memory of a device", human_size(plan.device_limit)))
    if plan.server_limit is not None:
        limits.append(("allowed to a server (sparse.server_memory)", human_size(plan.server_limit)))
    print_rows("The run", limits)
    plan.check()
    return plan.to_json()


def _print_servers(shards: Sequence[ShardPlan], fullest: ShardPlan) -> None:
    figures = ("rows", "held", "at its peak")
    servers = new_table("Parameter servers", ("server", *figures, "while"), figures)
    for shard in shards:
        held, peak = human_size(shard.num_bytes), human_size(shard.peak_bytes)
        servers.add_row(str(shard.shard), f"{shard.num_rows:,}", held, peak, shard.peak_phase)
    out.print(servers)
    kinds = ("rows", "weights", "state", "stamps", "index")
    tables = new_table(f"Server {fullest.shard}, the fullest", ("table", *kinds), kinds)
    for table in fullest.tables:
        index = table.index_bytes + table.waiting_bytes
        sizes = map(human_size, (table.weights_bytes, table.state_bytes, table.stamps_bytes, index))
        tables.add_row(table.table, f"{table.num_rows:,}", *sizes)
    out.print(tables)
    extra = {f"for a while, {phase}": size for phase, size in fullest.extra_bytes.items()}
    needs = {
        "a step's rows and gradients": fullest.step_bytes,
        **extra,
        "to load a snapshot": fullest.loading_bytes,
    }
    if on_disk := sum(table.disk_bytes for table in fullest.tables):
        needs["on disk"] = on_disk
    print_rows("It also needs", [(what, human_size(size)) for what, size in needs.items()])


def _plan_cluster(
    config: RunConfig,
    cluster_file: Path,
    scale: Sequence[str],
    calibration_file: Path | None,
    pictures: Path | None,
    days: float | None,
) -> Answer:
    from rayrec.pipelines.capacity.calibration import SHIPPED, Calibration
    from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
    from rayrec.pipelines.capacity.scale_options import parse_scale

    # What is wrong with the files is said before these take seconds to import.
    spec, sizes = ClusterSpec.load(cluster_file), parse_scale(scale)
    costs = Calibration.load(calibration_file or SHIPPED)
    from rayrec.pipelines.capacity.planner import changes, plan_cluster
    from rayrec.pipelines.capacity.report import sections, to_json
    from rayrec.pipelines.capacity.workload import workload_of
    from rayrec.pipelines.tasks.assembly import assemble
    from rayrec.pipelines.tasks.sizes import with_sizes

    assembly = assemble(with_sizes(config), checksums=False)
    work = workload_of(assembly)
    if int(spec.trainers.count) > 1:
        work = work.among_nodes()
    plan = plan_cluster(work.scaled(sizes), assembly.tables, spec, costs)
    changed = changes(plan.work, spec, costs.costs)
    answer = to_json(plan, changed)
    for title, rows in sections(plan, changed):
        print_rows(title, rows)
    if days is not None:
        from rayrec.pipelines.capacity.simulate import simulate_run

        run = simulate_run(plan, days * 86400)
        print_rows(f"{days:g} simulated days", run.lines())
        answer["simulated"] = run.to_dict()
    if pictures is not None:
        from rayrec.pipelines.capacity.pictures import draw_plan

        for path in draw_plan(plan, changed, pictures):
            log.print(f"{path}", highlight=False, markup=False)
    return answer


@command(app, "calibrate")
def calibrate_command(
    config_file: ConfigArgument,
    calibration: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where to write what was measured.")
    ] = Path("calibration.json"),
    overrides: OverridesOption = None,
) -> Answer:
    """Measure this machine with short windows of a run's pipeline, for `rayrec plan --cluster`.

    Starts a cluster here and trains variants of the run for some seconds each; keeps nothing of them.
    """
    from rayrec.pipelines.config.run import RunConfig

    config = RunConfig.load(config_file, overrides or ())
    check_new_file("--out", calibration)
    from rayrec.pipelines.capacity.calibrate import calibrate
    from rayrec.pipelines.tasks.sizes import with_sizes

    with progress_bar("calibrate") as progress:
        found = calibrate(with_sizes(config), progress)
    found.save(calibration)
    print_rows(
        f"Calibrated: {calibration}",
        [
            ("machine", found.machine),
            ("configurations", f"{len(found.windows)}"),
            ("error on each, by the others", f"{found.residual:.1%}, one standard deviation"),
        ],
    )
    return {"calibration": str(calibration), "residual": found.residual, "configurations": len(found.windows)}


@command(app, "replicas")
def replicas_command(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder that `rayrec train` wrote.")],
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, of all users.")],
    within_ms: Annotated[
        float, typer.Option(min=0.001, help="Time within which 99 of 100 answers are to be given.")
    ],
    costs: Annotated[
        Path | None,
        typer.Option(
            help='JSON file with the seconds of batches by size, {"1": 0.004, "8": 0.011}; if not given, '
            "they are measured here with the run's model."
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest batch that a replica computes.")] = 64,
    data: DataOption = None,
    snapshot: WhichOption = "best",
) -> Answer:
    """Say how many replicas answer a rate of requests in time, by what batches take."""
    from dataclasses import asdict

    from rayrec.pipelines.capacity.replicas import plan_replicas

    if costs is None:
        check_run(run)
        seconds = _measured_batches(run, max_batch, data, snapshot)
    else:
        why = "says how batches are measured, and --costs says what they take"
        refuse_without_effect(context, {"max_batch", "data", "snapshot"}, why)
        seconds = _read_batches(costs)
    plan = plan_replicas(seconds, rate, within_ms / 1000)
    print_rows(
        f"{rate:,.0f} requests a second, 99 % within {within_ms:g} ms",
        [
            ("replicas", f"{plan.replicas:,} (by M/G/c {plan.by_formula:,})"),
            ("answers", f"{1000 * plan.p50_s:.1f} ms half, {1000 * plan.p99_s:.1f} ms 99 of 100"),
            ("requests of a batch", f"{plan.mean_batch:.1f}"),
            ("of a replica's time in use", f"{plan.utilization:.0%}"),
            ("most that so many can answer", f"{plan.most_rate:,.0f} a second"),
            ("batches", ", ".join(f"{size}: {1000 * each:.1f} ms" for size, each in sorted(seconds.items()))),
        ],
    )
    return asdict(plan) | {"seconds_by_size": {str(size): each for size, each in sorted(seconds.items())}}


def _measured_batches(run: Path, max_batch: int, data: Path | None, snapshot: str) -> dict[int, float]:
    """Of the run's model in this process, as a replica measures them when it starts."""
    from rayrec.pipelines.inference.recommender import Recommender
    from rayrec.serve.engine.service import RecommendationService

    service = RecommendationService(Recommender.load(run, snapshot, data=data), max_k=10)
    service.warm_up()
    return service.measured_costs(max_batch).seconds_by_size


def _read_batches(path: Path) -> dict[int, float]:
    """
    Raises:
        InputError: the file cannot be read, or has something else in it.
    """
    import json

    try:
        found = json.loads(path.read_text())
        return {int(size): float(seconds) for size, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f'--costs {path}: expected a JSON file such as {{"1": 0.004, "8": 0.011}} ({error})'
        ) from None
