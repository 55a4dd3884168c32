"""`value-curves`: what each action of a service finds of what full effort finds, by replay of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import app
from rayrec.cli.run_options import (
    CANDIDATES,
    CandidatesOption,
    CombineOption,
    DataOption,
    GeneratorWeightOption,
    ObjectiveOption,
    RankerOption,
    WhichOption,
    check_new_file,
    check_served,
    ranking_of,
    refuse_of_runs,
)
from rayrec.platform.console import Answer, command, out, progress_bar
from rayrec.platform.console import log as console


@command(app, "value-curves")
def value_curves_command(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(help="Folder that `rayrec train` wrote, or a store of published versions.")
    ],
    request_log: Annotated[
        str, typer.Option(help="Folder or URL that `rayrec serve --request-log` wrote requests to.")
    ],
    actions: Annotated[
        Path,
        typer.Option(help="YAML file with `actions`, or the service's --admission file with `allocate`."),
    ],
    curves: Annotated[Path, typer.Option("--out", help="File to write the curves to.")],
    requests: Annotated[int, typer.Option(min=1, help="Most requests to replay.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Requests answered at once.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="Threads to compute with, as the service has.")] = 1,
    near_line_lag: Annotated[
        int, typer.Option(min=1, help="Newest events that a near-line answer does not know yet.")
    ] = 1,
    ranking_gain: Annotated[
        float | None,
        typer.Option(
            min=1, help="Times as much that a ranked answer is worth, where only some actions rank."
        ),
    ] = None,
    snapshot: WhichOption = "best",
    device: Annotated[str | None, typer.Option(help="Device to compute on \\[the run's].")] = None,
    data: DataOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = CANDIDATES,
    objective: ObjectiveOption = None,
    combine: CombineOption = "sum",
    generator_weight: GeneratorWeightOption = 0.0,
) -> Answer:
    """Measure what each action finds and costs by replaying logged requests (value curves)."""
    from rayrec.serve.config.actions import actions_in

    # Popular items are known to find nothing.
    wanted = [action for action in actions_in(actions) if not action.popular]
    ranking = ranking_of(ranker, candidates, objective, combine, generator_weight)
    check_served(run)
    check_new_file("--out", curves)
    from rayrec.pipelines.versions.store import VersionStore

    if VersionStore.is_there(run):
        refuse_of_runs(context, run)

    import torch

    from rayrec.pipelines.inference.ranking_stage import RankingStage
    from rayrec.pipelines.inference.recommender import Recommender
    from rayrec.pipelines.versions.loading import load_version
    from rayrec.platform.files import write_atomically
    from rayrec.serve.app.curve_replay import CurveReplay, read_requests
    from rayrec.serve.engine.value_curves import ActionKey

    torch.set_num_threads(threads)
    logged = read_requests(request_log, requests)
    if VersionStore.is_there(run):
        store = VersionStore(run)
        recommender = Recommender(load_version(store, store.serving(), device).model)
    else:
        recommender = Recommender.load(run, snapshot, device, data)
    stage = None if ranking is None else RankingStage.load(recommender, ranking, device)
    keys = [ActionKey(each.max_beams, each.max_events, each.rank, each.near_line) for each in wanted]
    replay = CurveReplay(recommender, keys, stage, ranking_gain, near_line_lag)
    with progress_bar("requests") as update:
        replayed = replay.replay(logged, batch, update)
    found = replayed.fit(replay.version, keys)
    write_atomically(curves, found.to_json().encode())

    ends = [*(f"<{edge}" for edge in found.edges[:1]), *(f"{edge}+" for edge in found.edges)]
    table = Table("action", "ms", "measured", title_justify="left")
    table.title = (
        f"Share of full effort's probability mass, {len(logged.queries):,} requests: as measured, and curves "
        "by number of events"
    )
    for end in ends:
        table.add_column(end, justify="right")
    milliseconds_A = 1000 * replayed.seconds_NA.mean(axis=0)
    rows = zip(wanted, milliseconds_A, replayed.shares_A, found.shares_BA.T, strict=True)
    for action, milliseconds, share, shares_B in rows:
        by_bucket = [f"{each:.3f}" for each in shares_B] if ends else []
        table.add_row(escape(action.name), f"{milliseconds:.3f}", f"{share:.3f}", *by_bucket)
    out.print(table)
    if logged.num_skipped:
        console.print(f"{logged.num_skipped:,} requests have no history and are answered without the model")
    return {
        "version": found.version,
        "requests": len(logged.queries),
        "edges": list(found.edges),
        "actions": {
            action.name: {
                "ms_per_request": float(milliseconds),
                "measured": float(share),
                "shares": shares_B.tolist(),
            }
            for action, milliseconds, share, shares_B in zip(
                wanted, milliseconds_A, replayed.shares_A, found.shares_BA.T, strict=True
            )
        },
    }
