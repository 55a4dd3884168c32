"""A run leaves a node that is bad, loses no step, and has the same bits elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rayrec.pipelines.cluster.leaving import LOOK_EVERY_S, LeaveWatch
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.training.placements import InProcess, in_process
from rayrec.pipelines.training.stages import Stages
from rayrec.pipelines.training.train import train
from tests.helpers.examples import cases
from tests.helpers.runs import SPARSE_SASREC, dataset_of
from tests.pipelines.test_in_process import assert_same_bits


class BadNode(InProcess):
    """The node of the first attempt turns out to be bad after some steps."""

    def __init__(self, steps: int) -> None:
        self.attempts = 0
        self._steps = steps

    @contextmanager
    def running(self, *arguments, **named) -> Iterator[Stages]:
        self.attempts += 1
        asked = iter(range(self._steps)) if self.attempts == 1 else None

        def must_leave() -> str | None:
            return None if asked is None or next(asked, None) is not None else "10.0.0.1 (a) is bad (xid 79)"

        with super().running(*arguments, **named) as stages:
            yield replace(stages, must_leave=must_leave)


@pytest.mark.slow
@pytest.mark.parametrize("steps", cases([0, 3], [3]))
def test_a_run_goes_on_elsewhere_from_a_snapshot_of_now(tmp_path, steps):
    dataset = dataset_of(tmp_path / "data", integer_users=False, labeled=False)
    config = RunConfig.parse(
        {
            "data": {"path": str(dataset.root)},
            "model": SPARSE_SASREC,
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 4, "epochs": 3},
            "evaluation": {"every_steps": 1000},
        }
    )
    losses: dict[str, list[tuple[int, float]]] = {"whole": [], "left": []}

    def noting(name):
        return lambda done, total, loss: losses[name].append((done, loss))

    train(config, tmp_path / "whole", on_step=noting("whole"), cluster=in_process)
    cluster = BadNode(steps)
    train(config, tmp_path / "left", on_step=noting("left"), cluster=cluster)

    assert cluster.attempts == 2
    assert losses["left"] == losses["whole"]  # and none twice
    assert_same_bits(tmp_path / "left", tmp_path / "whole")
    (recovery,) = map(json.loads, (tmp_path / "left" / "recoveries.jsonl").read_text().splitlines())
    assert "xid 79" in recovery["reason"]
    assert recovery["snapshot"] is not None
    assert RunFolder.open(tmp_path / "left").state.get("rollbacks", 0) == 0


def test_only_a_bad_verdict_of_a_node_of_the_run_makes_it_leave(tmp_path):
    now = [0.0]
    quarantine = Quarantine(tmp_path, clock=lambda: now[0])
    watch = LeaveWatch(quarantine, lambda: ["a"], clock=lambda: now[0])

    def add(name, verdict):
        node = Node(name, "10.0.0.1", {}, {}, {}, name)
        quarantine.add(node, "xid", verdict, nodes=[node], by="operator")
        now[0] += LOOK_EVERY_S
        return watch()

    assert add("a", "suspect") is None
    assert add("b", "bad") is None
    quarantine.lift(quarantine.sessions()[0].id)
    assert add("a", "bad") == "10.0.0.1 (a) is bad (xid)"


def test_without_room_elsewhere_a_run_stays_until_there_is(tmp_path, caplog):
    now, room = [0.0], [False]
    quarantine = Quarantine(tmp_path)
    node = Node("a", "10.0.0.1", {}, {}, {}, "a")
    quarantine.add(node, "xid", "bad", nodes=[node])
    watch = LeaveWatch(quarantine, lambda: ["a"], lambda: room[0], clock=lambda: now[0])

    for _ in range(3):
        assert watch() is None
        now[0] += LOOK_EVERY_S
    assert caplog.text.count("no other node has room") == 1
    room[0] = True
    assert watch() is not None


def test_the_file_is_read_now_and_then_and_a_damaged_one_ends_no_run(tmp_path, caplog):
    now = [0.0]
    watch = LeaveWatch(Quarantine(tmp_path), lambda: ["a"], clock=lambda: now[0])
    assert watch() is None
    (tmp_path / "quarantine.json").write_text("{")
    assert watch() is None
    assert not caplog.records
    now[0] += LOOK_EVERY_S
    assert watch() is None
    assert "cannot be read" in caplog.text
