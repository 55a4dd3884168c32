from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from rayrec.actors.feature_worker import BatchSummary, FeatureWorker
from rayrec.actors.read_ahead import ReadAhead
from rayrec.actors.sample_reader import SampleReaderActor
from rayrec.actors.spawning import ActorRole
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import DiskConfig, TableConfig
from rayrec.platform.metrics import PUBLISH_EVERY_BATCHES, RayStageMetrics
from rayrec.samples.base.batches import FeatureBatch
from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.row_features import RowFeatures
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.read_plan import ReadPlan, readings
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import row_batch, sample_batch, small_dataset

COLUMNS = pa.schema([("user_id", pa.int64()), ("item_ids", pa.list_(pa.int64()))])
AS_READ = FeatureProgram.compile([], COLUMNS)


def worker(num_trainers: int, group_size: int = 1) -> FeatureWorker:
    features = SequenceFeatures(np.arange(9), max_length=5, num_trainers=num_trainers)
    role = ActorRole("run", "feature_worker", 1)
    return FeatureWorker(role, lambda: RowFeatures(features, AS_READ), group_size=group_size)


def test_every_trainer_gets_an_object_of_its_own():
    batch = row_batch([[1, 2, 3], [4, 5]])

    summary, (whole,) = worker(1).compute(0, batch)
    assert isinstance(whole, FeatureBatch)
    assert whole.items_N.tolist() == [1, 2, 4]
    assert summary == BatchSummary(batch.cursor)
    _, (first,), (second,) = worker(2).compute(0, batch)
    assert isinstance(first, FeatureBatch)
    assert isinstance(second, FeatureBatch)
    assert (first.items_N.tolist(), second.items_N.tolist()) == ([1, 2], [4])
    assert first.num_targets == second.num_targets == 3


def test_trainers_of_a_group_get_one_object():
    _, first, last = worker(3, group_size=2).compute(0, row_batch([[1, 2, 3], [4, 5], [6, 7]]))

    assert [share.items_N.tolist() for share in first] == [[1, 2], [4]]
    assert [share.items_N.tolist() for share in last] == [[6]]


def test_what_a_batch_will_read_from_disk_is_prefetched_by_the_servers_that_hold_it():
    announced: list[dict[str, list[int]]] = [{}, {}]

    def server(shard: int) -> SimpleNamespace:
        def prefetch(request: dict[str, np.ndarray]) -> None:
            announced[shard] |= {name: ids_M.tolist() for name, ids_M in request.items()}

        return SimpleNamespace(prefetch=SimpleNamespace(remote=prefetch))

    tables = [TableConfig(name="item", dim=2, disk=DiskConfig(memory=2**30)), TableConfig(name="user", dim=2)]
    features = SequenceFeatures(np.arange(9), max_length=5, num_trainers=2, tables=("item", "user"))
    member = FeatureWorker(
        ActorRole("run", "feature_worker", 1),
        lambda: RowFeatures(features, AS_READ),
        ReadAhead(tables, [server(0), server(1)]),
    )

    _, (first,), (second,) = member.compute(0, row_batch([[1, 2, 3], [4, 5]]))

    assert [list(request) for request in announced] == [["item"], ["item"]]
    both = np.concatenate([request["item"] for request in announced])
    assert sorted(both) == sorted({*first.lookups["item"].ids_M, *second.lookups["item"].ids_M})
    assert ShardMap(2).shard_of(np.array(announced[1]["item"])).all()


def test_ranking_comes_with_the_items_a_row_has_seen():
    features, seen_BE = worker(1).ranking(sample_batch([[1, 2, 3, 4, 5, 6], [7]], targets=[8, 0]))

    assert features.items_N.tolist() == [2, 3, 4, 5, 6, 7]  # the newest five, and the other row
    assert seen_BE.tolist() == [[1, 2, 3, 4, 5, 6], [7, -1, -1, -1, -1, -1]]


def test_members_are_known_by_run_stage_and_number():
    assert repr(worker(1)) == "run/feature_worker-1"


def test_time_spent_on_batches_is_counted():
    member = worker(1)
    for step in range(3):
        member.compute(step, row_batch([[1, 2]]))

    times = member.stats()

    assert times.num_batches == 3
    assert times.busy_s > 0


def test_times_are_published_while_batches_go_by(tmp_path, monkeypatch):
    """Not only when somebody asks: between two validations the dashboard would stand still."""
    published = []
    monkeypatch.setattr(
        RayStageMetrics, "publish", lambda self, times, further: published.append(times.num_batches)
    )
    plan = ReadPlan.of(small_dataset(tmp_path), batch_size=7, seed=3)
    reader, member = SampleReaderActor(ActorRole("run", "sample_reader", 0), plan.spec), worker(1)

    for step in range(2 * PUBLISH_EVERY_BATCHES + 1):
        (reading,) = readings(plan, plan.batch(step % 4), 1)
        member.compute(step, reader.read(reading))

    assert published == [20, 20, 40, 40]


def test_the_reading_actor_reads_what_its_reader_reads(tmp_path):
    plan = ReadPlan.of(small_dataset(tmp_path), batch_size=7, seed=3)
    actor = SampleReaderActor(ActorRole("run", "sample_reader", 0), plan.spec)

    (reading,) = readings(plan, plan.batch(2), 1)
    found, expected = actor.read(reading), SampleReader(plan.spec).read_batch(plan.batch(2))

    assert found.row_keys_B.tolist() == expected.row_keys_B.tolist()
    assert found.rows.equals(expected.rows)
    assert found.cursor == expected.cursor
    assert actor.stats().num_batches == 1
