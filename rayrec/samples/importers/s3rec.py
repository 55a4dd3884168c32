"""The layout `s3rec`: lines of a user and its items in `NAME.txt`, times of the events in `NAME_time.txt`.

SASRec, S3-Rec and TIGER publish such files without times: then the order of the file is believed, and the
data set says so. A user may have several lines, as in SASRec's, which have one item each.

With times, both files start a line with the user id, then one entry per event. `items.tsv` (tab-separated, no
quoting) and `NAME_item2attributes.json` describe the items. The times have whole days, and within a
day the lines stand in the order of the item number: nothing but the time may order these events.

Source: Zhou et al., "S3-Rec", CIKM 2020, https://github.com/aHuiWang/CIKM2020-S3Rec
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers.importer import Importer
from rayrec.samples.importers.tables import (
    RawTable,
    RawTables,
    files_of,
    parse_json,
    read_table,
    read_text,
    rename,
    visible,
)

_TIMES = "_time.txt"


class S3RecImporter(Importer):
    """Reads the files of S3-Rec."""

    EXPECTS = "S3-Rec's NAME.txt with NAME_time.txt"
    NAMES_COLUMNS = False

    @classmethod
    def recognizes(cls, source: Path) -> bool:
        return _sequences(source) is not None or (source.is_dir() and any(visible(source, f"*{_TIMES}")))

    def read(self, source: Path, config: PrepareConfig) -> RawTables:
        times = visible(source, f"*{_TIMES}") if source.is_dir() else []
        if not times and (lines := _sequences(source)) is not None:
            folder, name = lines.parent, lines.stem
            return RawTables(
                name=name,
                interactions=sequences(lines),
                items=_items(folder / "items.tsv", folder / f"{name}_item2attributes.json"),
                order_is_time=True,
            )
        if len(times) != 1:
            raise InputError(
                f"{source}: expected exactly one NAME{_TIMES}, found {len(times)} among {files_of(source)}"
            )
        name = times[0].name.removesuffix(_TIMES)
        return RawTables(
            name=name,
            interactions=_interactions(source / f"{name}.txt", times[0]),
            items=_items(source / "items.tsv", source / f"{name}_item2attributes.json"),
        )


def _sequences(source: Path) -> Path | None:
    """The only text file of lines of ids, if there is just one: the source itself, or a file of it."""
    files = [source] if source.is_file() else visible(source, "*.txt")
    files = [file for file in files if file.suffix == ".txt" and are_sequences(file)]
    return files[0] if len(files) == 1 else None


def are_sequences(file: Path) -> bool:
    """Whether the first line of a text file is of ids: a user's and its items'."""
    with file.open("rb") as opened:
        words = opened.readline(1 << 20).removeprefix(b"\xef\xbb\xbf").split()
    return len(words) > 1 and all(word.isdigit() for word in words)


def sequences(file: Path, seen: Counter[str] | None = None) -> RawTable:
    """The events of lines `user item item ...`; their times count the events of a user from 0.

    Args:
        seen: events of each user in files before this one; this file's are added.
    """
    users: list[str] = []
    items: list[str] = []
    times: list[int] = []
    lines: list[int] = []
    seen = Counter() if seen is None else seen
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        user, *of_user = line.split() or [""]
        users += [user] * len(of_user)
        items += of_user
        times += range(seen[user], seen[user] + len(of_user))
        lines += [number] * len(of_user)
        seen[user] += len(of_user)
    table = pa.table(
        {
            "user_id": pa.array(users, pa.string()),
            "item_id": pa.array(items, pa.string()),
            "timestamp": pa.array(times, pa.int64()),
        }
    )
    return RawTable(table, str(file), lambda row: f"{file} line {lines[row]}")


def _interactions(items_file: Path, times_file: Path) -> RawTable:
    if not items_file.is_file():
        raise InputError(f"{items_file}: no such file; expected the items to the times of {times_file.name}")
    item_lines = [line.split() for line in read_text(items_file).splitlines()]
    time_lines = [line.split() for line in read_text(times_file).splitlines()]
    if len(item_lines) != len(time_lines):
        raise InputError(
            f"{times_file}: {len(time_lines)} lines, but {items_file.name} has {len(item_lines)}; "
            "expected one line per user in both"
        )
    for number, (items, times) in enumerate(zip(item_lines, time_lines, strict=True), start=1):
        if items[:1] != times[:1]:
            raise InputError(
                f"{times_file} line {number}: user {' '.join(times[:1])!r}, but {items_file.name} has user "
                f"{' '.join(items[:1])!r} there; expected the same users in the same order"
            )
        if len(items) != len(times):
            raise InputError(
                f"{times_file} line {number}: {len(times) - 1} times for {len(items) - 1} items; "
                "expected one time per item"
            )
    lengths_U = np.array([max(len(items) - 1, 0) for items in item_lines], dtype=np.int64)
    table = pa.table(
        {
            "user_id": pa.array([line[0] for line in item_lines if line for _ in line[1:]], pa.string()),
            "item_id": pa.array([item for line in item_lines for item in line[1:]], pa.string()),
            "timestamp": pa.array([time for line in time_lines for time in line[1:]], pa.string()),
        }
    )
    stops_U = np.cumsum(lengths_U)

    def where(row: int) -> str:
        user = int(np.searchsorted(stops_U, row, side="right"))
        entry = row - int(stops_U[user] - lengths_U[user]) + 1
        return f"{items_file} line {user + 1} entry {entry}"

    return RawTable(table, str(items_file), where)


def _items(table_file: Path, attributes_file: Path) -> RawTable | None:
    attributes = _attributes(attributes_file)
    if not table_file.is_file():
        if attributes is None:
            return None
        table = pa.table(
            {"item_id": list(attributes), "attributes": pa.array(attributes.values(), _ATTRIBUTES)}
        )
        return RawTable(table, str(attributes_file), lambda row: f"{attributes_file} entry {row + 1}")
    text = ("item_id", "asin", "title", "textual_id")
    raw = rename(read_table(table_file, text, quoted=False), {}, ("item_id",))
    if attributes is None:
        return raw
    column = pa.array([attributes.get(key) for key in raw.table["item_id"].to_pylist()], _ATTRIBUTES)
    return RawTable(raw.table.append_column("attributes", column), raw.file, raw.where)


_ATTRIBUTES = pa.list_(pa.int64())


def _attributes(path: Path) -> dict[str, list[int]] | None:
    if not path.is_file():
        return None
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected {{item: [attribute number, ...]}} in JSON")
    try:
        attributes = parse_json(read_text(path))
        pa.array(attributes.values(), _ATTRIBUTES)
    except (ValueError, AttributeError, pa.ArrowException) as error:
        raise InputError(f"{path}: expected {{item: [attribute number, ...]}} in JSON: {error}") from error
    return attributes
