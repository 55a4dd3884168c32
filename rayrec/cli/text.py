"""`text prepare`, `tokenizer`, `export`, `take-back`: data sets of text for language models, what reads them,
and the way to other trainers and back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rayrec.cli.app import text_app
from rayrec.cli.run_options import OverridesOption, WhichOption, check_run, refuse_without_effect
from rayrec.platform.console import Answer, command, out, print_rows, progress_bar


class RecordKind(StrEnum):
    text = "text"
    messages = "messages"
    prompt = "prompt"
    spans = "spans"
    choice = "choice"


class OnBadRows(StrEnum):
    stop = "stop"
    drop = "drop"


class RowForm(StrEnum):
    messages = "messages"
    prompt = "prompt"
    text = "text"
    tokens = "tokens"


class RowFiles(StrEnum):
    jsonl = "jsonl"
    parquet = "parquet"


@command(text_app, "prepare")
def prepare_text_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files of records (JSON lines, Parquet, CSV, TSV), folders of them, or URLs.",
        ),
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the data set to write.")],
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with settings; see configs/text.yaml.")
    ] = None,
    overrides: OverridesOption = None,
    kind: Annotated[
        RecordKind | None, typer.Option(help="Kind of all records; if not given, each row says it.")
    ] = None,
    on_bad_rows: Annotated[
        OnBadRows | None,
        typer.Option(help="At a row that is no record: stop, or drop it and count it \\[stop]."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing data set of text.")] = False,
) -> Answer:
    """Turn records of text into a data set: checked, cleaned, split."""
    from rayrec.samples.text.prepare import TextPrepareConfig, prepare_text

    given: list[str] = list(overrides or ())
    options: dict[str, Any] = {"kind": kind, "on_bad_rows": on_bad_rows}
    given += [f"{name}={value.value}" for name, value in options.items() if value is not None]
    given += ["overwrite=true"] if overwrite else []
    if config_file is not None:
        config = TextPrepareConfig.load(config_file, given)
    else:
        config = TextPrepareConfig.of_overrides(given, "rayrec text prepare")
    with progress_bar("text") as update:
        report = prepare_text(
            inputs, out_folder, config, lambda phase, done, total: update(done, total, phase)
        )
    print_rows("Text", report.rows())
    return report.to_json()


@command(text_app, "tokenizer")
def write_tokenizer_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Model in GGUF format.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the tokenizer to write.")],
) -> Answer:
    """Write the tokenizer and chat template of a GGUF file as a folder, which model.tokenizer names."""
    from rayrec.samples.text.tokens import TextTokenizer, write_tokenizer_of_gguf

    write_tokenizer_of_gguf(file, out_folder)
    info = TextTokenizer.extended(out_folder).info
    out.print(f"{out_folder}: {info.num_tokens:,} tokens", markup=False)
    return {"folder": str(out_folder), "tokens": info.num_tokens}


@command(text_app, "export")
def export_text_command(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder that `rayrec text prepare` wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for what is handed over.")],
    run: Annotated[
        Path | None,
        typer.Option(help="Run of a language model to hand over as well; its template shapes the rows."),
    ] = None,
    snapshot: WhichOption = "best",
    form: Annotated[
        RowForm | None,
        typer.Option(
            help="What a row is: messages (ms-swift, LLaMA-Factory, verl), prompt and completion, or tokens "
            "with labels (TRL), one text (torchtitan) \\[messages; prompt where the run writes no chat "
            "template]."
        ),
    ] = None,
    files: Annotated[RowFiles, typer.Option(help="JSON lines or Parquet.")] = RowFiles.jsonl,
) -> Answer:
    """Hand a data set of text, and a run's model, over to another trainer."""
    from rayrec.pipelines.inference.handover import write_handover

    if run is None:
        refuse_without_effect(context, {"snapshot"}, "is of a run, which --run names")
    else:
        check_run(run)
    with progress_bar("export") as update:
        written = write_handover(
            data,
            folder,
            run=run,
            which=snapshot,
            form=None if form is None else form.value,
            files=files.value,
            on_records=update,
        )
    rows = [(name, f"{entry.rows:,} rows") for name, entry in written.files.items()]
    rows += [("left out, " + why, f"{count:,} records") for why, count in written.left_out.items()]
    rows += [("form", written.form), ("to be learned", written.learned)]
    if written.model is not None:
        rows.append(("model", f"{folder / 'model'}, after step {written.model.step:,}"))
    print_rows(f"Handed over: {folder}", rows)
    return {
        "folder": str(folder),
        "form": written.form,
        "files": {name: entry.rows for name, entry in written.files.items()},
        "left_out": written.left_out,
        "model": None if written.model is None else str(folder / "model"),
    }


@command(text_app, "take-back")
def take_back_command(
    handover: Annotated[
        Path, typer.Argument(metavar="HANDOVER", help="Folder that `rayrec text export --run` wrote.")
    ],
    trained: Annotated[
        Path,
        typer.Argument(
            metavar="TRAINED", help="What the trainer wrote: a folder of Hugging Face, or an adapter of PEFT."
        ),
    ],
    out_folder: Annotated[Path, typer.Option("--out", help="New folder, which model.base can name.")],
) -> Answer:
    """Take back what another trainer made of a model that was handed over."""
    from rayrec.pipelines.inference.taken_back import take_back

    found = take_back(handover, trained, out_folder)
    compared = "the same" if found.has_tokenizer else "none was written; that of the hand-over is taken"
    print_rows(
        f"Taken back: {out_folder}",
        [
            ("weights", f"{found.num_parameters:,}" + (", an adapter merged" if found.is_adapter else "")),
            ("tokenizer", compared),
            ("largest change of a logit", f"{found.difference:.3g} of their spread"),
            *([("trained", "no: logits are those that were handed over")] if found.is_untouched else []),
        ],
    )
    return {
        "folder": str(out_folder),
        "parameters": found.num_parameters,
        "adapter": found.is_adapter,
        "tokenizer_compared": found.has_tokenizer,
        "logit_difference": found.difference,
        "untouched": found.is_untouched,
    }
