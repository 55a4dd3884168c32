"""What a step does is counted on a run's own batches, and grows by Heaps' law."""

import itertools

import numpy as np
import pytest

from rayrec.pipelines.capacity.scale_options import parse_scale
from rayrec.pipelines.capacity.workload import Scale, heaps_exponent, late_share, workload_of
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.platform.errors import InputError
from tests.helpers.impressions import ctr_config, impression_dataset
from tests.pipelines.capacity.plans import TABLE, WORK


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return impression_dataset(tmp_path_factory.mktemp("capacity"))


def test_distinct_ids_that_grow_with_the_root_have_an_exponent_of_a_half():
    assert heaps_exponent([50, 70.7107, 100]) == pytest.approx(0.5, abs=1e-3)


def test_batches_that_share_nothing_have_no_late_ids():
    assert late_share(1, 1.0) == 0.0
    assert late_share(8, 1.0) == 0.0


def test_batches_that_are_all_alike_have_late_ids_alone():
    assert late_share(1, 0.0) == 1.0


def test_late_ids_by_the_law_are_those_of_sampled_batches():
    random = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, 200_001) ** 1.1
    ids = [random.choice(200_000, size=4000, p=weights / weights.sum()) for _ in range(20)]
    counts = [np.mean([len(np.unique(batch[: len(batch) // part])) for batch in ids]) for part in (4, 2, 1)]
    late = np.mean([np.isin(np.unique(now), before).mean() for before, now in itertools.pairwise(ids)])

    assert late_share(1, heaps_exponent(counts)) == pytest.approx(late, abs=0.03)


def test_a_batch_of_four_times_the_rows_has_twice_the_ids_at_an_exponent_of_a_half():
    scaled = WORK.scaled(Scale(batch=4000))

    assert scaled.ids == pytest.approx(2 * WORK.ids)
    assert scaled.flops == pytest.approx(4 * WORK.flops)
    assert scaled.tokens == 4 * WORK.tokens


def test_more_trainers_keep_the_rows_of_each():
    scaled = WORK.scaled(Scale(trainers=8))

    assert (scaled.rows, scaled.ids, scaled.flops) == (8000, WORK.ids, WORK.flops)
    assert scaled.tables[0].early < TABLE.early  # a larger batch before has more of them


def test_tables_grow_to_the_bytes_that_were_asked_for():
    scaled = WORK.scaled(Scale(sparse_bytes=10e12, dim=64))

    assert scaled.sparse_bytes == pytest.approx(10e12)
    assert scaled.tables[0].row_bytes == TABLE.row_bytes + 4 * 48


def test_no_batch_has_more_distinct_ids_than_the_table_has_rows():
    assert WORK.scaled(Scale(batch=1e9)).ids == TABLE.rows


def test_a_caller_for_eight_trainers_sends_fewer_ids_than_they_would():
    scaled = WORK.scaled(Scale(trainers=8, group_size=8))

    assert scaled.num_callers == 1
    assert scaled.caller_ids == pytest.approx(WORK.ids * 8**0.5)


def test_the_work_of_a_run_is_that_of_its_batches(dataset):
    assembly = assemble(ctr_config(dataset, pipeline={"num_trainers": 2}), checksums=False)

    work = workload_of(assembly, num_batches=4)

    shares = [assembly.features.training(step, _read(assembly, step)) for step in range(4)]
    assert work.rows == 32
    assert work.ids == np.mean([len(share.lookups["feature"].ids_M) for batch in shares for share in batch])
    assert 0 <= work.tables[0].early <= 1
    assert work.flops > 0
    assert work.dense_parameters > 0


def _read(assembly, step):
    from rayrec.samples.reading.reader import SampleReader

    return SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(step))


def test_sizes_are_read_as_people_write_them():
    scale = parse_scale(["trainers=1000", "dense_parameters=10B", "sparse_bytes=10TB", "mode=sync"])

    assert scale == Scale(trainers=1000, dense_parameters=10e9, sparse_bytes=10e12, mode="sync")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("trainer=3", "expected NAME=VALUE with one of trainers"),
        ("trainers", "expected NAME=VALUE"),
        ("trainers=many", "expected a number above 0"),
        ("trainers=0", "expected a number above 0"),
        ("trainers=1.5", "expected a whole number"),
        ("mode=fast", "expected one of sync"),
    ],
)
def test_a_size_that_is_none_is_refused(option, said):
    with pytest.raises(InputError, match=said):
        parse_scale([option])
