"""Contexts of returning users on the device, in the host's memory and on disk."""

import logging

import numpy as np
import pytest
import safetensors.torch
import torch

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.generative import context_tiers
from rayrec.models.generative.context_tiers import ContextTiers, Kept


def kept(number, dtype=torch.float32):
    """Of one event; 72 bytes in float32."""
    tensors = torch.randn(1, 2, 2, 2, 2, generator=torch.Generator().manual_seed(number))
    return Kept(np.array([number]), tensors.to(dtype))


def places(tiers):
    return {tier.name: list(tier.entries) for tier in tiers.tiers}


def tiers_of(tmp_path, device=2, host=1, disk=2):
    return ContextTiers(CacheSizes(*(count * 72 for count in (device, host, disk)), folder=tmp_path))


def test_the_least_lately_used_goes_down_a_tier_and_at_last_is_gone(tmp_path):
    tiers = tiers_of(tmp_path)
    for number in range(6):
        tiers.put(number, kept(number))

    assert places(tiers) == {"device": [4, 5], "host": [3], "disk": [1, 2]}
    assert 0 not in tiers
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_used_comes_back_to_the_device_with_the_same_bits(tmp_path, dtype):
    tiers = tiers_of(tmp_path)
    for number in range(6):
        tiers.put(
            number, kept(number, dtype)._replace(events_P=np.zeros(5 if dtype == torch.bfloat16 else 1))
        )

    for number, tier in ((1, "disk"), (3, "disk"), (5, "host")):
        before = tiers.num_reused[tier]
        found = tiers.get(number, 1)
        assert torch.equal(found, kept(number, dtype).tensors)
        assert tiers.num_reused[tier] == before + 1
        assert next(reversed(tiers.tiers[0].entries)) == number
    assert sum(tiers.num_reused.values()) == 3
    assert tiers.tiers[2].num_bytes == 72 * len(tiers.tiers[2].entries)


def test_a_context_that_is_larger_than_a_tier_passes_it_by(tmp_path):
    tiers = tiers_of(tmp_path, device=2, host=4)
    large = Kept(np.zeros(20), kept(0).tensors)
    tiers.put(1, kept(1))
    tiers.put(0, large)

    assert places(tiers) == {"device": [1], "host": [0], "disk": []}
    assert torch.equal(tiers.get(0, 1), large.tensors)
    assert places(tiers)["host"] == [0]


def test_forgotten_contexts_leave_no_file(tmp_path):
    tiers = tiers_of(tmp_path, device=0, host=0)
    tiers.put(1, kept(1))
    assert 1 in tiers
    tiers.forget(1)
    tiers.forget(2)
    assert 1 not in tiers
    assert not list(tmp_path.rglob("*.safetensors"))
    assert tiers.tiers[-1].num_bytes == 0


def test_a_damaged_file_is_a_context_less(tmp_path, caplog):
    tiers = tiers_of(tmp_path, device=0, host=0)
    tiers.put(1, kept(1))
    next(tmp_path.rglob("*.safetensors")).write_bytes(b"damaged")

    assert tiers.get(1, 1) is None
    assert 1 not in tiers
    assert "a kept context is lost" in caplog.text


def test_a_disk_that_takes_nothing_is_said_once_and_left_alone_for_a_while(tmp_path, caplog, monkeypatch):
    now, tried, save_file = [0.0], [], safetensors.torch.save_file

    def fill(tensors, path):
        tried.append(path)
        path.write_bytes(b"what there was room for")
        raise safetensors.SafetensorError("No space left on device")

    tiers = ContextTiers(CacheSizes(0, disk=144, folder=tmp_path), clock=lambda: now[0])
    monkeypatch.setattr(safetensors.torch, "save_file", fill)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            tiers.put(number, kept(number))
    assert not any(number in tiers for number in range(3))
    assert len(tried) == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    assert caplog.text.count("contexts are not kept on disk: No space left") == 1

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    now[0] = context_tiers.PAUSE_S
    tiers.put(4, kept(4))
    assert 4 in tiers


def test_files_go_with_the_cache(tmp_path):
    tiers = tiers_of(tmp_path, device=0, host=0)
    tiers.put(1, kept(1))
    assert list(tmp_path.iterdir())
    del tiers
    assert not list(tmp_path.iterdir())


def test_metrics_name_the_tiers_that_are_there(tmp_path):
    assert ContextTiers(CacheSizes(100)).metrics() == {}
    tiers = tiers_of(tmp_path, device=1, host=1, disk=0)
    for number in range(2):
        tiers.put(number, kept(number))
    tiers.get(0, 7)
    assert tiers.metrics() == {
        "prefix_cache_host_histories": 1,
        "prefix_cache_host_bytes": 72,
        "prefix_cache_device_events_reused": 0,
        "prefix_cache_host_events_reused": 7,
    }
