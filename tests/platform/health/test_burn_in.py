"""Short measurements of a device: of a busy one nothing, and slow or wrong ones found beside their peers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayrec.platform.health import burn_in as module
from rayrec.platform.health.burn_in import (
    BurnIn,
    burn_in,
    compare_burn_ins,
    copy_rate,
    cpu_load,
    disk_rates,
    fixed_checksum,
    matrix_rate,
    why_busy,
)
from rayrec.platform.health.counters import Card
from rayrec.platform.health.findings import Finding, worst

CPU = torch.device("cpu")
GOOD = BurnIn("cuda", "H100, torch 2.13", None, 700e12, 1.3e12, 1e9, 2e9, ("a" * 64,) * 3)


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {finding.code: finding.verdict for finding in findings if finding.verdict != "ok"}


def compared(*results: BurnIn) -> list[dict[str, str]]:
    return [
        wrong(findings)
        for findings in compare_burn_ins({f"node {n}": result for n, result in enumerate(results)}).values()
    ]


def test_a_matrix_rate_is_that_of_some_processor():
    assert 1e8 < matrix_rate(CPU, torch.float32) < 1e16


def test_rates_of_copies_and_of_a_disk_are_those_of_some_machine(tmp_path):
    assert 1e7 < copy_rate(CPU, 2**20) < 1e13
    assert all(1e5 < rate < 1e13 for rate in disk_rates(tmp_path, 2**21))
    assert list(tmp_path.iterdir()) == []


def test_the_fixed_computation_has_the_same_bits_every_time_and_one_wrong_number_changes_them(monkeypatch):
    right = fixed_checksum(CPU)
    tanh = torch.tanh

    def faulty(numbers: torch.Tensor) -> torch.Tensor:
        result = tanh(numbers)
        result.view(torch.int32)[7, 7] ^= 1
        return result

    assert fixed_checksum(CPU) == right
    monkeypatch.setattr(torch, "tanh", faulty)
    assert fixed_checksum(CPU) != right


@pytest.mark.slow
def test_a_quiet_machine_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DISK_BYTES", 2**20)
    monkeypatch.setattr(module, "COPY_BYTES", 2**20)

    result = burn_in("cpu", tmp_path, load=lambda: 0.02, text=lambda path: None)

    assert result.busy is None
    assert min(result.matrix_flops_per_s, result.copy_bytes_per_s, result.disk_read_bytes_per_s) > 0
    assert len(set(result.checksums)) == 1
    assert f"{torch.get_num_threads()} threads" in result.kind


@pytest.mark.parametrize(
    ("load", "card", "why"),
    [
        (0.9, None, "the CPUs are 90% busy"),
        (None, None, "how busy the CPUs are cannot be read"),
        (0.0, Card("cuda", 1, values={"utilization_percent": 97.0}), "cuda 1 is 97 % busy"),
        (
            0.0,
            Card("cuda", 1, values={"utilization_percent": 0.0, "memory_used_bytes": 40.0 * 2**30}),
            "40.0 GiB of cuda 1 are in use",
        ),
    ],
)
def test_a_machine_that_works_is_not_measured_and_unknown(load, card, why):
    result = burn_in("cpu", card=card, load=lambda: load)

    assert result.busy == why_busy(load, card) == why
    assert result.matrix_flops_per_s == 0
    (finding,) = compare_burn_ins({"node": result})["node"]
    assert (finding.verdict, finding.action) == ("unknown", "none")
    assert why in finding.detail


def test_the_load_is_that_of_now_and_what_a_host_takes_is_not_ours():
    stats = iter(["cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 ...", "cpu  130 0 110 850 5 0 0 5 0 0\n"])
    slept = []

    load = cpu_load(0.2, lambda path: next(stats), slept.append)

    assert load == pytest.approx((130 + 110 + 5 - 200) / 100)
    assert slept == [0.2]


def test_what_is_measured_while_others_begin_to_work_is_not_believed(monkeypatch):
    monkeypatch.setattr(module, "COPY_BYTES", 2**20)
    stats = iter(["cpu  100 0 100 800 0 0 0 0 0 0\n", "cpu  900000 0 100 900000 0 0 0 0 0 0\n"])

    result = burn_in("cpu", load=lambda: 0.0, text=lambda path: next(stats))

    assert result.busy == "others took 50% of the CPUs meanwhile"
    assert result.matrix_flops_per_s == 0


@pytest.mark.parametrize("stat", [None, "", "cpu", "intr 5 5 5 5 5"])
def test_a_load_that_cannot_be_read_is_none(stat):
    assert cpu_load(0.0, lambda path: stat, lambda s: None) is None


def test_like_devices_are_ok():
    findings = compare_burn_ins({f"node {n}": replace(GOOD) for n in range(3)})

    assert [worst(each) for each in findings.values()] == ["ok"] * 3


@pytest.mark.parametrize(
    ("slow", "verdict"),
    [
        ({"matrix_flops_per_s": 0.8 * 700e12}, {"slow-matrix": "suspect"}),
        ({"matrix_flops_per_s": 0.4 * 700e12}, {"slow-matrix": "suspect"}),
        ({"copy_bytes_per_s": 0.8 * 1.3e12}, {"slow-copy": "suspect"}),
        ({"disk_write_bytes_per_s": 0.6e9}, {}),
        ({"disk_write_bytes_per_s": 0.3e9}, {"slow-disk-write": "suspect"}),
    ],
)
def test_a_slow_one_is_found_beside_its_peers(slow, verdict):
    assert compared(GOOD, replace(GOOD, **slow), GOOD, GOOD) == [{}, verdict, {}, {}]


def test_two_devices_say_nothing_of_each_others_speed():
    assert compared(GOOD, replace(GOOD, matrix_flops_per_s=1.0)) == [{}, {}]


def test_other_kinds_and_busy_ones_are_no_peers():
    other = replace(GOOD, kind="A100", matrix_flops_per_s=300e12, checksums=("b" * 64,) * 3)
    busy = replace(GOOD, busy="in use", matrix_flops_per_s=0.0, checksums=())

    assert compared(GOOD, GOOD, other, other, other, busy) == [{}] * 5 + [{"burn-in": "unknown"}]


def test_a_device_that_computes_otherwise_than_its_peers_is_bad():
    wrong_one = replace(GOOD, checksums=("b" * 64,) * 3)

    assert compared(GOOD, wrong_one, GOOD) == [{}, {"checksum": "bad"}, {}]
    assert compared(GOOD, wrong_one) == [{"checksum": "unknown"}] * 2


def test_a_device_that_computes_otherwise_every_time_is_bad_without_any_peer():
    assert compared(replace(GOOD, checksums=("a" * 64, "b" * 64, "a" * 64))) == [{"checksum": "bad"}]
