"""Searches that are not over, beside the records: what one needs to go on where its folder is gone.

RECORDS/searches/ROW/search.json      recipe, budget and space, the commits that trials were trained with, and
                                      the journal
RECORDS/searches/ROW/semantic_ids/    that trials were trained with: another machine makes others

A search of an expensive method takes many hours, and its folder below .cache is easily lost. Runs of its
trials are not kept: those that lead are trained again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.folder import JOURNAL_FILE, TuningFolder
from rayrec.pipelines.tuning.space import SearchSpace
from rayrec.platform.errors import InputError
from rayrec.platform.files import unfinished_suffix, write_atomically, write_json

FOLDER = "searches"
"""Of the records."""
_SEARCH, _IDS = "search.json", "semantic_ids"


class KeptSearch:
    """The search of one row."""

    def __init__(self, path: Path, what: Mapping[str, Any]) -> None:
        """
        Args:
            what: what is searched for: the row's recipe, the budget, the space.
        """
        self._path = path
        self._what = json.loads(json.dumps(what))

    def begin(self, semantic_ids: str | None, commits: Sequence[str]) -> Path | None:
        """Note what goes on with the search, and give the semantic IDs that its trials are trained with.

        Args:
            semantic_ids: folder of those that are taken where nothing is kept yet.
            commits: of the code that trains, besides those that are noted.

        Raises:
            InputError: what is kept is another search.
        """
        kept = self._read() if self._file.is_file() else {"what": self._what, "commits": [], "journal": []}
        if kept["what"] != self._what:
            raise InputError(
                f"{self._path}: the search of another recipe, budget or space is kept here; delete it to "
                "begin again"
            )
        self._write({**kept, "commits": list(dict.fromkeys([*kept["commits"], *commits]))})
        if semantic_ids is None:
            return None
        ids = self._path / _IDS
        if not ids.is_dir():
            whole = ids.with_name(_IDS + unfinished_suffix())
            shutil.copytree(semantic_ids, whole)
            whole.rename(ids)
        return ids

    @property
    def commits(self) -> str:
        """Of all code that trials were trained with."""
        return " ".join(self._read()["commits"])

    def restore(self, folder: TuningFolder, tuning: TuningConfig) -> None:
        """Make the folder of the search again where it is gone, or knows less than what is kept."""
        journal = self._read()["journal"]
        known = 1 + len(folder.read_journal()[1]) if folder.holds_search else 0
        if known >= len(journal):
            return
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.begin(tuning, SearchSpace.of(tuning), journal[0])
        lines = "".join(f"{json.dumps(line)}\n" for line in journal)
        write_atomically(folder.path / JOURNAL_FILE, lines.encode())

    def keep(self, folder: TuningFolder) -> None:
        """Keep what the search has tried until now."""
        lines = (folder.path / JOURNAL_FILE).read_text().splitlines()
        self._write({**self._read(), "journal": [json.loads(line) for line in lines]})

    def forget(self) -> None:
        """Delete what is kept: the search is over."""
        shutil.rmtree(self._path)

    @property
    def _file(self) -> Path:
        return self._path / _SEARCH

    def _read(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self._file.read_bytes())
        return read

    def _write(self, search: Mapping[str, Any]) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        write_json(self._file, search)
