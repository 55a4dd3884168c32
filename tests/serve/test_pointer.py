"""Going where a store points, and what happens when that fails."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from rayrec.platform.errors import InputError
from rayrec.serve.engine.pointer import AGAIN_AFTER_S, PointerFollower


class Store:
    """Points where a test says."""

    def __init__(self, version: int | None) -> None:
        self.version = version

    def current(self) -> Any:
        if self.version == 0:
            raise OSError("the store is away")
        return None if self.version is None else SimpleNamespace(version=self.version)


class Goer:
    """Goes to any version but those that fail."""

    def __init__(self, *fails: int) -> None:
        self.gone: list[int] = []
        self.fails = set(fails)
        self.now = 0.0

    def __call__(self, version: int) -> None:
        self.gone.append(version)
        if version in self.fails:
            raise InputError(f"version {version} is damaged")


def follower(store: Store, goer: Goer) -> PointerFollower:
    return PointerFollower(store, goer, clock=lambda: goer.now)


def test_each_look_goes_where_the_store_points():
    store, goer = Store(None), Goer()
    following = follower(store, goer)
    following.look()
    assert following.wanted is None
    for store.version in (1, 1, 3, 2):
        following.look()
        assert following.wanted == store.version

    assert goer.gone == [1, 1, 3, 2]


def test_a_version_that_fails_is_tried_again_after_a_while_and_said_once(caplog):
    store, goer = Store(2), Goer(2)
    following = follower(store, goer)
    for _ in range(5):
        following.look()
    assert (goer.gone, following.num_errors, following.wanted) == ([2], 1, 2)
    goer.now = AGAIN_AFTER_S
    following.look()
    assert (goer.gone, following.num_errors) == ([2, 2], 2)
    assert caplog.text.count("version 2 is damaged") == 1
    goer.fails.clear()
    goer.now = 2 * AGAIN_AFTER_S
    following.look()
    following.look()
    assert goer.gone == [2, 2, 2, 2]


def test_a_pointer_that_moves_is_gone_to_at_once():
    store, goer = Store(2), Goer(2)
    following = follower(store, goer)
    following.look()
    store.version = 1
    following.look()

    assert goer.gone == [2, 1]


def test_a_store_that_is_away_is_asked_again_at_the_next_look():
    store, goer = Store(1), Goer()
    following = follower(store, goer)
    for store.version in (1, 0, 2):
        following.look()

    assert (goer.gone, following.num_errors, following.wanted) == ([1, 2], 1, 2)


def test_it_looks_until_it_is_stopped():
    reached = threading.Event()
    following = PointerFollower(Store(4), lambda version: reached.set())
    following.start(every_s=0.01)
    assert reached.wait(20)
    following.stop()

    assert not [thread for thread in threading.enumerate() if thread.name == "versions"]
