"""What an importer is: one layout of source files, and the settings to read it with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from rayrec.platform.config import Config
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.found import FoundTables
from rayrec.samples.importers.tables import RawTables


class Importer(Config, ABC):
    """Reads sources of one layout; its fields are the layout's settings (`PrepareConfig.layout_settings`)."""

    EXPECTS: ClassVar[str]
    """The files that make a source of this layout, for messages: "RecBole's *.inter"."""
    NAMES_COLUMNS: ClassVar[bool] = True
    """Whether `PrepareConfig.columns` can say what columns are called; where not, it is refused."""

    HAS_NAMES: ClassVar[bool] = False
    """Whether `PrepareConfig.names` can name columns of files without a header; where not, it is refused."""
    READS_URLS: ClassVar[bool] = False
    """Whether a source may be a `RemotePath`, which has the methods of `Path` that readers of tables use."""

    @classmethod
    @abstractmethod
    def recognizes(cls, source: Path) -> bool:
        """Whether an existing file or folder looks like this layout, judged by the names of its files."""

    def find(self, source: Path, config: PrepareConfig) -> FoundTables | None:
        """Find the files of a source whose log can be read in parts; None where all is read at once.

        Raises:
            InputError: a file is missing.
        """
        return None

    @abstractmethod
    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        """Read the tables of a source. Values are checked afterwards, by `rayrec prepare`.

        Raises:
            InputError: a file is missing or not as the layout says.
        """
