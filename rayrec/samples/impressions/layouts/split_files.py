"""Which file of a folder is for which split, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.importers.tables import GIVEN_SPLITS, files_of, find_table
from rayrec.samples.impressions.source import SPLITS, SplitName


def split_files(
    folder: Path, suffixes: Sequence[str], is_labeled: Callable[[Path], bool] = lambda path: True
) -> dict[SplitName, Path]:
    """The files `train`, `valid` and `test` with one of the suffixes; or `train` alone, to be divided.

    They may have another usual name, such as `validation`. A file without labels, as competitions publish for
    testing, is no split.

    Raises:
        InputError: two files for one split, or one split without any.
    """
    found: dict[SplitName, Path] = {}
    stems = dict(zip(SPLITS, GIVEN_SPLITS, strict=True))
    for split in SPLITS:
        path = find_table(folder, *stems[split], suffixes=suffixes)
        if path is not None and (split == "train" or is_labeled(path)):
            found[split] = path
    if set(found) not in ({"train"}, set(SPLITS)):
        missing = ", ".join(" or ".join(stems[split]) for split in SPLITS if split not in found)
        raise InputError(
            f"{folder}: no file named {missing}; expected one each for train, valid (or dev) and test, or "
            f"train alone, ending in {' or '.join(suffix or 'nothing' for suffix in suffixes)}; "
            f"found {files_of(folder)}"
        )
    return found
