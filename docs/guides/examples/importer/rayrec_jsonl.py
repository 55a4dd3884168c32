"""The layout `jsonl`: a log of events with one JSON object per line."""

from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.json as pa_json

from rayrec import InputError
from rayrec.samples import Importer, PrepareConfig, RawTable, RawTables


class JsonLinesImporter(Importer):
    """Reads `NAME.jsonl`; the settings say what the keys are called."""

    EXPECTS: ClassVar[str] = "a log of events in a .jsonl file"

    user: str = "user_id"
    item: str = "item_id"
    time: str = "timestamp"

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return source.suffix == ".jsonl"

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        try:
            table = pa_json.read_json(source)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{source}: cannot be read as JSON Lines: {error}") from error
        roles = {self.user: "user_id", self.item: "item_id", self.time: "timestamp"}
        for name in roles:
            if name not in table.column_names:
                raise InputError(f"{source}: no key {name!r}; found {', '.join(table.column_names)}")
        table = table.rename_columns([roles.get(name, name) for name in table.column_names])
        events = RawTable(table, str(source), where=lambda row: f"{source} object {row + 1}")
        return RawTables(name=source.stem, interactions=events)
