"""`recommend`: items for one user, by a run or by neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from rayrec.cli.app import app
from rayrec.cli.run_options import (
    CANDIDATES,
    CandidatesOption,
    CombineOption,
    DataOption,
    GeneratorWeightOption,
    ObjectiveOption,
    RankerOption,
    RunOrNeighborsArgument,
    WhichOption,
    check_run,
    ranking_of,
    refuse_without_effect,
)
from rayrec.platform.console import Answer, command, log, new_table, out
from rayrec.platform.errors import InputError

if TYPE_CHECKING:  # what a command needs is imported when it runs: --help stays quick
    from rayrec.pipelines.inference.answers import Answer as ModelAnswer
    from rayrec.pipelines.inference.answers import Control, Query, Recommendation
    from rayrec.pipelines.inference.item_filter import FilterMasks
    from rayrec.pipelines.inference.neighbors import NeighborRecommender
    from rayrec.pipelines.inference.ranking_stage import RankingStage
    from rayrec.pipelines.inference.recommender import Recommender
    from rayrec.platform.arrays import BoolArray
    from rayrec.platform.event_labels import Part
    from rayrec.samples.dataset.dataset import Dataset


@command(app, "recommend")
def recommend_command(
    context: typer.Context,
    run: RunOrNeighborsArgument = None,
    *,
    user: Annotated[str, typer.Option(help="The user's id, as the source of the data writes it.")],
    k: Annotated[int, typer.Option("-k", min=1, help="Items to recommend.")] = 10,
    behavior: Annotated[
        str | None, typer.Option(help="Behavior that is wanted, of models with instructions.")
    ] = None,
    scenario: Annotated[str | None, typer.Option(help="Scenario that the items are for, likewise.")] = None,
    trigger_item: Annotated[
        str | None, typer.Option(help="Id of the item that the user is looking at, likewise.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Item that may be recommended, and no others; several times.")
    ] = None,
    deny: Annotated[list[str] | None, typer.Option(help="Item that may not; several times.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN=VALUE that items of the catalog have; one of several values of a column."),
    ] = None,
    among: Annotated[
        list[str] | None, typer.Option(help="Item to score, each exactly, and no others; several times.")
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="COLUMN=VALUE:LEAST-MOST items of a category in the list, either of the two may be left "
            "out; several times."
        ),
    ] = None,
    diversity: Annotated[
        float,
        typer.Option(min=0, max=1, help="How much an item counts for being unlike those before it."),
    ] = 0.0,
    beams: Annotated[
        str | None,
        typer.Option(
            help="Prefixes that a generative model keeps: a number, or one per code of an item, as 128,64,32."
        ),
    ] = None,
    beam_margin: Annotated[
        float | None,
        typer.Option(help="Drop prefixes whose log-probability is so much below that of the best."),
    ] = None,
    snapshot: WhichOption = "best",
    data: DataOption = None,
    ranker: RankerOption = None,
    candidates: CandidatesOption = CANDIDATES,
    objective: ObjectiveOption = None,
    combine: CombineOption = "sum",
    generator_weight: GeneratorWeightOption = 0.0,
    neighbors: Annotated[
        Path | None, typer.Option(help="Data set whose neighbors answer, without a run and a model.")
    ] = None,
) -> Answer:
    """Recommend items to one user of the data set."""
    from dataclasses import asdict, replace

    if (run is None) == (neighbors is None):
        raise InputError("give the folder of a run, or --neighbors and a data set, and not both")
    parts: dict[Part, str | None] = {
        "scenario": scenario,
        "behavior": behavior,
        "trigger_item": trigger_item,
    }
    ranking = ranking_of(ranker, candidates, objective, combine, generator_weight)
    stage, wanted, has_beams = None, {}, False
    if run is None:
        assert neighbors is not None
        if ranking is not None or any(parts.values()):
            raise InputError("--neighbors answers without a model: it takes no ranker and no instruction")
        if among or quota or diversity:
            raise InputError(
                "--neighbors answers without a model: it takes no --among, --quota and --diversity"
            )
        if beams is not None or beam_margin is not None:
            raise InputError("--neighbors answers without a model: it takes no --beams and --beam-margin")
        reason = "is about a run, and --neighbors answers without one"
        refuse_without_effect(context, {"snapshot", "data"}, reason)
        from rayrec.pipelines.inference.neighbors import NeighborRecommender
        from rayrec.samples.dataset.dataset import Dataset
        from rayrec.samples.graph import graph_of_dataset

        dataset = Dataset.open(neighbors)
        recommender: Recommender | NeighborRecommender
        recommender = NeighborRecommender(dataset, graph_of_dataset(dataset, "all"))
    else:
        check_run(run)
        from rayrec.pipelines.inference.ranking_stage import RankingStage
        from rayrec.pipelines.inference.recommender import Recommender

        recommender = Recommender.load(run, snapshot, data=data)
        dataset = recommender.dataset
        stage = None if ranking is None else RankingStage.load(recommender, ranking)
        wanted = recommender.instruction_of(parts)
        has_beams = bool((stage or recommender).num_beams(1))
    from rayrec.pipelines.inference.answers import Wanted
    from rayrec.pipelines.inference.item_filter import FilterMasks

    query = recommender.query_of_user(user)
    if query is None:
        raise InputError(f"--user {user}: there is no such user in {dataset.root}; use an id of its source")
    masks = FilterMasks(dataset)
    allowed_I = _allowed_items(masks, dataset, allow or [], deny or [], where or [], among or [])
    asked = replace(query, instruction=wanted, allowed_I=allowed_I)
    control = control_of(masks, among, quota or [], diversity, k)
    if control is None and beams is None and beam_margin is None:
        (answer,) = (stage or recommender).answer([asked], k)
    else:
        source = cast("Recommender | RankingStage", stage or recommender)
        registry = recommender.semantic_ids if isinstance(recommender, Recommender) else None
        num_codes = registry.codes_IL.shape[1] if registry is not None and has_beams else 0
        widths, margin = beams_of(beams, beam_margin, k, num_codes, bool(among))
        as_told = Wanted(k, control=control, beams=widths, beam_margin=margin)
        (answer,) = source.answer_each([asked], [as_told])
    _print_history(dataset, query, user)
    _print_items(answer.items, stage)
    if allowed_I is not None and len(answer.items) < k:
        why = ["they are near to nothing of the history" if run is None else "nothing is known of them"]
        limits = {"beams": has_beams, "candidates": stage is not None, "quotas": bool(quota)}
        why += [f"{name} are few" for name, is_one in limits.items() if is_one]
        log.print(_what_is_left(dataset, query, allowed_I, answer, k, " or ".join(why)), markup=False)
    if answer.control is not None:
        for place in answer.control.unmet_quotas:
            said = f"--quota {(quota or [])[place]}: there are too few such items for the list"
            log.print(said, markup=False)
    told: Answer = {"user": user, "items": [_told(item) for item in answer.items]}
    return told if answer.control is None else {**told, "control": asdict(answer.control)}


def _allowed_items(
    masks: FilterMasks,
    dataset: Dataset,
    allow: list[str],
    deny: list[str],
    where: list[str],
    among: list[str],
) -> BoolArray | None:
    """[I] those that options let through; None: they say nothing.

    Raises:
        InputError: an option has no meaning, or names an item, column or value that is not there.
    """
    from rayrec.pipelines.inference.item_filter import ItemFilter

    if not (allow or deny or where or among):
        return None
    values: dict[str, list[str]] = {}
    for each in where:
        column, sign, value = each.partition("=")
        if not sign:
            raise InputError(f"--where {each}: expected COLUMN=VALUE")
        values.setdefault(column, []).append(value)
    for option, keys in (("--allow", allow), ("--deny", deny), ("--among", among)):
        if unknown := [key for key in keys if dataset.position_by_key(key) is None]:
            raise InputError(
                f"{option} {unknown[0]}: there is no such item in {dataset.root}; use an id of its source"
            )
    allowed = masks.allowed(ItemFilter(tuple(allow) if allow else None, tuple(deny), where=values))
    if allowed.unknown_value is not None:
        raise InputError(allowed.unknown_value)
    if not among:
        return allowed.allowed_I
    return allowed.allowed_I & masks.allowed(ItemFilter(allow=tuple(among))).allowed_I


def _print_history(dataset: Dataset, query: Query, user: str) -> None:
    table = new_table(f"User {user}: the latest of {len(query.history_ids)} events", ("item",))
    for item in dataset.item_positions(query.history_ids[-10:]).tolist():
        if item >= 0:
            table.add_row(escape(dataset.items.label(item)))
    out.print(table)


def _print_items(items: Sequence[Recommendation], stage: RankingStage | None) -> None:
    labels = () if stage is None else stage.scorer.labels
    figures = ("score", "objective", *labels) if labels else ("score",)
    table = new_table("Recommended", ("", "item", "title", *figures), figures)
    for place, item in enumerate(items, start=1):
        cells = [str(place), escape(item.item_key), escape(item.title or ""), f"{item.score:.3f}"]
        if item.ranking is not None:
            ranked = [item.ranking.score, *(item.ranking.probabilities[label] for label in labels)]
            cells += [f"{figure:.3f}" for figure in ranked]
        table.add_row(*cells)
    out.print(table)


def _what_is_left(
    dataset: Dataset, query: Query, allowed_I: BoolArray, answer: ModelAnswer, k: int, why: str
) -> str:
    """Where the items are that may be recommended and were not.

    Args:
        why: they were not found, perhaps.
    """
    left = {int(place) for place in allowed_I.nonzero()[0]}
    found = [f"{len(answer.items)} of {k} items: --allow, --deny, --where and --among leave {len(left):,}"]
    met = left & set(dataset.item_positions(query.history_ids).tolist())
    if met:
        found.append(f"in the user's history: {len(met):,}")
    if others := left - met - {item.position for item in answer.items}:
        example = dataset.items.keys[min(others)].as_py()
        found.append(f"not found: {len(others):,}, such as {example!r} ({why})")
    return "; ".join(found)


def beams_of(
    beams: str | None, margin: float | None, k: int, num_codes: int, has_candidates: bool
) -> tuple[tuple[int, ...] | None, float | None]:
    """Beams by level and their margin, from the options; None of what they do not say.

    Args:
        num_codes: of an item; 0 of a model that has no beams.
        has_candidates: whether candidates are given.

    Raises:
        InputError: the options are no beams, or none that this model and these items can be found with.
    """
    if beams is None and margin is None:
        return None, None
    if not num_codes:
        raise InputError("--beams, --beam-margin: this run's model scores every item; leave them out")
    if has_candidates:
        raise InputError("--beams, --beam-margin: --among scores its items exactly; leave out one of the two")
    if margin is not None and not 0 < margin < float("inf"):
        raise InputError(f"--beam-margin {margin}: expected a number above 0")
    if beams is None:
        return None, margin
    numbers = beams.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise InputError(f"--beams {beams}: expected a number from 1, or several with commas between them")
    widths = tuple(map(int, numbers))
    if len(widths) > num_codes:
        raise InputError(f"--beams {beams}: {len(widths)} numbers, and an item has {num_codes} codes")
    if widths[-1] < k:
        raise InputError(f"--beams {beams}: {widths[-1]} after the last code find no {k} items (-k)")
    return widths, margin


def control_of(
    masks: FilterMasks, among: list[str] | None, quotas: list[str], diversity: float, k: int
) -> Control | None:
    """What the options ask of a list besides good items; None: nothing.

    Raises:
        InputError: a quota that is none, or several that need more items than the list has.
    """
    from rayrec.pipelines.inference.answers import Control, Quota
    from rayrec.pipelines.inference.item_filter import ItemFilter

    if not (among or quotas or diversity):
        return None
    wanted = []
    for each in quotas:
        category, at_least, at_most = quota_of(each)
        found = masks.allowed(ItemFilter(where=category))
        if found.unknown_value is not None:
            raise InputError(f"--quota {each}: {found.unknown_value}")
        wanted.append(Quota(found.allowed_I, at_least, at_most))
    if (needed := sum(each.at_least for each in wanted)) > k:
        raise InputError(f"--quota: at least {needed} items in all are more than the {k} of the list (-k)")
    return Control(tuple(wanted), diversity, len(among) if among else None)


def _told(item: Recommendation) -> dict[str, Any]:
    from dataclasses import asdict

    # A position is of one catalog, and an id of all.
    return {name: value for name, value in asdict(item).items() if name != "position"}


def quota_of(said: str) -> tuple[dict[str, list[str]], int, int | None]:
    """(Columns and values of the category, least items, most items) of a text as COLUMN=VALUE:LEAST-MOST.

    Raises:
        InputError: it is another text.
    """
    category, _, counts = said.rpartition(":")
    column, sign, value = category.partition("=")
    least, dash, most = counts.partition("-")
    numbers = [each for each in (least, most) if each]
    if not (sign and dash and numbers and all(each.isdecimal() for each in numbers)):
        raise InputError(f"--quota {said}: expected COLUMN=VALUE:LEAST-MOST, such as genre=Drama:1-3")
    at_least, at_most = int(least or 0), int(most) if most else None
    if at_most is not None and at_least > at_most:
        raise InputError(f"--quota {said}: {at_least} items at least are more than {at_most} at most")
    return {column: [value]}, at_least, at_most
