"""Old versions are deleted beside somebody who publishes: a version that is there has its files."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from pyarrow import fs

from rayrec.pipelines.versions.canary import Canaries, CanarySettings
from rayrec.pipelines.versions.manifest import Bundle, ModelVersion
from rayrec.pipelines.versions.store import CANARY, DELETING, PublishedMeanwhileError, VersionStore
from rayrec.platform.errors import InputError
from rayrec.platform.processes import own_process
from rayrec.platform.remote_files import RemoteFolder

STRIDE = 29
"""Of all ways in which two processes may meet, one in so many is tried; all of them take two minutes."""


@pytest.fixture(params=["a folder", "an object store"])
def store(request, tmp_path) -> VersionStore:
    url = f"memory://{tmp_path.name}" if request.param == "an object store" else tmp_path / "store"
    return VersionStore(url, cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def ended_process() -> str:
    if not own_process():
        pytest.skip("this system does not tell processes apart")
    code = "from rayrec.platform.processes import own_process; print(own_process())"
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def put(store: VersionStore, folder: Path, kind: str, content: str) -> Bundle:
    folder.mkdir(exist_ok=True)
    (folder / "content").write_text(content)
    return store.put(kind, [folder / "content"])


def version_of(store: VersionStore, folder: Path, number: int, weights: str) -> ModelVersion:
    return ModelVersion(
        number=number,
        published_at=0,
        run="r",
        device="cpu",
        state={"committed_step": number},
        definition=put(store, folder, "run", "the same"),
        weights=put(store, folder, "weights", weights),
        weights_step=number,
        weights_at=0,
        segments=(),
        catalog=put(store, folder, "catalog", "the same"),
    )


def add(store: VersionStore, folder: Path, number: int, weights: str) -> None:
    store.add(version_of(store, folder, number, weights))


def weights_in(store: VersionStore) -> list[str]:
    there = store._there
    found = there.filesystem.get_file_info(fs.FileSelector(there.path_of("bundles"), allow_not_found=True))
    return sorted(info.base_name for info in found if info.base_name.startswith("weights"))


def check_whole(store: VersionStore) -> None:
    for number in store.numbers():
        for bundle in store.version(number).bundles:
            assert store.is_whole(bundle), f"version {number} lacks {bundle.name}"


class Killed(BaseException):
    pass


def die(*_: object) -> None:
    raise Killed


def marks(store: VersionStore) -> list[str]:
    return [name for name in store.names_in("") if name.startswith(DELETING)]


def let_marks_age(store: VersionStore) -> None:
    for name in marks(store):
        mark = json.loads(store.read(name) or b"")
        store.write(name, json.dumps(mark | {"marked_at": 0.0}).encode())


@dataclass
class Turns:
    """Whose operations come next, and how many of them; one at a time."""

    left: list[list[Any]]
    changed: threading.Condition = field(default_factory=threading.Condition)
    counts: dict[str, int] = field(default_factory=dict)
    busy: str | None = None

    def take(self, who: str) -> None:
        """Begin an operation of somebody, whose one before has ended."""
        with self.changed:
            self._let_go(who)
            assert self.changed.wait_for(lambda: self.busy is None and self.left[0][0] == who, timeout=60)
            self.busy = who
            self.counts[who] = self.counts.get(who, 0) + 1
            self.left[0][1] -= 1
            if not self.left[0][1]:
                del self.left[0]

    def end(self, who: str) -> None:
        with self.changed:
            self.left = [turn for turn in self.left if turn[0] != who]
            self._let_go(who)

    def _let_go(self, who: str) -> None:
        if self.busy == who:
            self.busy = None
        self.changed.notify_all()


class WholeFile(MemoryFile):
    """Appears when all of it was written, as in object stores."""

    is_there = False

    def close(self) -> None:
        if not self.is_there:  # once: Python closes it again when nothing refers to it any more
            self.is_there = True
            self.commit()


class TakingTurns(MemoryFileSystem):
    cachable = False

    def __init__(self, who: str, turns: Turns) -> None:
        super().__init__()
        self._who, self._turns = who, turns

    def info(self, path: str, **more: Any) -> Any:
        self._turns.take(self._who)
        return super().info(path, **more)

    def ls(self, path: str, *arguments: Any, **more: Any) -> Any:
        self._turns.take(self._who)
        return super().ls(path, *arguments, **more)

    def _rm(self, path: str) -> None:
        self._turns.take(self._who)
        super()._rm(path)

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        self._turns.take(self._who)
        if mode == "wb":
            return WholeFile(self, self._strip_protocol(path))
        return super()._open(path, mode, **more)


def of_process(url: str, who: str, turns: Turns) -> VersionStore:
    store = VersionStore(url)
    filesystem = fs.PyFileSystem(fs.FSSpecHandler(TakingTurns(who, turns)))
    store._there = RemoteFolder(url, filesystem, store._there.path)
    return store


def run_beside(turns: Turns, work: dict[str, Callable[[], object]]) -> dict[str, Exception]:
    """Run these at once; what they raised."""
    errors: dict[str, Exception] = {}

    def run(who: str) -> None:
        try:
            work[who]()
        except Exception as error:
            errors[who] = error
        finally:
            turns.end(who)

    threads = [threading.Thread(target=run, args=[who]) for who in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def delete_beside_a_publisher(folder: Path, url: str, first: str, num_first: int, num_second: int) -> Turns:
    """Bundles of old weights go while somebody publishes these again.

    One of the two makes so many operations, the other so many, and each goes on to its end after that.
    """
    store = VersionStore(url)
    for number in (1, 2, 3):
        add(store, folder, number, f"weights {number}")
    again = store.version(3).model_copy(update={"number": 4})
    second = {"deleter": "publisher", "publisher": "deleter"}[first]
    order = [[first, num_first], [second, num_second], [first, math.inf], [second, math.inf]]
    turns = Turns([turn for turn in order if turn[1]])
    deleter, publisher = (of_process(url, who, turns) for who in ("deleter", "publisher"))

    def publish(store: VersionStore) -> None:
        weights = put(store, folder / "again", "weights", "weights 1")
        store.add(again.model_copy(update={"weights": weights}))

    work = {"deleter": lambda: deleter.keep_newest(1), "publisher": lambda: publish(publisher)}
    errors = run_beside(turns, work)
    check_whole(store)
    if "deleter" in errors:  # the publisher was writing to a folder that it deleted; a later one goes on
        assert isinstance(errors["deleter"], OSError), errors
        assert "Directory not empty" in str(errors["deleter"])
        let_marks_age(store)
        store.keep_newest(1)
    if "publisher" in errors:
        assert isinstance(errors["publisher"], PublishedMeanwhileError), errors
        publish(store)  # as it says
    check_whole(store)
    assert store.serving().number == 4
    assert not marks(store)
    return turns


@pytest.mark.parametrize("first", ["deleter", "publisher"])
def test_a_version_that_is_published_while_old_ones_go_has_its_files_or_is_refused(tmp_path, first):
    """Between the look at the manifests and the deletion there was room for a manifest and its check."""
    second = {"deleter": "publisher", "publisher": "deleter"}[first]
    for num_first in itertools.count():
        for num_second in itertools.count(1 + num_first % STRIDE, STRIDE):
            url = f"memory://{tmp_path.name}"
            turns = delete_beside_a_publisher(tmp_path / "files", url, first, num_first, num_second)
            fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
            if num_second >= turns.counts[second]:
                break
        if num_first >= turns.counts[first]:
            break
    assert num_first > 10


def delete_beside_one_who_goes_back(
    folder: Path, url: str, first: str, num_first: int, num_second: int
) -> Turns:
    """As `delete_beside_a_publisher`, of one who goes back to a version that is old."""
    store = VersionStore(url)
    for number in (1, 2, 3, 4):
        add(store, folder, number, f"weights {number}")
    second = {"deleter": "operator", "operator": "deleter"}[first]
    order = [[first, num_first], [second, num_second], [first, math.inf], [second, math.inf]]
    turns = Turns([turn for turn in order if turn[1]])
    deleter, operator = (of_process(url, who, turns) for who in ("deleter", "operator"))

    errors = run_beside(
        turns,
        {"deleter": lambda: deleter.keep_newest(1), "operator": lambda: operator.point_to(1, is_held=True)},
    )

    assert "deleter" not in errors, errors
    if "operator" in errors:
        assert isinstance(errors["operator"], InputError), errors
    pointer = store.current()
    assert pointer is not None
    assert (pointer.version, pointer.is_held) == ((4, False) if "operator" in errors else (1, True))
    check_whole(store)
    assert {4, store.serving().number} <= set(store.numbers())
    assert not marks(store)
    return turns


@pytest.mark.parametrize("first", ["deleter", "operator"])
def test_a_version_that_somebody_goes_back_to_while_old_ones_go_is_there_or_he_is_refused(tmp_path, first):
    """A pointer to what had been deleted was left, with which no service could start."""
    second = {"deleter": "operator", "operator": "deleter"}[first]
    outcomes = set[int]()
    for num_first in itertools.count():
        for num_second in itertools.count(1 + num_first % 5, 5):
            url = f"memory://{tmp_path.name}"
            turns = delete_beside_one_who_goes_back(tmp_path / "files", url, first, num_first, num_second)
            outcomes.add(VersionStore(url).serving().number)
            fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
            if num_second >= turns.counts[second]:
                break
        if num_first >= turns.counts[first]:
            break
    assert outcomes == {1, 4}


def check_that_the_first_can_serve(store):
    store.point_to(1, is_held=True)
    store.keep_newest(1)
    assert store.serving().number == 1
    check_whole(store)
    assert not marks(store)


def test_nobody_goes_back_to_what_a_deleter_that_died_has_marked_for_an_hour(store, tmp_path, monkeypatch):
    for number in (1, 2, 3):
        add(store, tmp_path / "files", number, f"weights {number}")
    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "_takes_too_long", die)
        with pytest.raises(Killed):
            store.keep_newest(1)
    with pytest.raises(InputError, match="version 1 is being deleted with old versions"):
        store.point_to(1, is_held=True)
    assert store.serving().number == 3
    let_marks_age(store)
    check_that_the_first_can_serve(store)


def test_what_somebody_deletes_is_no_canary_and_nothing_is_held_for_it(store, tmp_path, monkeypatch):
    """It was started, and could neither be loaded nor promoted."""
    for number in (1, 2, 3):
        add(store, tmp_path / "files", number, f"weights {number}")
    canaries = Canaries(store)
    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "_takes_too_long", die)
        with pytest.raises(Killed):
            store.keep_newest(1)
    with pytest.raises(InputError, match="version 1 is being deleted with old versions"):
        canaries.start(1, CanarySettings())
    assert canaries.last() is None
    before = canaries.start(2, CanarySettings())
    canaries.finish(before, "stopped", "by hand")
    with pytest.raises(InputError, match="version 1 is being deleted with old versions"):
        canaries.start(1, CanarySettings())
    assert canaries.last() == before
    pointer = store.current()
    assert pointer is not None
    assert (pointer.version, pointer.is_held) == (3, False)

    let_marks_age(store)
    canary = canaries.start(1, CanarySettings())
    store.keep_newest(1)
    canaries.finish(canary, "promoted", "by hand")
    assert store.serving().number == 1
    check_whole(store)


def test_a_canary_that_is_deleted_while_it_is_started_is_refused(store, tmp_path):
    for number in (1, 2, 3):
        add(store, tmp_path / "files", number, f"weights {number}")
    write, deleted = store._write, []

    def deleted_before(name: str, content: bytes) -> None:
        if name == CANARY and not deleted:
            deleted.append(name)
            store.keep_newest(1)
        write(name, content)

    store._write = deleted_before  # type: ignore[method-assign]
    with pytest.raises(InputError, match="has no version 1"):
        Canaries(store).start(1, CanarySettings())
    assert Canaries(store).last() is None
    assert store.current().is_held is False  # type: ignore[union-attr]


def test_what_a_deleter_of_this_machine_has_marked_that_died_is_free_at_once(
    store, tmp_path, monkeypatch, ended_process
):
    for number in (1, 2, 3):
        add(store, tmp_path / "files", number, f"weights {number}")
    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "_takes_too_long", die)
        with pytest.raises(Killed):
            store.keep_newest(1)
    (name,) = marks(store)
    mark = json.loads(store.read(name) or b"")
    with pytest.raises(InputError, match="version 1 is being deleted with old versions"):
        store.point_to(1, is_held=True)  # this process lives
    elsewhere = "another machine" + ended_process[ended_process.index("/") :]
    store.write(name, json.dumps(mark | {"process": elsewhere}).encode())
    with pytest.raises(InputError, match="version 1 is being deleted with old versions"):
        store.point_to(1, is_held=True)

    store.write(name, json.dumps(mark | {"process": ended_process}).encode())
    check_that_the_first_can_serve(store)


def test_what_a_deleter_has_marked_that_gave_up_is_free_at_once(store, tmp_path, monkeypatch):
    for number in (1, 2, 3):
        add(store, tmp_path / "files", number, f"weights {number}")
    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "_takes_too_long", lambda self, mark: True)
        store.keep_newest(1)
    check_that_the_first_can_serve(store)


def test_a_bundle_that_is_published_again_while_it_is_marked_is_refused_and_stays(store, tmp_path):
    for number in (1, 2, 3, 4):
        add(store, tmp_path / "files", number, f"weights {number}")
    delete_folder, refused = store.delete_folder, []

    def published_meanwhile(name: str) -> None:
        if not refused:
            with pytest.raises(PublishedMeanwhileError, match="deleted with old versions") as error:
                add(store, tmp_path / "files", 5, name_of[name])
            refused.append(error)
        delete_folder(name)

    name_of = {
        f"bundles/{store.version(number).weights.name}": f"weights {number}" for number in store.numbers()
    }
    store.delete_folder = published_meanwhile  # type: ignore[method-assign]
    store.keep_newest(2)
    check_whole(store)
    assert refused
    assert store.numbers() == [3, 4]
    assert not marks(store)


@pytest.mark.parametrize("dies_at", ["delete_folder", "numbers"])
def test_what_a_deleter_that_died_has_left_is_deleted_by_a_later_one(store, tmp_path, monkeypatch, dies_at):
    """It may die before the manifests go, too: `numbers` is the look at them."""
    for number in (1, 2, 3, 4):
        add(store, tmp_path / "files", number, f"weights {number}")
    numbers = store.numbers

    with monkeypatch.context() as patch:
        looks = iter([numbers, die])
        patch.setattr(store, dies_at, die if dies_at != "numbers" else lambda: next(looks)())
        with pytest.raises(Killed):
            store.keep_newest(2)
    assert store.numbers() == [3, 4]
    store.keep_newest(2)  # the other one may be alive
    assert len(weights_in(store)) == 4

    let_marks_age(store)
    store.keep_newest(2)

    assert weights_in(store) == sorted(store.version(number).weights.name for number in (3, 4))
    assert not marks(store)
    check_whole(store)


def test_what_could_not_be_deleted_is_deleted_the_next_time(store, tmp_path, monkeypatch):
    for number in (1, 2, 3, 4):
        add(store, tmp_path / "files", number, f"weights {number}")

    def fails(name: str) -> None:
        raise OSError("503 Slow Down")

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete_folder", fails)
        with pytest.raises(OSError, match="503"):
            store.keep_newest(2)
    add(store, tmp_path / "files", 5, "weights 1")  # nobody deletes it now
    store.keep_newest(2)

    assert store.numbers() == [4, 5]
    assert weights_in(store) == sorted(store.version(number).weights.name for number in (4, 5))
    assert not marks(store)
    check_whole(store)


def test_what_a_deleter_that_died_has_marked_is_published_again_and_stays(store, tmp_path, monkeypatch):
    for number in (1, 2, 3, 4):
        add(store, tmp_path / "files", number, f"weights {number}")
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete_folder", die)
        with pytest.raises(Killed):
            store.keep_newest(2)
    with pytest.raises(PublishedMeanwhileError):
        add(store, tmp_path / "files", 5, "weights 1")

    let_marks_age(store)
    add(store, tmp_path / "files", 5, "weights 1")
    store.keep_newest(2)

    check_whole(store)
    assert store.numbers() == [4, 5]
    assert not marks(store)


def test_a_deleter_that_was_held_up_until_its_mark_counts_for_nothing_deletes_nothing(
    store, tmp_path, monkeypatch
):
    for number in (1, 2, 3, 4):
        add(store, tmp_path / "files", number, f"weights {number}")
    monkeypatch.setattr("rayrec.pipelines.versions.store.MARK_LASTS_S", 0.0)
    store.keep_newest(2)
    assert len(weights_in(store)) == 4


@pytest.mark.parametrize("content", [b"{", b'{"marked_at": 0.0, "bundles": ["../../elsewhere"]}'])
def test_a_mark_cannot_name_what_is_elsewhere(store, tmp_path, content):
    (tmp_path / "elsewhere").mkdir()
    add(store, tmp_path / "files", 1, "weights")
    store.write(f"{DELETING}0.json", content)
    store.keep_newest(2)
    assert (tmp_path / "elsewhere").is_dir()
    assert not marks(store)
    check_whole(store)
