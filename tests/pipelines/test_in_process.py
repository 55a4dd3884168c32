"""Runs without a cluster: the same driver and loops, actors called directly, the same bits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.snapshot.snapshot import load_tables
from rayrec.embeddings.table.table_rows import joined
from rayrec.models.program.torch_program import TorchProgram
from rayrec.pipelines.cluster.placement import actor_groups
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder, StoppedError
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.memory_plan import plan_memory
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import graph_of_dataset
from tests.helpers.examples import cases
from tests.helpers.runs import MODELS, SPARSE_SASREC, dataset_of, trained


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return dataset_of(tmp_path_factory.mktemp("data"), integer_users=False, labeled=False)


def settings(dataset: Dataset, num_trainers: int = 1, **pipeline: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "data": {"path": str(dataset.root)},
            "model": SPARSE_SASREC,
            "pipeline": {"trainer_threads": 1, "num_trainers": num_trainers, **pipeline},
            "sparse": {"num_servers": 2},
            "training": {"batch_size": 16, "epochs": 1},
        }
    )


def state_of(run: Path) -> dict[str, np.ndarray]:
    snapshot = read_snapshot(RunFolder.open(run).chosen_snapshot("last"))
    return {**snapshot.weights, **snapshot.optimizer_state}


def assert_same_bits(run: Path, other: Path) -> None:
    ours, theirs = state_of(run), state_of(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize("mode", ["sync", "exact_prefetch"])
def test_a_run_in_process_has_the_bits_of_its_parts_called_one_by_one(dataset, tmp_path, mode):
    config = settings(dataset, mode=mode)

    train(config, tmp_path / "run", cluster=in_process)

    assert_same_bits(tmp_path / "run", trained(config, tmp_path / "by-hand"))


def test_a_run_leaves_no_threads(dataset, tmp_path):
    """They ended when the garbage collector came."""
    before = set(threading.enumerate())
    gc.disable()
    try:
        train(settings(dataset), tmp_path / "run", cluster=in_process)
    finally:
        gc.enable()

    threads = set(threading.enumerate()) - before
    for thread in threads:
        thread.join(60)  # one that is decoding ends that first
    assert [thread.name for thread in threads if thread.is_alive()] == []


@pytest.mark.slow
def test_trainers_that_are_threads_sum_their_gradients(dataset, tmp_path):
    losses: dict[int, list[float]] = {1: [], 2: []}
    for num_trainers, found in losses.items():
        train(
            settings(dataset, num_trainers),
            tmp_path / str(num_trainers),
            on_step=lambda done, total, loss, found=found: found.append(loss),
            cluster=in_process,
        )

    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)


def test_a_trainer_that_fails_frees_the_others_and_its_error_is_the_runs(dataset, tmp_path, monkeypatch):
    update, calls = TorchProgram.update, []

    def fails_once(self: TorchProgram) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise RuntimeError("no more")
        update(self)

    monkeypatch.setattr(TorchProgram, "update", fails_once)

    with pytest.raises(RuntimeError, match="no more"):
        train(settings(dataset, num_trainers=2), tmp_path / "run", cluster=in_process)
    assert RunFolder.open(tmp_path / "run").state["error"] == "RuntimeError: no more"


@pytest.mark.parametrize("num_trainers", [1, 2])
@pytest.mark.parametrize("error", [RuntimeError("no more"), SystemExit("no more")], ids=["error", "exit"])
def test_a_trainer_that_fails_before_its_part_is_waited_for_ends_the_run(
    dataset, tmp_path, monkeypatch, error, num_trainers
):
    """A survivor waits in a server for rows of a step that never comes whole, with further calls queued; one
    alone has a further call, too, that would wait."""
    backward, calls = TorchProgram.backward, []

    def fails_once(self: TorchProgram, *arguments: Any, **named: Any) -> Any:
        calls.append(self)
        if len(calls) == 1 + num_trainers:  # a step behind the first, and before the last
            raise error
        return backward(self, *arguments, **named)

    monkeypatch.setattr(TorchProgram, "backward", fails_once)
    config = settings(dataset, num_trainers)
    patient = config.sparse.model_copy(update={"wait_timeout_s": 10_000.0})  # beyond the test's own limit

    with pytest.raises(type(error), match="no more"):
        train(config.model_copy(update={"sparse": patient}), tmp_path / "run", cluster=in_process)


def test_an_interrupted_run_goes_on_to_the_same_bits(dataset, tmp_path):
    config = settings(dataset)
    every_step = config.model_copy(
        update={"snapshots": config.snapshots.model_copy(update={"every_steps": 1})}
    )
    train(every_step, tmp_path / "whole", cluster=in_process)

    def interrupt(done: int, total: int, loss: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(every_step, tmp_path / "run", on_step=interrupt, cluster=in_process)
    train(every_step, tmp_path / "run", resume=True, cluster=in_process)

    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_can_be_stopped_after_a_validation_and_goes_on_to_the_same_bits(dataset, tmp_path):
    config = settings(dataset)
    longer = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 3})})
    seen: list[tuple[int, float]] = []

    def stop(step: int, figures: dict[str, float]) -> None:
        seen.append((step, figures["ndcg@10"]))
        if len(seen) == 2:
            raise StoppedError("it is bad")

    with pytest.raises(StoppedError):
        train(longer, tmp_path / "run", on_validation=stop, cluster=in_process)
    folder = RunFolder.open(tmp_path / "run")
    assert (folder.condition, folder.state["error"]) == ("stopped", "it is bad")
    assert [step for step, _ in seen] == [3, 6]
    assert [(record["step"], record["valid"]["ndcg@10"]) for record in folder.records()] == seen
    assert folder.snapshot_names() == ["step-000000003", "step-000000006"]

    train(longer, tmp_path / "run", resume=True, cluster=in_process)
    train(longer, tmp_path / "whole", cluster=in_process)

    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("trainers_per_group", cases([1, 2], [1]))
def test_trainers_that_wait_for_room_on_the_servers_end_with_the_same_bits(
    dataset, tmp_path, trainers_per_group
):
    config = settings(dataset, num_trainers=3, trainers_per_group=trainers_per_group)
    narrow = config.sparse.model_copy(update={"step_buffer": 1})

    train(config, tmp_path / "run", cluster=in_process)
    train(config.model_copy(update={"sparse": narrow}), tmp_path / "narrow", cluster=in_process)

    assert_same_bits(tmp_path / "run", tmp_path / "narrow")


def test_split_weights_need_processes(dataset, tmp_path):
    config = settings(dataset, num_trainers=2)
    split = config.training.model_copy(update={"parallel": "fsdp2"})

    with pytest.raises(InputError, match="fsdp2 splits weights between processes"):
        train(config.model_copy(update={"training": split}), tmp_path / "run", cluster=in_process)

    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_evaluating_and_recommending_import_no_ray(dataset, tmp_path, monkeypatch):
    """What is imported only when it is needed is not needed."""
    monkeypatch.setitem(sys.modules, "ray", None)
    run = tmp_path / "run"

    train(settings(dataset), run, cluster=in_process)

    assert evaluate(run).to_json()["results"]
    recommender = Recommender.load(run)
    (answers,) = recommender.recommend([Query(recommender.dataset.items.ids_I[:2])], k=3)
    assert len(answers) == 3


@pytest.mark.slow
def test_training_evaluating_and_recommending_need_no_ray(dataset, tmp_path):
    """In a process in which Ray cannot be imported."""
    config, run = tmp_path / "run.yaml", tmp_path / "run"
    config.write_text(settings(dataset).to_yaml())
    program = f"""
