"""From what people have on disk to plain tables, one importer per layout.

A new layout is a subclass of `Importer` and a line in `IMPORTERS`, or an entry point of another package in
the group `rayrec.importers`: docs/guides/add-an-importer.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry
from rayrec.platform.remote_files import is_url, located
from rayrec.samples.base.config import PrepareConfig, option
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.roles import check_columns, keep_apart
from rayrec.samples.importers.tables import RawTables, files_of

IMPORTERS: Registry[type[Importer]] = Registry(
    "rayrec.importers",
    "layout",
    {
        "recbole": "rayrec.samples.importers.recbole:RecBoleImporter",
        "movielens": "rayrec.samples.importers.movielens:MovieLensImporter",
        "folder": "rayrec.samples.importers.folder:FolderImporter",
        "splits": "rayrec.samples.importers.given_splits:GivenSplitsImporter",
        "s3rec": "rayrec.samples.importers.s3rec:S3RecImporter",
        "lists": "rayrec.samples.importers.lists:ListsImporter",
        "events": "rayrec.samples.importers.events:EventsImporter",
    },
)
"""`auto` takes the first that recognizes the source."""

_LAST = "events"
"""Recognizes any table, so `auto` tries it after all others, those of other packages included."""


@dataclass(frozen=True)
class RecognizedSource:
    """A source, and the importer that reads it."""

    path: Path
    layout: str
    importer: Importer


def load_source(source: str | Path, config: PrepareConfig) -> tuple[RawTables, str]:
    """Read a source in the layout that is configured or recognized.

    Returns:
        Its tables, and the name of the layout.

    Raises:
        InputError: nothing there, no layout fits, or a file is not as its layout says.
    """
    found = recognize(source, config)
    tables = found.importer.read(found.path, config)
    if config.columns:
        check_columns(tables, config)
    return keep_apart(tables), found.layout


def recognize(source: str | Path, config: PrepareConfig) -> RecognizedSource:
    """Find the importer of a source: that of the configured layout, or the first that recognizes it.

    Raises:
        InputError: nothing there, no layout fits, or a setting has no effect on the layout.
    """
    # Importers of tables use methods that both have.
    path = located(source)
    layouts = _layouts() if config.layout == "auto" else iter([(config.layout, _checked(config.layout))])
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; give the folder or file with the behavior log")
    expected = []
    for layout, importer in layouts:
        if is_url(source) and not importer.READS_URLS:
            if config.layout == layout:
                raise InputError(
                    f"{source}: a source of the layout {layout} is read from this machine alone; copy it to "
                    "a folder"
                )
            continue
        if config.layout == layout or importer.recognizes(path):
            settings = importer.parse(config.layout_settings, source=f"layout_settings of {layout}")
            if config.columns and not importer.NAMES_COLUMNS:
                raise InputError(
                    f"{option('columns', '--column')} has no effect on the layout {layout}, whose columns "
                    "have no names; leave it out"
                )
            if config.names is not None and not importer.HAS_NAMES:
                raise InputError(
                    f"{option('names')} has no effect on the layout {layout}, whose files say what their "
                    "columns are; leave it out"
                )
            return RecognizedSource(path, layout, settings)
        expected.append(importer.EXPECTS)
    raise InputError(f"{path}: no known layout; expected {', '.join(expected)}; found {files_of(path)}")


def _layouts() -> Iterator[tuple[str, type[Importer]]]:
    for name in (*(name for name in IMPORTERS.names() if name != _LAST), _LAST):
        yield name, _checked(name)


def _checked(name: str) -> type[Importer]:
    """The importer of a layout.

    Raises:
        InputError: the entry point of another package is not an importer.
    """
    importer = IMPORTERS[name]
    if not (isinstance(importer, type) and issubclass(importer, Importer) and hasattr(importer, "EXPECTS")):
        raise InputError(f"the layout {name!r} is {importer!r}, expected a subclass of Importer with EXPECTS")
    return importer
