"""Named lists of items that requests refer to: what is in stock, what a region may see.

PUT /v1/lists/NAME ─► ItemLists ─► NAME.json in a folder that replicas share, replaced whole
request ─► `get` ─► the newest list, looked for on the disk once a second
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayrec.pipelines.inference.item_filter import NamedList
from rayrec.platform.errors import InputError
from rayrec.platform.files import written_whole

LOOK_EVERY_S = 1.0
MOST_MISSING = 1000
"""Names of no list that are remembered, so that their files are not looked for again at once: callers may
make up as many as they like."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_name(name: str) -> None:
    """Check the name of a list.

    Raises:
        InputError: it is none that a file can have.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"the name of a list is of letters, digits, '_', '-' and '.', 100 at most, and begins with none "
            f"of the last two; got {name!r}"
        )


@dataclass
class _Known:
    found: NamedList | None
    stamp: tuple[int, int, int] | None
    """Of the file, when it was read."""
    looked_at: float


class ItemLists:
    """Lists by name, from any thread."""

    def __init__(self, folder: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            folder: of the files, which other replicas share; None: lists are in this process, and gone with
                it.
        """
        self._folder, self._clock = None if folder is None else Path(folder), clock
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def put(self, name: str, keys: Sequence[str]) -> NamedList:
        """Replace a list, or begin it; requests that come from now on go by it.

        Raises:
            InputError: the name cannot be used.
            OSError: the folder cannot be written.
        """
        check_name(name)
        new = _named(name, keys)
        stamp = None
        with self._lock:
            if self._folder is not None:
                with written_whole(self._path(name), on_disk=True) as unfinished:
                    unfinished.write_text(json.dumps({"items": sorted(new.keys)}) + "\n")
                    # Not behind the block: another replica may have put the list again by then.
                    stamp = _stamp_of(unfinished)
            self._known[name] = _Known(new, stamp, self._clock())
        return new

    def get(self, name: str) -> NamedList | None:
        """The list of this name as it is now; None where there is none.

        Raises:
            InputError: its file is damaged.
        """
        if not _NAME.fullmatch(name):
            return None
        with self._lock:
            known = self._known.get(name)
            if self._folder is None:
                return None if known is None else known.found
            if known is not None and self._clock() - known.looked_at < LOOK_EVERY_S:
                return known.found
            path = self._path(name)
            stamp = _stamp_of(path)
            if known is None or known.stamp != stamp:
                if stamp is None and len(self._known) >= MOST_MISSING:
                    self._known = {each: one for each, one in self._known.items() if one.found is not None}
                known = _Known(None if stamp is None else _read(name, path), stamp, 0.0)
            known.looked_at = self._clock()
            self._known[name] = known
            return known.found

    def delete(self, name: str) -> bool:
        """Forget a list, a damaged one too; whether there was one."""
        if not _NAME.fullmatch(name):
            return False
        with self._lock:
            known = self._known.pop(name, None)
            if self._folder is None:
                return known is not None
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                return False
        return True

    def names(self) -> list[str]:
        """Of all lists."""
        if self._folder is not None:
            return sorted(path.stem for path in self._folder.glob("*.json"))
        with self._lock:
            return sorted(self._known)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{name}.json"


def _named(name: str, keys: Sequence[str]) -> NamedList:
    distinct = frozenset(keys)
    digest = hashlib.blake2b("\n".join(sorted(distinct)).encode(), digest_size=8).hexdigest()
    return NamedList(name, digest, distinct)


def _read(name: str, path: Path) -> NamedList:
    try:
        return _named(name, [str(key) for key in json.loads(path.read_text())["items"]])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f'{path}: expected {{"items": [ids]}}; put the list again') from error


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
