"""A folder, or a place in an object store, with the versions of one model that were published.

    STORE/current.json                 the version that serves, which every publication moves
    STORE/held.json                    that which serves instead, while somebody has gone back to it
    STORE/canary.json                  the version that gets a share, see `canary.py`
    STORE/versions/000017.json         a version's manifest
    STORE/bundles/NAME/...             files, each bundle written once
    STORE/deleting-NAME.json           a mark: bundles that somebody deletes with old versions now

What a store holds is data and settings; nothing in it is run. The one setting that names code, `op: python`,
is followed where the host allows it (`loading.py`), and names of files stay in their folders.

A manifest appears when everything that it names is there, and the pointer moves after that; each is one file
that is replaced as a whole. So readers that follow the pointer always find a whole version. One process at a
time publishes to a store, and writes one of the two; going back writes the other, so neither undoes what the
other has just done.

    who deletes       mark ──► look at the pointers ──► delete manifests ──► look at those that are there
                      ──► delete bundles that none needs ──► take the mark off
    who publishes     write the manifest ──► look at the marks, then at the files ──► move the pointer
    who goes back     move the pointer ──► look at the marks, then at the manifest
    who tries one     write canary.json ──► look at the marks, then at the manifest

So one of the two sees the other, whatever comes between, where a listing has what was written before it, as
those of folders and object stores have; some clients of fsspec keep listings (`use_listings_cache`). A
version that needs a marked bundle is taken back, and can be published again; a pointer to a marked version
is moved back, and a marked version is no canary. Who dies while deleting leaves a mark, which counts for
nothing after an hour, or at once where it can be seen that its process has ended; the next one goes on with
it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from pyarrow import fs

from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.pipelines.versions.manifest import Bundle, BundleFile, ModelVersion
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.files import is_plain_name, sync, unfinished_suffix, write_atomically
from rayrec.platform.processes import has_ended, own_process
from rayrec.platform.remote_files import remote_folder

logger = logging.getLogger(__name__)

CURRENT, HELD, VERSIONS, BUNDLES = "current.json", "held.json", "versions", "bundles"
CANARY, DELETING = "canary.json", "deleting-"
MARK_LASTS_S = 3600.0
"""A mark that is older counts for nothing. Who made it deletes in the first half of that, so clocks of
machines may differ by as much."""


class PublishedMeanwhileError(MachineError):
    """Somebody else has published to the store, or deleted old versions, while this one was made."""


class Pointer(Config):
    """Which version serves."""

    version: int
    moved_at: float
    """UNIX seconds."""
    is_held: bool = False
    """Versions that come later do not serve: somebody went back to this one."""


class _Mark(Config):
    """Old versions that somebody is deleting, and bundles, as they were needed by these alone."""

    versions: tuple[int, ...] = ()
    bundles: tuple[str, ...] = ()
    marked_at: float = 0.0
    """UNIX seconds."""
    process: str = ""
    """Who deletes, see `own_process`."""

    @property
    def age_s(self) -> float:
        return time.time() - self.marked_at

    @property
    def counts(self) -> bool:
        """Whether somebody may be deleting what it names."""
        return self.age_s < MARK_LASTS_S and not has_ended(self.process)


class VersionStore:
    """The versions of one model."""

    def __init__(self, url: str | Path, cache: str | Path | None = None) -> None:
        """
        Args:
            url: a folder of this machine, or a URL as `remote_folder` knows them.
            cache: folder of this machine that bundles from elsewhere are kept in; None: one of the user's
                cache, or where there is no home of a user, of temporary files.

        Raises:
            InputError: the URL is none that can be used.
        """
        self._there = remote_folder(url)
        self.url = self._there.url
        self._here = fs.LocalFileSystem()
        self._is_local = isinstance(self._there.filesystem, fs.LocalFileSystem)
        self._cache_root = None if cache is None else Path(cache)

    @staticmethod
    def is_there(url: str | Path) -> bool:
        """Whether anything was published there."""
        try:
            return VersionStore(url)._there.exists(CURRENT)
        except (InputError, OSError):
            return False

    def check_place(self) -> None:
        """Refuse a place that holds other things than versions, such as the data set of a forgotten option.

        Raises:
            InputError: names one of them.
            OSError: the place does not answer.
        """
        filesystem, path = self._there.filesystem, self._there.path
        if filesystem.get_file_info([path])[0].is_file:
            raise InputError(f"{self.url}: is a file; give the folder of a store, or of a new one")
        entries = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        names = {info.base_name for info in entries} - {"lost+found"}
        others = sorted(name for name in names if not name.startswith("."))
        if others and not names & {CURRENT, HELD, BUNDLES}:
            raise InputError(
                f"{self.url}: holds {others[0]!r} and no versions; give the store a place of its own"
            )

    def current(self) -> Pointer | None:
        """The version that serves; None where nothing was published yet.

        Raises:
            InputError: the pointer is damaged.
            OSError: the place does not answer.
        """
        return self._pointer(HELD) or self._pointer(CURRENT)

    def serving(self) -> ModelVersion:
        """The version that serves.

        Raises:
            InputError: nothing was published here, or it is damaged.
        """
        pointer = self.current()
        if pointer is None:
            raise InputError(f"{self.url}: nothing was published here; `rayrec publish RUN STORE` does it")
        return self.version(pointer.version)

    def point_to(self, number: int, is_held: bool) -> None:
        """Let a version serve.

        Args:
            is_held: although newer ones come. Otherwise nothing is held any more.

        Raises:
            InputError: there is no such version, or somebody is deleting it; what served before does.
        """
        self.version(number)
        name = HELD if is_held else CURRENT
        self.write_naming(name, _pointing(name, number), number)
        if not is_held:
            self._delete_held()

    def write_naming(self, name: str, content: bytes, number: int) -> None:
        """Replace a file by which a version is needed, as who deletes old ones looks at it.

        Raises:
            InputError: there is no such version, or somebody is deleting it; the file is what it was before.
        """
        before = self._there.read(name)
        self._write(name, content)
        try:  # in this order: a mark is taken off when the manifest is gone
            is_marked = any(number in mark.versions for mark in self._marks().values() if mark.counts)
            self.version(number)
        except BaseException:  # it is gone; or nobody knows whether it is there
            with suppress(Exception):
                self._put_back(name, content, before)
            raise
        if is_marked:
            self._put_back(name, content, before)
            raise InputError(
                f"{self.url}: version {number} is being deleted with old versions; name a newer one, or wait "
                "until that is over, an hour at the most, and see whether it is still there"
            )

    def _put_back(self, name: str, written: bytes, before: bytes | None) -> None:
        """Undo what was written to a file, unless somebody has replaced it since."""
        if self._there.read(name) != written:
            return
        if before is None:
            self._there.filesystem.delete_file(self._there.path_of(name))
        else:
            self._write(name, before)

    def let_newest_serve(self, besides: Collection[int] = ()) -> int:
        """Hold nothing any more; the version that serves now.

        Args:
            besides: versions that are not to serve.

        Raises:
            InputError: a version or pointer is damaged.
        """
        numbers, pointer = self.numbers(), self._pointer(CURRENT)
        newest = max((number for number in numbers if number not in besides), default=numbers[-1])
        # What is published meanwhile has moved it already, and is not to be undone.
        if pointer is None or pointer.is_held or pointer.version < newest or pointer.version in besides:
            self._point(CURRENT, newest)
        self._delete_held()
        return self.serving().number

    def numbers(self) -> list[int]:
        """Of all versions that are there, oldest first."""
        selector = fs.FileSelector(self._there.path_of(VERSIONS), allow_not_found=True)
        names = [info.base_name for info in self._there.filesystem.get_file_info(selector)]
        return sorted(int(name.removesuffix(".json")) for name in names if _is_manifest(name))

    def version(self, number: int) -> ModelVersion:
        """Read the manifest of a version.

        Raises:
            InputError: there is none of this number, or it is damaged.
        """
        name = _manifest_name(number)
        content = self._there.read(name)
        if content is None:
            numbers = self.numbers()
            held = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            raise InputError(f"{self.url}: has no version {number}; it has {held}")
        return ModelVersion.from_bytes(content, self._there.shown(name))

    def newest(self) -> ModelVersion | None:
        numbers = self.numbers()
        return self.version(numbers[-1]) if numbers else None

    def add(self, version: ModelVersion) -> None:
        """Let a version appear whose bundles are there, and serve unless an older one is held.

        Raises:
            PublishedMeanwhileError: there is one of this number, or a bundle has just been deleted with old
                versions.
        """
        name, content = _manifest_name(version.number), version.to_bytes()
        if self._there.exists(name) or not self._write_new(name, content):
            raise PublishedMeanwhileError(
                f"{self.url}: version {version.number} was published by somebody else; "
                "let one run publish to a store"
            )
        try:  # in this order: a mark is taken off when the files are gone
            gone = self._marked_bundle(version) or self._missing_file(version)
        except BaseException:  # nobody knows whether all of it is there
            with suppress(Exception):
                self._there.filesystem.delete_file(self._there.path_of(name))
            raise
        if gone:
            self._there.filesystem.delete_file(self._there.path_of(name))
            raise PublishedMeanwhileError(
                f"{self._there.shown(gone)}: deleted with old versions while version {version.number} was "
                "published; publish it again, when that is over: in an hour at the latest"
            )
        pointer = self._pointer(CURRENT)
        if pointer is None or not pointer.is_held:  # as stores without a file for it have it
            self._point(CURRENT, version.number)

    def put(self, kind: str, files: Sequence[Path]) -> Bundle:
        """Publish files as a bundle, named by its kind and content; one that is there is not sent again, and
        one that is damaged is replaced."""
        described = tuple(
            BundleFile(name=path.name, bytes=path.stat().st_size, checksum=checksum_file(path))
            for path in files
        )
        content = json.dumps([[file.name, file.checksum] for file in described])
        bundle = Bundle(name=f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:16]}", files=described)
        there = self._there
        for path, file in zip(files, bundle.files, strict=True):
            if self._is_as_described(bundle, file):
                continue
            with there.written_whole(f"{BUNDLES}/{bundle.name}/{file.name}") as target:
                if self._is_local:
                    shutil.copyfile(path, target)
                else:
                    fs.copy_files(str(path), target, self._here, there.filesystem)
        return bundle

    def _marked_bundle(self, version: ModelVersion) -> str | None:
        """Name of a bundle that the version needs, and that somebody is deleting."""
        marked = {name for mark in self._marks().values() if mark.counts for name in mark.bundles}
        return next((f"{BUNDLES}/{each.name}" for each in version.bundles if each.name in marked), None)

    def _missing_file(self, version: ModelVersion) -> str | None:
        """Name of a file that the version needs, and that is not there."""
        names = [
            f"{BUNDLES}/{bundle.name}/{file.name}" for bundle in version.bundles for file in bundle.files
        ]
        found = self._there.filesystem.get_file_info([self._there.path_of(name) for name in names])
        missing = [name for name, info in zip(names, found, strict=True) if not info.is_file]
        return missing[0] if missing else None

    def is_whole(self, bundle: Bundle) -> bool:
        """Whether all files of a bundle are as they were published; reads them."""
        return all(self._is_as_described(bundle, file) for file in bundle.files)

    def _is_as_described(self, bundle: Bundle, file: BundleFile) -> bool:
        path = self._there.path_of(f"{BUNDLES}/{bundle.name}/{file.name}")
        if self._there.filesystem.get_file_info([path])[0].size != file.bytes:
            return False
        try:
            if self._is_local:
                return checksum_file(Path(path)) == file.checksum
            with tempfile.TemporaryDirectory(prefix="rayrec-compare-") as folder:
                fs.copy_files(path, f"{folder}/{file.name}", self._there.filesystem, self._here)
                return checksum_file(Path(folder) / file.name) == file.checksum
        except FileNotFoundError:  # deleted with old versions just now
            return False

    def fetch(self, bundle: Bundle) -> Path:
        """A folder of this machine with the files of a bundle, whose checksums were verified.

        A copy of before that was damaged since is mended.

        Raises:
            InputError: a file is missing, or not as it was published; names it.
            OSError: the place does not answer.
        """
        if self._is_local:
            folder = Path(self._there.path_of(f"{BUNDLES}/{bundle.name}"))
            _check(folder, bundle)
            return folder
        folder = self._cache / bundle.name
        with suppress(OSError):  # what was used of late is not cleaned away
            os.utime(folder)
        if folder.is_dir():
            damage = _damage(folder, bundle)
            if damage is None:
                return folder
            # By a cleaner of old files, or by a power cut before it was on disk.
            logger.warning("%s; it is fetched again from %s", damage, self.url)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache, prefix=f".{bundle.name}-") as unfinished:
            for file in bundle.files:
                self._fetch(f"{BUNDLES}/{bundle.name}/{file.name}", Path(unfinished) / file.name)
            _check(Path(unfinished), bundle)
            try:
                os.rename(unfinished, folder)
            except OSError:  # it is there, damaged; or another replica was first
                if not folder.is_dir():
                    raise
                for file in bundle.files:  # one by one: a replica that reads them finds each whole
                    os.replace(Path(unfinished) / file.name, folder / file.name)
            else:
                os.mkdir(unfinished)  # which is deleted now
        _check(folder, bundle)
        return folder

    def clean_cache(self, held: Iterable[ModelVersion], after_s: float = 3600.0) -> None:
        """Delete copies on this machine that no version needs and nobody has asked for of late.

        Args:
            held: versions whose bundles stay.
            after_s: since somebody, perhaps another replica, asked for a bundle.
        """
        if self._is_local or not self._cache.is_dir():
            return
        needed = {bundle.name for version in held for bundle in version.bundles}
        for folder in self._cache.iterdir():
            with suppress(FileNotFoundError):  # another replica was first
                if folder.name not in needed and folder.stat().st_mtime < time.time() - after_s:
                    shutil.rmtree(folder)

    @cached_property
    def _cache(self) -> Path:
        """Of this store alone: two may have bundles of one name, and one is not to clean the other's."""
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return (self._cache_root or _default_cache()) / name

    def keep_newest(self, num_versions: int) -> None:
        """Delete older versions and what only they need, but not the one that serves, the one before, and the
        last canary."""
        numbers = self.numbers()
        gone = self._old(numbers, num_versions)
        left = {name: mark for name, mark in self._marks().items() if not mark.counts}
        if not gone and not left:
            return
        old = self._bundles_of(gone) | {name for mark in left.values() for name in mark.bundles}
        old -= self._bundles_of(number for number in numbers if number not in gone)
        mark = _Mark(
            versions=tuple(gone), bundles=tuple(sorted(old)), marked_at=time.time(), process=own_process()
        )
        own = f"{DELETING}{secrets.token_hex(6)}.json"
        # Before anything goes, so that what is left of this when it dies can be found.
        self._write_mark(own, mark)
        try:
            # Again, now that who goes back sees the mark: somebody may have gone back before it was there.
            still_old = set(self._old(numbers, num_versions))
            for number in gone:  # first, so that no manifest names what is not there
                if number in still_old:
                    if self._takes_too_long(mark):
                        return self._leave_off(own, mark)
                    with suppress(FileNotFoundError):  # somebody else deletes it, too
                        self._there.filesystem.delete_file(self._there.path_of(_manifest_name(number)))
            # Of all that are there now: one that was published meanwhile may have bundles of one that goes.
            for name in sorted(old - self._bundles_of(self.numbers())):
                if self._takes_too_long(mark):
                    return self._leave_off(own, mark)
                self.delete_folder(f"{BUNDLES}/{name}")
        except Exception:
            with suppress(Exception):
                self._leave_off(own, mark)
            raise
        for name in (own, *left):
            with suppress(FileNotFoundError):  # somebody else has gone on with it, too
                self._there.filesystem.delete_file(self._there.path_of(name))

    def _leave_off(self, own: str, mark: _Mark) -> None:
        """Let a mark count for nothing: nothing is deleted any more, and the next one goes on with it."""
        self._write_mark(own, mark.model_copy(update={"marked_at": 0.0}))

    def _write_mark(self, name: str, mark: _Mark) -> None:
        self._write(name, json.dumps(mark.model_dump(mode="json")).encode())

    def _old(self, numbers: Sequence[int], num_versions: int) -> list[int]:
        """Those of some versions that nobody needs now."""
        kept = {*numbers[-num_versions:], *self._of_canary()}
        pointers = [self._pointer(name) for name in (HELD, CURRENT)]
        kept |= {pointer.version for pointer in pointers if pointer is not None}
        if (serving := pointers[0] or pointers[1]) is not None:
            kept |= {*[number for number in numbers if number < serving.version][-1:]}
        return [number for number in numbers if number not in kept]

    def _takes_too_long(self, mark: _Mark) -> bool:
        """Whether others may soon take no notice of a mark any more: the next one goes on with it."""
        if is_late := mark.age_s >= MARK_LASTS_S / 2:
            logger.warning("%s: deleting old versions takes too long, and goes on later", self.url)
        return is_late

    def _bundles_of(self, numbers: Iterable[int]) -> set[str]:
        """Names of what these versions need, if they have not been taken back meanwhile."""
        names: set[str] = set()
        for manifest in map(_manifest_name, numbers):
            content = self._there.read(manifest)
            if content is not None:
                version = ModelVersion.from_bytes(content, self._there.shown(manifest))
                names |= {bundle.name for bundle in version.bundles}
        return names

    def _marks(self) -> dict[str, _Mark]:
        """By their names; one that is damaged says nothing, and is as old as can be."""
        marks = {}
        # Beside the pointers: of a folder for marks, which comes and goes, no listing could be relied on.
        found = self._there.filesystem.get_file_info(fs.FileSelector(self._there.path, allow_not_found=True))
        for name in [info.base_name for info in found if info.base_name.startswith(DELETING)]:
            content = self._there.read(name)
            if content is None:
                continue
            try:
                mark = _Mark.parse(json.loads(content), source=self._there.shown(name))
            except ValueError:
                mark = _Mark()
            marks[name] = mark if all(is_plain_name(each) for each in mark.bundles) else _Mark()
        return marks

    def read(self, name: str) -> bytes | None:
        """A file of the store; None where there is none."""
        return self._there.read(name)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file of the store as a whole."""
        self._write(name, content)

    def write_new(self, name: str, content: bytes) -> bool:
        """Write a file of the store unless it is there; False: somebody else was first."""
        return not self._there.exists(name) and self._write_new(name, content)

    def names_in(self, folder: str) -> list[str]:
        """Of the files in a folder of the store; none where there is no such folder."""
        selector = fs.FileSelector(self._there.path_of(folder), allow_not_found=True)
        return sorted(
            info.base_name for info in self._there.filesystem.get_file_info(selector) if info.is_file
        )

    def delete_folder(self, name: str) -> None:
        """Delete a folder of the store, if it is there."""
        path = self._there.path_of(name)
        if self._there.filesystem.get_file_info([path])[0].type == fs.FileType.Directory:
            self._there.filesystem.delete_dir(path)

    def _of_canary(self) -> list[int]:
        content = self._there.read(CANARY)
        try:
            found = {} if content is None else json.loads(content)
            return [int(found[name]) for name in ("version", "baseline") if name in found]
        except (ValueError, TypeError):  # a service that follows it says so
            return []

    def _point(self, name: str, number: int) -> None:
        """Move a pointer."""
        self._write(name, _pointing(name, number))

    def _delete_held(self) -> None:
        if self._there.exists(HELD):
            self._there.filesystem.delete_file(self._there.path_of(HELD))

    def _pointer(self, name: str) -> Pointer | None:
        content = self._there.read(name)
        if content is None:
            return None
        try:
            return Pointer.parse(json.loads(content), source=self._there.shown(name))
        except ValueError as error:
            raise InputError(f"{self._there.shown(name)}: not a pointer to a version: {error}") from error

    def _write(self, name: str, content: bytes) -> None:
        if self._is_local:
            target = Path(self._there.path_of(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, content)
            return
        with (
            self._there.written_whole(name) as path,
            self._there.filesystem.open_output_stream(path) as file,
        ):
            file.write(content)

    def _write_new(self, name: str, content: bytes) -> bool:
        """Write a file unless it is there; False: somebody else was first."""
        if not self._is_local:
            self._write(name, content)
            return self._there.read(name) == content  # of two that write at once, the last one stays
        target = Path(self._there.path_of(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{unfinished_suffix()}")
        write_atomically(unfinished, content)
        try:
            # A rename would replace the other's; a second name for a file fails where there is one.
            os.link(unfinished, target)
            sync(target.parent)
        except FileExistsError:
            return False
        finally:
            unfinished.unlink()
        return True

    def _fetch(self, name: str, target: Path) -> None:
        try:
            fs.copy_files(self._there.path_of(name), str(target), self._there.filesystem, self._here)
        except FileNotFoundError as error:
            raise InputError(f"{self._there.shown(name)}: missing from the published version") from error


def _pointing(name: str, number: int) -> bytes:
    """What the file of a pointer has."""
    pointer = Pointer(version=number, moved_at=time.time(), is_held=name == HELD)
    return (json.dumps(pointer.model_dump(mode="json")) + "\n").encode()


_GO_BACK = "publish again, or let an earlier version serve: rayrec rollback STORE"


def _check(folder: Path, bundle: Bundle) -> None:
    if damage := _damage(folder, bundle):
        raise InputError(f"{damage}; {_GO_BACK}")


def _damage(folder: Path, bundle: Bundle) -> str | None:
    for file in bundle.files:
        path = folder / file.name
        if not path.is_file():
            return f"{path}: missing from the published version"
        if path.stat().st_size != file.bytes or checksum_file(path) != file.checksum:
            return f"{path}: not as it was published: its checksum differs"
    return None


def _manifest_name(number: int) -> str:
    return f"{VERSIONS}/{number:06d}.json"


def _is_manifest(name: str) -> bool:
    return name.endswith(".json") and name.removesuffix(".json").isdigit()


def _default_cache() -> Path:
    """A folder that nobody else can have filled: what is loaded from it is checked against its manifest, but
    its owner could change it after that.

    Raises:
        InputError: there is none.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    temporary = Path(tempfile.gettempdir()) / f"rayrec-versions-{os.getuid()}"
    for folder in (home / "rayrec" / "versions", temporary):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise InputError(
                f"{folder}: belongs to somebody else, or others may write to it; published versions are not "
                "kept there; delete it, or set XDG_CACHE_HOME to a folder of your own"
            )
        if os.access(folder, os.W_OK):
            return folder
    raise InputError(f"{temporary}: cannot be written; set XDG_CACHE_HOME to a folder of your own")
