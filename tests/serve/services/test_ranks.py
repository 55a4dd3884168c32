"""Ranks that compute batches together: the same commands in the same order, and given up as a whole."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.tensor_parallel import split
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.base.batches import FeatureBatch
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray import ranks
from rayrec.serve.on_ray.dense import DensePart, RemoteRanker
from rayrec.serve.on_ray.packed_batch import RankBatch, unpacked_items
from rayrec.serve.on_ray.ranks import CommandKind, Commands, FirstRank, follow
from tests.helpers.runs import make_run
from tests.models.two_trainers import in_processes


class Wire(Commands):
    """From the first rank to one other, both threads of this process."""

    def __init__(self) -> None:
        self._sent: queue.Queue[tuple[CommandKind, bytes]] = queue.Queue()
        self._checksums: list[int] = []
        self._both = threading.Barrier(2)

    def send(self, kind, body=b""):
        self._sent.put((kind, body))

    def receive(self):
        return self._sent.get(timeout=60)

    def agree(self, checksum):
        self._checksums.append(checksum)
        self._both.wait(60)
        agreed = len(set(self._checksums[-2:])) == 1
        self._both.wait(60)  # or the faster rank adds its next one before the other has looked
        return agreed


class FakeProgram:
    """Finds as many items as it is asked for."""

    device = torch.device("cpu")

    def recommend(self, features, rows, k, excluded_BE, beams_B, allowed):
        if k == 13:
            raise InputError("k: 13 brings bad luck")
        if k == 14:
            raise RuntimeError("out of memory")
        return RankedItems(np.full((1, k), k), np.zeros((1, k), dtype=np.float32))


def asking(k, version=None):
    features = FeatureBatch(0, np.array([7]), np.array([0, 1]), np.array([4]), None, 0, {})
    return RankBatch(version, features, {}, k, None, None).packed()


class Two:
    """The first rank, and another one that follows it."""

    def __init__(self, clock=lambda: 0.0) -> None:
        self.loaded: list[list[int | None]] = [[], []]
        parts = [DensePart(self._loader(rank)) for rank in (0, 1)]
        self.parts, wire = parts, Wire()
        self.error: list[BaseException] = []
        self._thread = threading.Thread(target=self._follow, args=(wire, parts[1]), daemon=True)
        self._thread.start()
        self.first = FirstRank(wire, parts[0], self._read, most_s=60, clock=clock)

    def _loader(self, rank):
        def load(version):
            if version == 9:
                raise InputError("version 9 is broken")
            self.loaded[rank].append(version)
            return FakeProgram()

        return load

    def _read(self, version):
        for part in self.parts:
            part.read(version)

    def _follow(self, wire, part):
        try:
            follow(wire, part)
        except RuntimeError as error:
            self.error.append(error)

    def end(self):
        self.first.end()
        self._thread.join(60)
        return self.error


def items_of(packed):
    return unpacked_items(packed).items_BK.tolist()


def test_a_version_is_read_by_all_ranks_before_any_computes_with_it():
    two = Two()

    answers = [items_of(two.first.recommend(asking(2, version))) for version in (1, 2, 1)]

    assert answers == [[[2, 2]]] * 3
    assert two.end() == []
    assert two.loaded == [[1, 2], [1, 2]]


def test_what_a_batch_does_wrong_is_said_and_the_ranks_go_on():
    two = Two()
    for _ in range(2):
        with pytest.raises(InputError, match="bad luck"):
            two.first.recommend(asking(13))
        with pytest.raises(InputError, match="version 9 is broken"):
            two.first.recommend(asking(2, version=9))

    assert items_of(two.first.recommend(asking(3))) == [[3, 3, 3]]
    two.first.check()
    assert two.end() == []


def test_whatever_else_goes_wrong_gives_the_ranks_up_and_is_told_as_a_service_that_does_not_answer():
    two = Two()
    two.first.check()

    for k in (14, 2):
        with pytest.raises(UnavailableError, match=r"the ranks of the dense part.*out of memory"):
            two.first.recommend(asking(k))

    with pytest.raises(UnavailableError):
        two.first.check()


def differently(answer):
    def recommend(*asked):
        return RankedItems(np.array([answer]), np.zeros((1, len(answer)), dtype=np.float32))

    return SimpleNamespace(device=torch.device("cpu"), recommend=recommend)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_find_different_items_are_given_up(rank):
    two = Two()
    assert items_of(two.first.recommend(asking(2))) == [[2, 2]]
    two.parts[rank]._programs[None] = differently([2, 3])

    with pytest.raises(UnavailableError, match="the ranks have found different items"):
        two.first.recommend(asking(2))

    with pytest.raises(UnavailableError):
        two.first.check()
    (error,) = two.end()
    assert "the ranks have found different items" in str(error)


def test_a_rank_that_alone_refuses_a_batch_gives_the_ranks_up():
    two = Two()
    two.first.hold(None)
    two.parts[1]._programs[None] = differently([13])

    with pytest.raises(UnavailableError, match="the ranks have found different items"):
        two.first.recommend(asking(13))


def test_a_rank_that_alone_cannot_load_a_version_is_lost_instead_of_left_behind():
    two = Two()

    def load(version):
        raise InputError("no room on the disk of this rank")

    two.parts[1]._load, two.parts[1]._read = load, {}
    two.parts[1].read = lambda version: None
    two.first.hold(1)

    (error,) = two.end()
    assert isinstance(error, RuntimeError)
    assert "no room on the disk of this rank" in str(error)


def test_a_first_rank_that_alone_cannot_load_a_version_gives_the_ranks_up():
    two = Two()

    def split(program):
        raise InputError("the split network computes something else")

    two.parts[0]._split = split
    with pytest.raises(UnavailableError, match="computes something else"):
        two.first.hold(1)
    with pytest.raises(UnavailableError):
        two.first.check()


def test_a_network_that_could_not_be_split_is_refused_when_it_is_read():
    def refuse(program):
        raise InputError("heads do not divide")

    part = DensePart(lambda version: FakeProgram(), split=lambda program: None, check=refuse)

    with pytest.raises(InputError, match="heads do not divide"):
        part.read(1)
    assert part._read == {}


def test_who_waits_when_a_rank_is_lost_is_told_at_once():
    two, is_computing, goes_on = Two(), threading.Event(), threading.Event()

    def recommend(*asked):
        is_computing.set()
        goes_on.wait(60)
        raise RuntimeError("connection closed by peer")

    two.first.hold(None)
    two.parts[0]._programs[None] = SimpleNamespace(device=torch.device("cpu"), recommend=recommend)
    told: list[Exception] = []

    def ask():
        try:
            two.first.recommend(asking(1))
        except UnavailableError as error:
            told.append(error)

    waiting = [threading.Thread(target=ask) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert is_computing.wait(60)
    two.first.lose("a rank has died")
    with pytest.raises(UnavailableError, match="a rank has died"):
        two.first.recommend(asking(1))
    for thread in waiting:
        thread.join(60)
    goes_on.set()

    assert len(told) == 3


@pytest.mark.parametrize(("is_new", "most_s"), [(False, 60), (True, 600)])
def test_a_rank_that_hangs_is_found_by_the_health_check_later_where_it_may_compile(is_new, most_s):
    now = [0.0]
    two, is_computing, goes_on = Two(lambda: now[0]), threading.Event(), threading.Event()

    def recommend(*asked):
        is_computing.set()
        goes_on.wait(60)
        raise RuntimeError("too late")

    def ask():
        with contextlib.suppress(UnavailableError):
            two.first.recommend(asking(1))

    if not is_new:
        two.first.recommend(asking(1))
    two.first.hold(None)
    two.parts[0]._programs[None] = SimpleNamespace(device=torch.device("cpu"), recommend=recommend)
    asked = threading.Thread(target=ask)
    asked.start()
    assert is_computing.wait(60)
    now[0] = most_s
    two.first.check()
    now[0] = most_s + 1
    with pytest.raises(UnavailableError, match=f"a command takes longer than {most_s} s"):
        two.first.check()
    asked.join(60)
    goes_on.set()


def test_a_first_rank_with_nothing_to_do_says_so(monkeypatch):
    monkeypatch.setattr(ranks, "SILENCE_S", 0.01)
    wire = Wire()

    first = FirstRank(wire, DensePart(lambda version: FakeProgram()), lambda version: None)

    assert [wire.receive() for _ in range(2)] == [(CommandKind.NOTHING, b"")] * 2
    first.end()


MODELS = {"generative": {}, "hstu": {}, "encoder": {}}


def _answers_are_those_of_a_whole_network(rank: int, folder: Path) -> None:
    for name in MODELS:
        run = str(folder / name / "run")
        part = DensePart.of(run, ServeConfig(), split=lambda program, run=run: split(program, run))
        part.read(None)
        if rank:
            follow(Commands(), part)
            continue
        first = FirstRank(Commands(), part, lambda version: None)
        whole, parts = Recommender.load(run), None
        first.hold(None)
        parts = Recommender(TrainedModel.load(run), RemoteRanker(first.recommend, None, part.beam_width()))
        queries = [whole.query_of_user(f"u{user}") for user in (1, 2, 3, 17)]
        for k in (3, 6):
            for found, expected in zip(parts.recommend(queries, k), whole.recommend(queries, k), strict=True):
                assert [each.item_key for each in found] == [each.item_key for each in expected]
                scores = [[each.score for each in items] for items in (found, expected)]
                np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-5)
        first.end()


def _one_finds_other_items(rank: int, folder: Path) -> None:
    part = DensePart(lambda version: FakeProgram())
    part.hold(None)
    if rank:
        part._programs[None] = differently([5, 6])
        with pytest.raises(RuntimeError, match="different items"):
            follow(Commands(), part)
        return
    first = FirstRank(Commands(), part, lambda version: None)
    for k in (2, 3):
        with pytest.raises(UnavailableError, match="different items"):
            first.recommend(asking(k))


@pytest.mark.slow
def test_processes_that_find_different_items_say_so(tmp_path):
    in_processes(_one_finds_other_items, tmp_path)


@pytest.mark.slow
def test_ranks_answer_requests_as_a_whole_network_does(tmp_path):
    for name, settings in MODELS.items():
        os.makedirs(tmp_path / name)
        make_run(tmp_path / name, name, **settings)

    in_processes(_answers_are_those_of_a_whole_network, tmp_path)
