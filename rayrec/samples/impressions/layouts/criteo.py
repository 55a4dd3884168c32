"""The layout `criteo`: the Criteo display advertising challenge, and what is cut from it.

Tab-separated, no header, no quoting: label, I1 to I13 (integers, I2 also negative), C1 to C26 (hashes as
hex). An empty value is missing. Kaggle's `train.txt` is in order of time; its `test.txt` has no labels.
Source: https://www.kaggle.com/c/criteo-display-ad-challenge/data
"""

from __future__ import annotations

from pathlib import Path

from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.importers.delimited import DelimitedFile, first_line
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.layouts.split_files import split_files
from rayrec.samples.impressions.source import ImpressionSource, SourcePart, SplitName

NUMBERS = tuple(f"I{number}" for number in range(1, 14))
IDS = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *NUMBERS, *IDS)

_SUFFIXES = (".tsv", ".txt", ".tsv.gz", ".txt.gz")


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source of this layout.

    Raises:
        InputError: a file is missing.
    """
    files = split_files(source, _SUFFIXES, _is_labeled) if source.is_dir() else {"train": source}
    return ImpressionSource(
        name=source.resolve().name.split(".")[0],
        schema=ImpressionSchema(labels=("label",), numbers=NUMBERS, ids={name: name for name in IDS}),
        parts=tuple(_part(path, split if len(files) > 1 else None) for split, path in files.items()),  # type: ignore[arg-type]
        files=tuple(files.values()),
    )


def _is_labeled(path: Path) -> bool:
    return len(first_line(path, "\t", quoted=False)) != len(COLUMNS) - 1


def _part(path: Path, split: SplitName | None) -> SourcePart:
    first_line(path, "\t", quoted=False)  # says that it is empty before anything is written
    file = DelimitedFile(path, COLUMNS, has_header=False, delimiter="\t", quoted=False)
    return SourcePart(file.read, file.where, split)
