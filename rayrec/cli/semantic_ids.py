"""`tokenize`: semantic IDs for the items of a data set, fitted, extended, read from others, or compared."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from rayrec.cli.app import app
from rayrec.cli.data import preparing_cluster
from rayrec.cli.run_options import check_data, given_options, refuse_without_effect
from rayrec.platform.console import Answer, command, new_table, out, print_rows, progress_bar
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, TokenizeReport


class Collisions(StrEnum):
    extra_digit = "extra_digit"
    reassign = "reassign"
    share = "share"


@command(app, "tokenize")
def tokenize_command(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(help="Data set that `rayrec prepare` wrote.")],
    to: Annotated[
        Path | None, typer.Option("--out", help="Folder of the registry [DATA/semantic_ids].")
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option(help="Folder of semantic IDs whose items keep theirs; DATA's other items get new ones."),
    ] = None,
    published: Annotated[Path | None, typer.Option(help="JSON file of codes that others published.")] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of semantic IDs of DATA's items to measure; may be repeated."),
    ] = None,
    vectors: Annotated[
        str,
        typer.Option(
            help="What the codes are made of: interactions, text, both (of these), content, graph, image, or "
            "a source of another package; several joined by + or commas."
        ),
    ] = "interactions",
    vector_setting: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the source image or one of another package; may be repeated."),
    ] = None,
    vector_file: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE.npy for vectors computed elsewhere, such as of images; the items' keys are in "
            "FILE.txt, one a line; may be repeated."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="What makes codes of vectors: rq_kmeans, balanced_rq_kmeans, rq_vae, letter, opq, or one of "
            "another package."
        ),
    ] = "rq_kmeans",
    levels: Annotated[int, typer.Option(min=1, max=8, help="Codes of an item.")] = 3,
    codebook_size: Annotated[
        int | None,
        typer.Option(
            min=2, max=32_768, help="Values a code may have [--max-codebook-size, fewer for a small catalog]."
        ),
    ] = None,
    max_codebook_size: Annotated[
        int, typer.Option(min=2, max=32_768, help="Most values that a code gets without --codebook-size.")
    ] = 256,
    collisions: Annotated[
        Collisions,
        typer.Option(help="Items with the same codes: a further digit, other codes, or a tuple they share."),
    ] = Collisions.extra_digit,
    text_weight: Annotated[float, typer.Option(help="Weight of text beside interactions.")] = 1.0,
    window: Annotated[int, typer.Option(min=1, help="Places between events that count as neighbors.")] = 5,
    dim: Annotated[int, typer.Option(min=1, help="Width of interaction vectors.")] = 64,
    components: Annotated[int, typer.Option(min=1, help="Principal components that are clustered.")] = 64,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds over the vectors, epochs of RQ-VAEs [25, 100]."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the clustering.")] = 0,
    key_offset: Annotated[
        int, typer.Option(help="Added to the published file's keys, where it counts from another number.")
    ] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Other IDs that lie there may go, and runs of them with them.")
    ] = False,
    categories: Annotated[
        str | None,
        typer.Option(help="Column of the items by which prefixes are measured \\[one that is called so]."),
    ] = None,
    large_catalog: Annotated[
        int,
        typer.Option(
            min=1,
            help="Items from which on a catalog is tokenized in tasks with files between them, and the "
            "tokenizer learns a sample of it.",
        ),
    ] = 500_000,
    fit_items: Annotated[
        int, typer.Option(min=1, help="Items of a large catalog that the tokenizer learns.")
    ] = 262_144,
    use_ray: Annotated[
        bool | None,
        typer.Option(
            "--ray/--no-ray", help="Tokenize a large catalog in tasks on Ray \\[yes], or in this process."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Of a large catalog: go on with what an interrupted tokenization has done, if there is one.",
        ),
    ] = False,
    spill: Annotated[
        Path | None,
        typer.Option(
            help="Of a large catalog: folder for the files between the passes, some 1.5 kB an item and 160 "
            "bytes a training event \\[beside the registry]; all nodes have to see it."
        ),
    ] = None,
) -> Answer:
    """Give every item of a data set its semantic ID, and say what the IDs are like."""
    _refuse_without_effect(context)
    vector_settings = _settings(vector_setting or [], "--vector-setting")
    # A name of a file is no YAML, in which "a #1.npy" ends before the comment.
    vector_files = _assigned(vector_file or [], "--vector-file", "NAME=FILE.npy")
    check_data(data)
    # What is wrong with the arguments is said before this takes seconds to import.
    from rayrec.pipelines.semantic_ids import tokenization as pipeline

    if compare:
        reports = pipeline.compare(data, compare, categories)
        print_rows("Semantic IDs compared", [_row(*entry) for entry in enumerate(reports, start=1)])
        out.print(_levels_table("Level by level", reports))
        return {"registries": [_answer(report) for report in reports]}
    if published is not None:
        report = pipeline.import_published(
            data, published, to, collisions.value, key_offset, codebook_size, categories, overwrite
        )
    elif extend is not None:
        with progress_bar("texts") as progress:
            report = pipeline.extend(data, extend, to, progress, categories, overwrite, vector_files)
    else:
        config = pipeline.TokenizeConfig.parse(
            {
                "vectors": vectors,
                "vector_settings": vector_settings,
                "vector_files": vector_files,
                "tokenizer": tokenizer,
                "num_levels": levels,
                "codebook_size": codebook_size,
                "max_codebook_size": max_codebook_size,
                "iterations": iterations,
                "collisions": collisions.value,
                "text_weight": text_weight,
                "window": window,
                "dim": dim,
                "components": components,
                "seed": seed,
                "large_catalog": large_catalog,
                "fit_items": fit_items,
                "categories": categories,
            },
            source="rayrec tokenize",
        )
        if (num_items := pipeline.catalog_size(data)) >= large_catalog:
            report = _tokenized_large(data, to, config, overwrite, use_ray is not False, resume, spill)
        else:
            _refuse_for_small(context, num_items, large_catalog)
            with progress_bar("texts") as progress:
                report = pipeline.tokenize(data, to, config, progress, overwrite)
    print_rows("Semantic IDs", _rows(report))
    out.print(_levels_table("Level by level", [report]))
    if "vectors" in report.report:
        out.print(_vectors_table(report.report["vectors"]))
    return _answer(report)


def _tokenized_large(
    data: Path,
    to: Path | None,
    config: TokenizeConfig,
    overwrite: bool,
    use_ray: bool,
    resume: bool,
    spill: Path | None,
) -> TokenizeReport:
    from rayrec.pipelines.semantic_ids.tokenization import LargeCatalog, check_in_parts, tokenize

    check_in_parts(data, config)  # before Ray takes seconds to start
    with progress_bar("tokenize") as update:
        large = LargeCatalog(
            progress=lambda stage, done, total: update(done, total, stage), resume=resume, spill=spill
        )
        if not use_ray:
            return tokenize(data, to, config, None, overwrite, large)
        from rayrec.platform.ray_tasks import run_tasks_on_ray

        with preparing_cluster():
            return tokenize(data, to, config, None, overwrite, replace(large, run_tasks=run_tasks_on_ray))


_OF_LARGE = ("fit_items", "use_ray", "resume", "spill")


def _refuse_for_small(context: typer.Context, num_items: int, large_catalog: int) -> None:
    """Raises InputError for an option that says how a large catalog is tokenized."""
    why = f"is for large catalogs, and this one has {num_items:,} items; lower --large-catalog"
    refuse_without_effect(context, _OF_LARGE, f"{why} ({large_catalog:,})")


def _assigned(assignments: list[str], option: str, form: str) -> dict[str, str]:
    """Divide assignments.

    Raises:
        InputError: one is not of the form, or a name is there twice.
    """
    found: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not key or not equals:
            raise InputError(f"{option} {assignment}: expected the form {form}")
        if key in found:
            raise InputError(f"{option} {assignment}: {key} is named twice; keep one of them")
        found[key] = value
    return found


def _settings(assignments: list[str], option: str) -> dict[str, Any]:
    """The same with values in YAML.

    Raises:
        InputError: as `_assigned`, or a value is no YAML.
    """
    settings: dict[str, Any] = {}
    for key, value in _assigned(assignments, option, "KEY=VALUE").items():
        try:
            settings[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:  # the latter of 2026-02-30
            raise InputError(f"{option} {key}={value}: the value is not valid YAML") from error
    return settings


_WAYS = {
    "extend": {"to", "categories", "overwrite", "vector_file"},
    "published": {"to", "collisions", "codebook_size", "key_offset", "categories", "overwrite"},
    "compare": {"categories"},
}
"""Options that go with each of these; all but those of publication go with none of them."""


def _refuse_without_effect(context: typer.Context) -> None:
    """An option that would change nothing is a misunderstanding, not a detail.

    Raises:
        InputError: names the option.
    """
    given = given_options(context) - {"data"}
    ways = [way for way in _WAYS if way in given]
    if len(ways) > 1:
        raise InputError(f"--{ways[0]} and --{ways[1]} are two different things to do; leave one of them out")
    if ways:
        idle = given - _WAYS[ways[0]] - {ways[0]}
        refuse_without_effect(context, idle, f"has no effect with --{ways[0]}")
    else:
        refuse_without_effect(context, {"key_offset"}, "goes with --published")
    if "codebook_size" in given:
        refuse_without_effect(context, {"max_codebook_size"}, "has no effect with --codebook-size")


def _answer(report: Any) -> Answer:
    facts = {"path": str(report.path), "num_without_data": report.num_without_data, **report.report}
    return facts | ({"of_other_data": list(report.of_other_data)} if report.of_other_data else {})


def _rows(report: Any) -> list[tuple[str, str]]:
    facts = report.report
    rows = [
        ("registry", f"{report.path}, version {facts['version']}"),
        ("method", facts["method"]),
        ("items", f"{facts['num_items']:,}"),
    ]
    if extension := facts.get("extension"):
        rows.append(
            (
                "new items",
                f"{extension['items']:,} in all extensions, {extension['without_data']:,} without any data, "
                f"{extension['moved_to_another_tuple']:,} moved to another tuple for want of room",
            )
        )
    else:
        rows.append(("without any data", f"{report.num_without_data:,}"))
    if report.of_other_data:
        rows.append(
            (
                "of other data",
                f"{', '.join(report.of_other_data)}: vectors of a model of another data set; if it "
                "was trained on what this one keeps for validation or test, that leaks into the codes",
            )
        )
    rows.append(("collisions", f"{_collisions(facts)}; policy {facts['collision_policy']}"))
    return rows + ([("next items", _next_items(facts))] if "next_items" in facts else [])


def _row(place: int, report: Any) -> tuple[str, str]:
    facts = report.report
    text = f"{report.path}: {facts['method']}; collisions: {_collisions(facts)}"
    return str(place), text + (f"; next items: {_next_items(facts)}" if "next_items" in facts else "")


def _next_items(facts: dict[str, Any]) -> str:
    """How many items that users met next share the first codes with the one before."""
    levels = facts["next_items"]["levels"]
    shares = [f"{100 * each['same']:.1f} % ({100 * each['by_chance']:.2f} by chance)" for each in levels]
    return f"first codes in common: {', '.join(shares)}"


def _collisions(facts: dict[str, Any]) -> str:
    counts = facts["collisions"]
    items, groups, largest = counts["items"], counts["groups"], counts["largest_group"]
    return f"{items:,} items in {groups:,} tuples, at most {largest:,} in one"


def _levels_table(title: str, reports: list[Any]) -> Table:
    """A row for each level of each registry: codes used, perplexity of the codes; number, entropy and largest
    of the prefixes; reconstruction error and purity of the prefixes."""
    purity = [report.report["purity"] for report in reports if "purity" in report.report]
    if purity:
        title += f" (purity by {purity[0]['column']}, and by chance)"
    several = len(reports) > 1
    columns = ["#"] * several + ["level", "codes", "perpl.", "prefixes", "bits", "most", "error"]
    columns += ["purity"] * bool(purity)
    table = new_table(title, columns, figures=columns)
    table.caption = "perpl.: of codes; bits: entropy of prefixes; most: items of one; error: part not coded"
    for place, report in enumerate(reports, start=1):
        facts = report.report
        errors = facts.get("reconstruction_error") or []
        pure = facts.get("purity", {}).get("levels", [])
        for number, level in enumerate(facts["levels"]):
            cells = [
                str(number + 1) if number < facts["num_codebooks"] else "digit",
                f"{level['used']:,}/{level['size']:,}",
                f"{level['perplexity']:.1f}",
                f"{level['prefixes']:,}",
                f"{level['prefix_entropy']:.2f}",
                f"{level['largest_prefix']:,}",
                f"{errors[number]:.3f}" if number < len(errors) else "",
            ]
            if purity:
                cells.append(_share(pure[number]) if number < len(pure) else "")
            if several:
                cells = [str(place) if number == 0 else "", *cells]
            table.add_row(*map(escape, cells), end_section=number == len(facts["levels"]) - 1)
    return table


def _vectors_table(facts: dict[str, Any]) -> Table:
    """A row for each kind of vectors: what it knows, and how near the next item of a user is."""
    title = f"Item vectors, by what {facts['pairs']:,} users met next"
    metrics = [key for key in facts["blocks"][0] if key.startswith("recall")]
    figures = ("width", "items", "both known", *metrics)
    table = new_table(title, ("vectors", *figures), figures)
    overlap = [f"{pair}: {share:.2f}" for pair, share in facts["overlap"].items() if share is not None]
    table.caption = "recall: the next item is among the nearest of the newest; both known: both have vectors"
    if overlap:
        table.caption += f"\n10 nearest in common: {escape('; '.join(overlap))}"
    for block in facts["blocks"]:
        recalls = [f"{block[metric]:.3f}" for metric in ("known_pairs", *metrics)]
        table.add_row(escape(block["name"]), f"{block['dim']:,}", f"{block['items']:,}", *recalls)
    return table


def _share(purity: dict[str, Any]) -> str:
    if purity["purity"] is None:
        return "-"
    return f"{purity['purity']:.2f}/{purity['by_chance']:.2f}"
