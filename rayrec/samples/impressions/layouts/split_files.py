"""Which file of a folder is for which split, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.importers.tables import files_of
from rayrec.samples.impressions.source import SPLITS, SplitName

_STEMS: dict[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "dev", "val"),
    "test": ("test",),
}


def split_files(
    folder: Path, suffixes: Sequence[str], is_labeled: Callable[[Path], bool] = lambda path: True
) -> dict[SplitName, Path]:
    """The files `train`, `valid` (or `dev`) and `test` with one of the suffixes; or `train` alone, to be
    divided. A file without labels, as competitions publish for testing, is no split.

    Raises:
        InputError: two files for one split, or one split without any.
    """
    found: dict[SplitName, Path] = {}
    for split in SPLITS:
        paths = [folder / f"{stem}{suffix}" for stem in _STEMS[split] for suffix in suffixes]
        there = [path for path in paths if path.exists()]
        if len(there) > 1:
            names = " and ".join(path.name for path in there)
            raise InputError(f"{folder}: {names} are both there; keep the one that is for {split}")
        if there and (split == "train" or is_labeled(there[0])):
            found[split] = there[0]
    if set(found) not in ({"train"}, set(SPLITS)):
        missing = ", ".join(" or ".join(_STEMS[split]) for split in SPLITS if split not in found)
        raise InputError(
            f"{folder}: no file named {missing}; expected one each for train, valid (or dev) and test, or "
            f"train alone, ending in {' or '.join(suffix or 'nothing' for suffix in suffixes)}; "
            f"found {files_of(folder)}"
        )
    return found
