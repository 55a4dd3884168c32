"""`text prepare` and `text tokenizer`: data sets of text for language models, and what reads them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rayrec.cli.app import text_app
from rayrec.cli.runs import OverridesOption
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
        OnBadRows | None, typer.Option(help="At a row that is no record: stop, or drop it and count [stop].")
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
    out.print(f"{out_folder}: {info.num_tokens:,} tokens")
    return {"folder": str(out_folder), "tokens": info.num_tokens}
