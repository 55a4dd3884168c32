"""`nearline`: compute products of users seconds after their events, for answers that come later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.app import app
from rayrec.cli.run_options import (
    CANDIDATES,
    CandidatesOption,
    CombineOption,
    DataOption,
    GeneratorWeightOption,
    ObjectiveOption,
    RankerOption,
    ranking_of,
    refuse_of_runs,
)
from rayrec.platform.console import Answer, command, print_rows


@command(app, "nearline")
def nearline_command(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(help="Folder that `rayrec train` wrote, or a store of published versions to follow."),
    ],
    store: Annotated[str, typer.Option(help="Where products are kept: folder (LMDB), or redis:// URL.")],
    events: Annotated[
        str | None,
        typer.Option(
            help="Event store of the users' events, with both sides \\[the data set's users alone]."
        ),
    ] = None,
    products: Annotated[
        str, typer.Option(help="Kinds, with commas: summaries, candidates, neighbors, instructions.")
    ] = "candidates",
    keep: Annotated[int, typer.Option(min=1, help="Candidates, and neighbors, kept of a user.")] = 1000,
    search: Annotated[
        int | None, typer.Option(min=1, help="Beams that candidates are found with \\[all items].")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="module:function that makes instructions of users.")
    ] = None,
    graph: Annotated[
        Path | None, typer.Option(help="Folder of the graph that neighbors are of (`rayrec data graph`).")
    ] = None,
    debounce_events: Annotated[int, typer.Option(min=1, help="New events after which a user is due.")] = 16,
    debounce_s: Annotated[
        float, typer.Option(min=0, help="Seconds after which a user with fewer is due.")
    ] = 5.0,
    batch_users: Annotated[int, typer.Option(min=1, help="Users computed together.")] = 64,
    active_days: Annotated[
        float | None, typer.Option(min=0, help="Leave out users without events for so long \\[nobody].")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Bring all users up to date and end, without following events.")
    ] = False,
    single_process: Annotated[
        bool, typer.Option("--single-process", help="Work in this process, without Ray.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Ray actors that divide the users.")] = 1,
    snapshot: Annotated[str, typer.Option(help="Of a run: `best`, `last`, or the name of one.")] = "best",
    device: Annotated[str | None, typer.Option(help="Device to compute on \\[the run's].")] = None,
    data: DataOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = CANDIDATES,
    objective: ObjectiveOption = None,
    combine: CombineOption = "sum",
    generator_weight: GeneratorWeightOption = 0.0,
) -> Answer:
    """Compute what answers need of users before they ask, and keep it up to date."""
    from rayrec.pipelines.nearline.config import NearlineConfig
    from rayrec.pipelines.versions.store import VersionStore
    from rayrec.serve.launch.nearline import NearlineJob, work

    if VersionStore.is_there(run):
        refuse_of_runs(context, run)
    config = NearlineConfig.parse(
        {
            "products": [name.strip() for name in products.split(",") if name.strip()],
            "candidates": keep,
            "search": search,
            "function": function,
            "debounce_events": debounce_events,
            "debounce_s": debounce_s,
            "batch_users": batch_users,
            "active_s": None if not active_days else 86_400 * active_days,
        },
        source="rayrec nearline",
    )
    job = NearlineJob(
        run=run,
        store=store,
        events=events,
        config=config,
        graph=None if graph is None else str(graph),
        snapshot=snapshot,
        device=device,
        data=None if data is None else str(data),
        ranking=ranking_of(ranker, candidates, objective, combine, generator_weight),
    )
    report = work(job, once, single_process, workers)
    print_rows("Near-line products", report.rows())
    return report._asdict()
