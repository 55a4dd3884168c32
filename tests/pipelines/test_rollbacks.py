import json

import pytest

from rayrec.pipelines.cluster.rollbacks import Rollbacks
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.ray_errors import StageHungError

CONFIG = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})


def test_a_run_that_gets_further_may_go_back_as_often_again(tmp_path):
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    rollbacks = Rollbacks(2, folder)

    for _ in range(2):
        rollbacks.allow(RuntimeError("run/trainer-0 died"))
    folder.update(last="step-000000010")
    for _ in range(2):
        rollbacks.allow(RuntimeError("run/trainer-1 died"))

    with pytest.raises(RuntimeError, match="run/trainer-1 died") as raised:
        rollbacks.allow(RuntimeError("run/trainer-1 died"))
    assert "gone back to its last snapshot 2 times" in raised.value.__notes__[0]


def test_every_return_is_in_the_folder_with_its_reason(tmp_path):
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    rollbacks = Rollbacks(5, folder)

    rollbacks.allow(RuntimeError("run/trainer-0 died"))
    folder.update(last="step-000000010")
    rollbacks.allow(RuntimeError("run/parameter_server-0 hangs"))

    records = [json.loads(line) for line in (folder.path / "recoveries.jsonl").read_text().splitlines()]
    assert [(record["reason"], record["snapshot"]) for record in records] == [
        ("run/trainer-0 died", None),
        ("run/parameter_server-0 hangs", "step-000000010"),
    ]
    assert folder.state["rollbacks"] == 2


def test_who_may_only_be_slow_gets_more_time_until_the_run_is_further(tmp_path):
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    rollbacks = Rollbacks(9, folder)
    assert rollbacks.patience == 1

    rollbacks.allow(RuntimeError("run/trainer-0 died"))
    assert rollbacks.patience == 1
    patience = []
    for _ in range(4):
        rollbacks.allow(StageHungError("run/trainer-0 hangs"))
        patience.append(rollbacks.patience)
    assert patience == [2, 4, 4, 4]

    folder.update(last="step-000000010")
    rollbacks.allow(RuntimeError("run/trainer-0 died"))
    assert rollbacks.patience == 1


def test_a_return_with_what_is_left_counts_as_any_other_and_is_marked(tmp_path):
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    rollbacks = Rollbacks(1, folder)
    rollbacks.allow(RuntimeError("run/parameter_server-0 died"), is_alone=True)
    last = RuntimeError("run/parameter_server-1 died")
    for _ in range(2):  # inside of the attempt, and when it has ended
        with pytest.raises(RuntimeError, match="run/parameter_server-1 died"):
            rollbacks.allow(last)

    assert len(last.__notes__) == 1
    (record,) = [json.loads(line) for line in (folder.path / "recoveries.jsonl").read_text().splitlines()]
    assert record["replaced_alone"]
