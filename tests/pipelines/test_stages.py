"""The actors of a run: how a missing one is named, before and after it ran, and where their time goes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from rayrec.actors.spawning import Spawned
from rayrec.embeddings.transport.protocol import LookupCall
from rayrec.pipelines.cluster import reservation
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.training import ray_stages
from rayrec.pipelines.training.pipeline import TrainingPipeline
from rayrec.pipelines.training.ray_stages import running_stages
from rayrec.pipelines.training.stages import Stages
from rayrec.platform.ray_errors import ActorDeathError, StageHungError
from tests.helpers.data import small_dataset

pytestmark = pytest.mark.ray

QUEUE_DEPTH = 3


@pytest.fixture(scope="module")
def assembly_of(tmp_path_factory) -> Callable[..., Assembly]:
    data = small_dataset(tmp_path_factory.mktemp("stages")).root

    def assembly(wait_timeout_s: float = 60.0, hang_timeout_s: float = 60.0, **pipeline: Any) -> Assembly:
        return assemble(config(data, pipeline, wait_timeout_s, hang_timeout_s))

    return assembly


def config(data: Path, pipeline: dict[str, Any], wait_timeout_s: float, hang_timeout_s: float) -> RunConfig:
    return RunConfig.parse(
        {
            "data": {"path": str(data)},
            "model": {
                "name": "sasrec",
                "item_matrix": "sparse",
                "num_negatives": 8,
                "backbone": {"dim": 8, "num_layers": 1, "num_heads": 2, "feedforward_dim": 16},
            },
            "sparse": {"num_servers": 1, "wait_timeout_s": wait_timeout_s},
            "recovery": {"hang_timeout_s": hang_timeout_s},
            "pipeline": {"trainer_threads": 1} | pipeline,
            "training": {"batch_size": 8, "epochs": 1},
        }
    )


def process_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def kill_process(actor: Any) -> None:
    os.kill(process_of(actor), signal.SIGKILL)


VICTIMS: dict[str, Callable[[Stages], Any]] = {
    "parameter_server-0": lambda stages: stages.servers[0],
    "trainer-1": lambda stages: stages.trainers[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parameter_server-0", "trainer-1"])
def test_an_actor_that_dies_in_a_running_pipeline_is_named(ray_cluster, assembly_of, victim):
    """In any order of the news: also when the other trainer's collective fails before Ray's call does.

    The room of all, which a placement group held, is given back.
    """

    def held() -> list[str]:
        return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]

    def train_and_kill() -> None:
        with running_stages("death", assembly_of(num_trainers=2)) as stages:
            assert held() == ["CREATED"]
            steps = TrainingPipeline(stages, QUEUE_DEPTH).run(0, 1000)
            next(steps)
            kill_process(VICTIMS[victim](stages))
            for _ in steps:
                pass

    sentence = rf"^death/{victim} died: its process was killed, "
    with pytest.raises(ActorDeathError, match=sentence):
        train_and_kill()

    assert ray.util.list_named_actors() == []
    assert held() == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "exact_prefetch"])
def test_every_stages_seconds_add_up_to_those_of_training(ray_cluster, assembly_of, mode):
    training_s = 0.0
    with running_stages("times", assembly_of(mode=mode)) as stages:
        for first in (0, 30):
            started = time.perf_counter()
            for _ in TrainingPipeline(stages, QUEUE_DEPTH).run(first, first + 30):
                pass
            training_s += time.perf_counter() - started
            time.sleep(1.0)  # as if users were ranked
        found = stages.stats().summary()

    totals = {
        stage: found[f"{stage}_busy_s"] + found[f"{stage}_waiting_s"]
        for stage in ("read", "features", "servers", "trainer")
    }
    totals["trainer"] += found["lookup_waiting_s"] + found["update_waiting_s"]
    for stage, total_s in totals.items():
        # The calls that start and stop the clocks take their time.
        assert 0.5 * training_s < total_s <= training_s, stage
    assert all(found[f"{stage}_busy_s"] > 0 for stage in totals)
    assert 0 < found["dense_busy_s"] <= found["trainer_busy_s"]
    assert found["lookup_late_rows"] > 0
    assert (found["lookup_early_rows"] > 0) == (mode == "exact_prefetch")


def test_a_run_without_room_for_all_its_actors_starts_none_and_says_what_is_missing(
    ray_cluster, assembly_of, monkeypatch
):
    @ray.remote
    class OtherJob:
        def is_up(self) -> None:
            pass

    other = OtherJob.options(num_cpus=7.2).remote()  # leaves room for all but the trainer
    ray.get(other.is_up.remote())
    said: list[str] = []

    def warning(template: str, message: str) -> None:
        said.append(message)
        running = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        assert not any(name.startswith("room/") for name in running)
        ray.kill(other)

    monkeypatch.setattr(ray_stages, "START_PATIENCE_S", 0.5)
    monkeypatch.setattr(reservation.logger, "warning", warning)

    with running_stages("room", assembly_of()) as stages:
        assert len(stages.beside_trainers) == 3

    assert "the run has not started: 1 of 1 trainer find no room (each asks for 1 CPU)" in said[0]
    assert "has 0.8 of 8 CPU free" in said[0]


@pytest.mark.slow
def test_a_stateless_stage_that_hangs_when_nobody_needs_it_any_more_holds_up_nobody(ray_cluster, assembly_of):
    with running_stages("idle", assembly_of(hang_timeout_s=6.0)) as stages:
        steps = TrainingPipeline(stages, QUEUE_DEPTH).run(0, 3)
        for result in steps:
            if result.step == 2:
                os.kill(process_of(stages.readers[0]), signal.SIGSTOP)

        assert stages.stats().summary()["read_busy_s"] >= 0


@pytest.mark.slow
def test_an_update_that_does_not_come_is_a_stage_that_hangs(ray_cluster, assembly_of):
    sentence = r"^shard 0: waited 0.5 s for step 0, .* came from trainers \[0\]"
    assembly = assembly_of(wait_timeout_s=0.5)

    with pytest.raises(StageHungError, match=sentence), running_stages("late", assembly) as stages:
        ray.get(stages.servers[0].answer.remote(LookupCall({}, after_step=0)))


def test_an_actor_that_hangs_while_it_starts_is_found(ray_cluster):
    class Watch:
        num_looks = 0

        def look_after_silent(self) -> None:
            self.num_looks += 1
            if self.num_looks == 2:
                raise StageHungError("run/trainer-0 hangs")

    @ray.remote(num_cpus=1000)
    class NeverUp:
        def stats(self) -> None:
            pass

    actor: Any = NeverUp.remote()
    member = Spawned("run/trainer-0", actor, has_state=True)
    with pytest.raises(StageHungError, match="run/trainer-0 hangs"):
        ray_stages._wait_until_up([member], 60.0, Watch(), 0.1)  # type: ignore[arg-type]
    ray.kill(actor)
