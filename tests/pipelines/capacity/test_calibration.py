"""Costs are found again in steps that were made of them; a file that is none is refused."""

from dataclasses import replace

import pytest

from rayrec.pipelines.capacity.calibrate import Variant, variants_of
from rayrec.pipelines.capacity.calibration import (
    SHIPPED,
    Calibration,
    calibrated,
    fastest,
    spread_of,
    this_machine,
)
from rayrec.pipelines.capacity.costs import fit_counts
from rayrec.pipelines.capacity.step_model import step_plan
from rayrec.pipelines.capacity.windows import wait_for_quiet
from rayrec.pipelines.capacity.workload import Scale
from rayrec.platform.errors import InputError
from tests.helpers.impressions import ctr_config, impression_dataset
from tests.pipelines.capacity.plans import CORES, COSTS, WORK, made_of_costs, variants


@pytest.mark.slow
def test_costs_are_found_again(calibration):
    other = replace(WORK, is_near=False).scaled(Scale(batch=2000, servers=4, mode="bounded_stale"))

    predicted = calibration.plan(other, this_machine(CORES)).seconds

    assert predicted == pytest.approx(step_plan(other, this_machine(CORES), COSTS).seconds, rel=0.05)
    assert calibration.residual < 0.2  # each by the others, which may not show all that it does


def test_no_cost_is_below_zero():
    found = fit_counts([({"a": 1.0, "b": 1.0}, 1.0), ({"a": 1.0, "b": 2.0}, 0.5)])

    assert min(found.values()) >= 0


def test_counts_of_very_different_sizes_are_told_apart():
    rows = [
        ({"bytes": 1e9 * n, "calls": calls}, 1e-10 * 1e9 * n + 2e-3 * calls)
        for n, calls in ((1, 1), (2, 50), (3, 7))
    ]

    assert fit_counts(rows) == pytest.approx({"bytes": 1e-10, "calls": 2e-3})


@pytest.mark.slow
def test_the_range_of_a_step_holds_what_it_is(calibration):
    low, high = calibration.step_range(WORK, this_machine(CORES))

    assert low <= calibration.plan(WORK, this_machine(CORES)).seconds <= high


def test_a_calibration_is_read_as_it_was_written(calibration, tmp_path):
    calibration.save(tmp_path / "made.json")

    assert Calibration.load(tmp_path / "made.json") == calibration
    assert list(tmp_path.iterdir()) == [tmp_path / "made.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "costs": {"wrong": 1}}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, content):
    (tmp_path / "costs.json").write_text(content)

    with pytest.raises(InputError, match="write one with rayrec calibrate"):
        Calibration.load(tmp_path / "costs.json")


def test_a_missing_calibration_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.json: there is no calibration"):
        Calibration.load(tmp_path / "nothing.json")


def test_two_configurations_are_too_few():
    with pytest.raises(InputError, match="3 configurations or more"):
        calibrated([made_of_costs(work) for work in variants()[:2]], CORES, "here", "2026-11-26")


def test_the_calibration_that_comes_with_the_project_can_be_used():
    calibration = Calibration.load(SHIPPED)

    assert 3 <= len(calibration.windows) <= 8
    assert calibration.plan(WORK, this_machine(2)).seconds > 0


def test_the_fastest_window_counts():
    windows = [replace(made_of_costs(WORK).times, step_s=step_s) for step_s in (0.03, 0.02, 0.05)]

    assert fastest(windows).step_s == 0.02
    assert spread_of(windows) == pytest.approx(0.5)


def test_a_busy_machine_is_waited_for_and_not_for_ever():
    loads, now = iter([0.9, 0.9, 0.1]), iter(range(100))
    assert wait_for_quiet(10.0, lambda: next(loads), lambda: next(now))
    assert not wait_for_quiet(10.0, lambda: 0.9, lambda: next(now))


def test_a_window_names_its_busiest_stage():
    times = made_of_costs(WORK).times

    assert replace(times, dense_s=1.0).bottleneck() == "dense"
    assert replace(times, servers_busy_s=1.0).bottleneck() == "sparse"
    assert replace(times, exchange_s=1.0).bottleneck() == "sparse"
    assert replace(times, driver_cpu_s=1.0).bottleneck() == "driver"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return ctr_config(impression_dataset(tmp_path_factory.mktemp("calibrate")))


def test_variants_of_a_run_show_every_mode_and_transport_twice(config):
    found = variants_of(config)

    assert len(found) == 8
    assert len({variant.label for variant in found}) == 8
    for name, values in (
        ("mode", ("sync", "exact_prefetch", "bounded_stale")),
        ("transport", ("ray", "auto")),
        ("trainers", (1, 2)),
    ):
        for value in values:
            assert sum(getattr(variant, name) == value for variant in found) >= 2


def test_what_a_run_cannot_have_in_a_variant_is_said_in_a_sentence(config):
    placed = config.model_copy(
        update={"sparse": config.sparse.model_copy(update={"cache_rows": 8, "wire": "bfloat16"})}
    )

    with pytest.raises(InputError, match=r"^variant of the run with servers 2: sparse\.cache_rows") as said:
        Variant(servers=2).of(placed)
    assert "\n" not in str(said.value)


def test_a_variant_changes_the_config_and_nothing_else(config):
    changed = Variant(3, 2, 8, 64, "sync", "ray", (16, 8)).of(config)

    assert (changed.sparse.num_servers, changed.pipeline.num_trainers) == (3, 2)
    assert changed.model.tables == {"feature": 8}
    assert changed.model.hidden_dims == (16, 8)
    assert (changed.training.batch_size, changed.pipeline.mode, changed.sparse.transport) == (
        64,
        "sync",
        "ray",
    )
    assert changed.data == config.data
