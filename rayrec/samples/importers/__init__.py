"""From what people have on disk to plain tables, one module per layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers import events, folder, movielens, recbole, s3rec
from rayrec.samples.importers.tables import RawTables, files_of

_LAYOUTS: dict[str, tuple[Callable[[Path], bool], Callable[[Path, PrepareConfig], RawTables]]] = {
    "recbole": (recbole.recognizes, recbole.load),
    "movielens": (movielens.recognizes, movielens.load),
    "folder": (folder.recognizes, folder.load),
    "s3rec": (s3rec.recognizes, s3rec.load),
    "events": (events.recognizes, events.load),
}
"""Layout -> (does the source look like it, read it); `auto` takes the first that recognizes it."""


def load_source(source: str | Path, config: PrepareConfig) -> tuple[RawTables, str]:
    """Read a source in the layout that is configured or recognized.

    Returns:
        Its tables, and the name of the layout.

    Raises:
        InputError: nothing there, no layout fits, or a file is not as its layout says.
    """
    path = Path(source)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; give the folder or file with the behavior log")
    layout = config.layout
    if layout == "auto":
        found = [name for name, (recognizes, _) in _LAYOUTS.items() if recognizes(path)]
        if not found:
            raise InputError(
                f"{path}: no known layout; expected interactions.parquet or .csv, RecBole's *.inter, "
                f"MovieLens' u.data or ratings.dat, "
                f"S3-Rec's NAME.txt with NAME_time.txt, or one CSV file of events; found {files_of(path)}"
            )
        layout = found[0]  # type: ignore[assignment]
    _, load = _LAYOUTS[layout]
    return load(path, config), layout
