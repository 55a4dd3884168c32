"""Batches that are filled up until enough groups have signal, with rewards that a test decides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.platform.errors import InputError
from rayrec.rl.batches import BatchSource
from rayrec.rl.config import RlConfig
from rayrec.rl.prompts import Prompts, PromptStream
from rayrec.rl.rollouts import ChunkSummary
from rayrec.rl.run import train_policy
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from tests.helpers.runs import make_run
from tests.rl.rl_steps import config_of, training_of

USERS_PER_READ = 4


def config(**dynamic) -> RlConfig:
    return RlConfig.parse(
        {
            "init_from": "run",
            "rewards": {"parts": [{"kind": "hit"}]},
            "prompts": {"users_per_step": USERS_PER_READ},
            "rollout": {"chunk_users": 2, "dynamic": dynamic or None},
        }
    )


class Stream:
    """Reads of four users each; the ids of read n are 4n to 4n + 3."""

    def read_on(self, step: int, read: int) -> tuple[Prompts, int]:
        users_U = np.arange(USERS_PER_READ) + USERS_PER_READ * read
        offsets_B1 = np.arange(USERS_PER_READ + 1)
        samples = SampleBatch(step, users_U, users_U, users_U, offsets_B1, targets_B=users_U)
        return Prompts(samples, users_U), read + 1


class Controller:
    """A chunk stands for its rollouts; users with even ids have signal, unless there is none."""

    def __init__(self, has_signal: bool = True) -> None:
        self._has_signal = has_signal
        self.noise_keys: list[tuple[int, int]] = []
        self.weights: list[object] = []

    def sample(self, chunks, weights):
        self.noise_keys += [(chunk.step, chunk.chunk) for chunk in chunks]
        self.weights.append(weights)
        return list(chunks)

    def score(self, chunk):
        ids_U = chunk.samples.user_ids_B
        num_equal = int((ids_U % 2 == 1).sum()) if self._has_signal else len(ids_U)
        num_groups = len(ids_U) - num_equal or len(ids_U)
        summary = ChunkSummary(
            3, len(ids_U), num_groups, num_groups, num_groups, 1.0, {"hit.mean": 1.0}, num_equal, ()
        )
        return summary, f"scored {ids_U.tolist()}"

    def reference_log_probs(self, chunks):
        return [f"reference of {chunk}" for chunk in chunks]

    def get(self, promises):
        return list(promises)


def completed(source: BatchSource, step: int = 0, weights: object = None):
    return source.complete(source.begin(step, 3, weights))


def test_reads_go_on_until_enough_groups_have_signal_and_the_cursor_counts_them():
    controller = Controller()
    source = BatchSource(config(groups=5, max_reads=8), controller, Stream())
    batch = completed(source, weights="those of the batch")

    # Two of four users in every read: three reads have six groups.
    assert source.num_reads == 3
    assert batch.num_groups == 6
    assert batch.metrics()["oversampling"] == 2.0
    assert batch.metrics()["zero_variance_share"] == 0.5
    assert batch.metrics()["reward/hit.mean"] == 1.0
    # Every chunk of the batch has noise of its own, and the same policy sampled all of them.
    assert controller.noise_keys == [(0, chunk) for chunk in range(6)]
    assert controller.weights == ["those of the batch"] * 3

    second = completed(source, step=1)
    assert source.num_reads == 6
    assert second.learned[0].scored == "scored [12, 13]"


def test_only_kept_groups_ask_for_the_reference():
    batch = completed(BatchSource(config(groups=2, max_reads=1), Controller(), Stream()))
    assert [chunk.reference for chunk in batch.learned] == [
        "reference of scored [0, 1]",
        "reference of scored [2, 3]",
    ]


def test_oversampling_has_a_cap_and_what_was_found_is_learned_from():
    source = BatchSource(config(groups=8, max_reads=2), Controller(), Stream())
    batch = completed(source)
    assert source.num_reads == 2
    assert batch.num_groups == 4


def test_a_batch_without_any_signal_is_learned_from_whole():
    source = BatchSource(config(groups=2, max_reads=2), Controller(has_signal=False), Stream())
    batch = completed(source)
    assert source.num_reads == 2
    assert batch.num_groups == 8
    assert batch.metrics()["zero_variance_share"] == 1.0


def test_without_dynamic_sampling_a_batch_is_one_read():
    source = BatchSource(config(), Controller(), Stream())
    batch = completed(source)
    assert source.num_reads == 1
    assert len(batch.sampled) == len(batch.learned) == 2


def test_batches_in_flight_share_one_order_of_prompts():
    """Two begun ahead: the refill of the first continues after both."""
    source = BatchSource(config(groups=4, max_reads=8), Controller(), Stream())
    first, second = source.begin(0, 3, None), source.begin(1, 3, None)
    kept = [chunk.scored for chunk in source.complete(first).learned]
    assert kept == ["scored [0, 1]", "scored [2, 3]", "scored [8, 9]", "scored [10, 11]"]
    assert [chunk.scored for chunk in source.complete(second).learned][:1] == ["scored [4, 5]"]
    assert source.num_reads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"name": "dpo"}}, "dpo learns from these, too"),
        ({"prompts": {"users_per_step": 16}}, "no batch would ever be full"),
    ],
)
def test_a_batch_that_cannot_be_filled_is_refused(changes, message):
    values = {
        "init_from": "run",
        "rewards": {"parts": [{"kind": "hit"}]},
        "rollout": {"dynamic": {"groups": 512, "max_reads": 4}},
    }
    with pytest.raises(InputError, match=message):
        RlConfig.parse(values | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("supervised"), "prefix")


DYNAMIC = {
    "rollout": {"group_size": 4, "chunk_users": 5, "dynamic": {"groups": 6, "max_reads": 5}},
    "rewards": {"parts": [{"kind": "hit"}]},
    "learner": {"learning_rate": 0.01, "warmup_steps": 0},
}


def test_the_learner_gets_no_group_without_signal(run):
    training = training_of(config_of(run, **DYNAMIC))
    reports = list(training.steps())
    assert all(report.metrics["zero_variance_share"] > 0 for report in reports)
    assert all(report.metrics["oversampling"] > 1 for report in reports)
    assert training.num_reads > len(reports)

    source = training._source
    batch = source.complete(source.begin(9, training._learned_version, None))
    scored = training._controller.get([chunk.scored for chunk in batch.learned])
    reference = training._controller.get([chunk.reference for chunk in batch.learned])
    for each, of_reference in zip(scored, reference, strict=True):
        assert (np.ptp(each.rewards_UG, axis=1) > 0).all()
        assert len(of_reference.candidates_UGL) == len(each.rewards_UG)
    assert sum(len(each.rewards_UG) for each in scored) == batch.num_groups


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["colocated", "async"])
def test_a_resumed_run_reads_on_where_the_other_had_read(run, tmp_path, kind):
    settings = {**DYNAMIC, "steps": 4, "placement": {"kind": kind, "cpus": 0.5}}
    settings["evaluation"] = {"every_steps": 2, "temperatures": [1.0], "list_size": 3}
    train_policy(config_of(run, **settings), tmp_path / "left-alone", cluster=in_process)
    path = tmp_path / "run"
    train_policy(config_of(run, **settings | {"steps": 2}), path, cluster=in_process)
    train_policy(config_of(run, **settings), path, resume=True, cluster=in_process)

    def last(folder: Path):
        return read_snapshot(RunFolder.open(folder).chosen_snapshot("last"))

    expected, found = last(tmp_path / "left-alone"), last(path)
    assert found.state.progress["num_reads"] == expected.state.progress["num_reads"] > 4
    for name, array in found.weights.items():
        assert np.array_equal(array, expected.weights[name]), name
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["oversampling"] >= 1 for line in lines if "loss" in line)


def test_a_row_that_is_read_twice_in_a_step_has_another_event(run):
    dataset = Dataset.open(RunFolder.open(run).config.data.path)
    prompts = config_of(run, prompts={"split": "train", "users_per_step": 64, "held_out_share": 0.0}).prompts
    stream = PromptStream(dataset, prompts, seed=0)
    epoch = stream.plan.steps_per_epoch

    def targets(read: int) -> dict[int, int]:
        found, after = stream.read_on(0, read)
        assert after == read + 1
        return dict(zip(found.samples.user_ids_B.tolist(), found.targets_U.tolist(), strict=True))

    first = {user: item for read in range(epoch) for user, item in targets(read).items()}
    again = {user: item for read in range(epoch, 2 * epoch) for user, item in targets(read).items()}
    assert first.keys() == again.keys()
    assert first != again
