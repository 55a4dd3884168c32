"""Windows of a real pipeline on Ray: every role is seen, and what is left of the machine."""

import os
from dataclasses import asdict

import pytest

from rayrec.pipelines.capacity import windows
from rayrec.pipelines.capacity.calibrate import Variant, measure
from rayrec.pipelines.capacity.calibration import measured_from
from rayrec.pipelines.capacity.windows import children_cpu_s, machine_busy_s, measure_windows
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.platform.errors import InputError
from tests.helpers.impressions import ctr_config, impression_dataset


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return ctr_config(impression_dataset(tmp_path_factory.mktemp("windows")))


@pytest.mark.slow
def test_a_window_sees_every_role(ray_cluster, config):
    (measured,) = measure(config, [Variant(2, 1, mode="sync", transport="ray")], num_windows=2, num_steps=5)

    times = measured.times.to_dict()
    assert measured.workload.num_servers == 2
    assert not measured.workload.is_near
    assert measured.label == "servers 2, trainers 1, mode sync, transport ray"
    for name in ("step_s", "read_cpu_s", "features_cpu_s", "servers_cpu_s", "trainers_cpu_s", "driver_cpu_s"):
        assert times[name] > 0, name
    assert times["dense_s"] + times["exchange_s"] <= 1.1 * times["step_s"]
    assert 0 < times["free_cores"] <= os.cpu_count()
    assert measured_from(asdict(measured)) == measured


def test_a_run_with_too_few_steps_is_refused_before_anything_starts(config, monkeypatch):
    monkeypatch.setattr(windows, "running_stages", lambda *arguments: pytest.fail("is started"))

    with pytest.raises(InputError, match="or use more data"):
        measure_windows("window", assemble(config, checksums=False), 2, 1000, 8)


def test_processor_time_of_the_machine_grows(tmp_path):
    before = machine_busy_s()
    sum(range(3_000_000))

    assert machine_busy_s() >= before
    assert machine_busy_s(tmp_path / "nothing") is None


def test_children_are_those_that_this_process_has_started(tmp_path):
    for process, parent in ((11, os.getpid()), (12, 11), (13, 1)):
        (tmp_path / str(process)).mkdir()
        fields = ["S", str(parent), *["0"] * 9, "300", "100"]
        (tmp_path / str(process) / "stat").write_text(f"{process} (a (name)) {' '.join(fields)}")

    tick = os.sysconf("SC_CLK_TCK")

    assert children_cpu_s(tmp_path) == {11: 400 / tick, 12: 400 / tick}