import sys
sys.modules["ray"] = None
import rayrec
rayrec.train(rayrec.RunConfig.load({str(config)!r}), {str(run)!r}, cluster=rayrec.in_process)
print(rayrec.evaluate({str(run)!r}))
recommender = rayrec.Recommender.load({str(run)!r})
(answers,) = recommender.recommend([rayrec.Query(recommender.dataset.items.ids_I[:2])], k=3)
assert len(answers) == 3
"""

    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=root)


@pytest.mark.slow
@pytest.mark.parametrize("num_trainers", cases([1, 2], [2]))
def test_a_model_without_tables_starts_no_servers(dataset, tmp_path, monkeypatch, num_trainers):
    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("rayrec.actors.parameter_server.ParameterServer.__init__", refuse)
    config = settings(dataset, num_trainers).model_copy(
        update={"model": RunConfig.parse({"data": {"path": "x"}, "model": MODELS["sasrec"]}).model}
    )
    assert "parameter_server" not in {group.stage for group in actor_groups(config)}
    assert plan_memory(assemble(config)).shards == ()
    train(config, tmp_path / "run", cluster=in_process)
    more = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 2})})
    train(more, tmp_path / "run", resume=True, cluster=in_process)
    assert_same_bits(tmp_path / "run", run_of(more, tmp_path / "whole"))


def run_of(config: RunConfig, path: Path) -> Path:
    train(config, path, cluster=in_process)
    return path


@pytest.mark.parametrize("num_trainers", cases([1, 2], [1]))
def test_a_model_that_reads_neighbors_is_trained_from_a_saved_graph_as_from_the_training_events(
    dataset, tmp_path, num_trainers
):
    gnn = MODELS["gnn"] | {"item_matrix": "sparse", "num_negatives": 8}
    config = settings(dataset, num_trainers).model_copy(
        update={"model": RunConfig.parse({"data": {"path": "x"}, "model": gnn}).model}
    )
    graph_of_dataset(dataset).save(tmp_path / "graph")
    saved = config.data.model_copy(update={"graph": str(tmp_path / "graph")})

    train(config, tmp_path / "run", cluster=in_process)
    train(config.model_copy(update={"data": saved}), tmp_path / "saved", cluster=in_process)

    assert_same_bits(tmp_path / "run", tmp_path / "saved")
    if num_trainers == 1:
        assert_same_bits(tmp_path / "run", trained(config, tmp_path / "by-hand"))


def test_tables_with_servers_of_their_own_have_the_same_bits(dataset, tmp_path):
    """Wherever they lie, and if they lie elsewhere after a snapshot."""
    together, apart = settings(dataset), settings(dataset)
    three = together.model_dump(mode="json")
    three["sparse"] |= {"num_servers": 3, "tables": {"item": {"servers": [0, 2]}, "user": {"servers": [1]}}}
    apart = RunConfig.parse(three)
    train(together, tmp_path / "together", cluster=in_process)
    train(apart, tmp_path / "apart", cluster=in_process)

    assert_same_bits(tmp_path / "together", tmp_path / "apart")
    snapshots = [
        read_snapshot(RunFolder.open(tmp_path / run).chosen_snapshot("last")) for run in ("together", "apart")
    ]
    tables = together.tables(RateSchedule())
    rows = [
        {
            name: sorted(zip(part.ids_M.tolist(), part.weights_MD.tolist(), strict=True))
            for name, parts in load_tables(each.sparse_chain, tables, ShardMap(1), 0).items()
            for part in [joined(list(parts))]
        }
        for each in snapshots
    ]
    assert rows[0] == rows[1]
    files = [path.name for paths in snapshots[1].sparse_chain for path in map(Path, paths)]
    assert {name.split(".")[0] for name in files} == {"item-00000", "item-00002", "user-00001"}
    again = RunConfig.parse(three | {"sparse": three["sparse"] | {"tables": {"item": {"servers": [1, 2]}}}})
    plan = plan_memory(assemble(again))
    held = [{table.table for table in shard.tables} for shard in plan.shards]
    assert held == [{"user"}, {"item", "user"}, {"item", "user"}]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"item": {"servers": [1, 0]}}, "name each server once, ascending"),
        ({"item": {"servers": [2]}}, r"the 2 servers \(sparse.num_servers\) have the numbers 0 to 1"),
        (
            {"item": {"servers": [1]}, "user": {"servers": [1]}},
            "server 0 holds none of the tables item, user",
        ),
    ],
)
def test_servers_that_are_not_there_are_refused(dataset, tables, message):
    values = settings(dataset).model_dump(mode="json")
    values["sparse"]["tables"] = tables
    with pytest.raises(InputError, match=message):
        RunConfig.parse(values)
