"""Sums of dense gradients in buckets, begun while backward goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.program.bucketed_sum import BucketedSum
from tests.models.networks import table_rows
from tests.models.recipes import features_of
from tests.models.test_sharding import program, train
from tests.models.two_trainers import in_processes

ONE_BUCKET, MANY_BUCKETS = 2**30, 256


class Wire:
    """Notes what is begun, and doubles it when it is waited for."""

    def __init__(self) -> None:
        self.begun: list[list[float]] = []

    def begin(self, flat: Tensor) -> Any:
        self.begun.append(flat.tolist())
        return lambda: flat.mul_(2)


def chain(sizes: list[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((size,), float(size))) for size in sizes]


def over(parameters: list[nn.Parameter], wire: Wire, bucket_bytes: int) -> BucketedSum:
    pairs = [(parameter, parameter) for parameter in parameters]
    return BucketedSum(pairs, wire.begin, bucket_bytes, torch.float32)


def test_a_bucket_is_begun_in_backward_as_soon_as_it_and_all_before_it_are_there():
    first, second, third = chain([2, 3, 4])
    wire = Wire()
    sums = over([first, second, third], wire, 16)  # four floats
    begun_after: list[int] = []
    for parameter in (first, second, third):
        parameter.register_post_accumulate_grad_hook(lambda _: begun_after.append(len(wire.begun)))
    sums.begin_last_backward()

    (third.sum() * 3).backward()
    second.sum().backward()
    first.sum().backward()

    assert begun_after == [1, 2, 3]
    assert wire.begun[0] == [3.0] * 4
    sums.finish()
    assert third.grad.tolist() == [6.0] * 4
    assert first.grad.tolist() == [2.0] * 2


def test_buckets_are_begun_in_their_order_whatever_is_ready_first():
    parameters = chain([4, 3, 2])
    wire = Wire()
    sums = over(parameters, wire, 4)  # less than any: one bucket each
    sums.begin_last_backward()
    parameters[0].sum().backward()
    assert wire.begun == []
    parameters[2].sum().backward()
    assert [len(flat) for flat in wire.begun] == [2]
    sums.finish()
    assert [len(flat) for flat in wire.begun] == [2, 3, 4]
    assert parameters[1].grad.tolist() == [0.0] * 3  # not reached: the others may have something for it


def test_only_the_last_backward_of_a_step_begins_sums():
    (parameter,) = chain([3])
    wire = Wire()
    sums = over([parameter], wire, 4)
    parameter.sum().backward()
    assert wire.begun == []
    sums.begin_last_backward()
    parameter.sum().backward()
    assert wire.begun == [[2.0] * 3]
    sums.finish()
    assert parameter.grad.tolist() == [4.0] * 3


def test_a_weight_that_is_reached_again_is_refused():
    (parameter,) = chain([3])
    sums = over([parameter], Wire(), 4)
    sums.begin_last_backward()
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="reached a weight again"):
        parameter.sum().backward()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("weights", ["float32", "bfloat16_with_master"])
def test_all_of_a_network_is_begun_before_backward_ends(micro_batches, weights, monkeypatch):
    wire = Wire()
    monkeypatch.setattr("tests.models.test_sharding.begin_sum", wire.begin)
    precision = "bfloat16" if weights != "float32" else "float32"
    made = program(
        "lazy_decoder",
        ComputeSettings(precision, micro_batches, weights=weights, reduce_bucket=MANY_BUCKETS),
    )
    features = features_of("lazy_decoder")[0]
    made.backward(features, table_rows(features))
    num_sent = sum(len(flat) for flat in wire.begun)
    num_trained = sum(parameter.numel() for parameter in made.model.parameters())
    assert len(wire.begun) > 3
    assert num_sent == num_trained


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_that_was_given_up_leaves_nothing_to_the_next(micro_batches, monkeypatch):
    """A server may die between backward and update; trainers stay, and go on from a snapshot."""
    wire = Wire()
    monkeypatch.setattr("tests.models.test_sharding.begin_sum", wire.begin)
    made = program("lazy_decoder", ComputeSettings(micro_batches=micro_batches, reduce_bucket=MANY_BUCKETS))
    features = features_of("lazy_decoder")[0]
    made.backward(features, table_rows(features))
    num_sums = len(wire.begun)

    made.load(made.weights(), None)
    made.backward(features, table_rows(features))

    assert len(wire.begun) == 2 * num_sums
    made.load(made.weights(), None)
    monkeypatch.setattr(made, "_pieces", lambda batch: iter(()))  # a share without tokens
    made.backward(features, table_rows(features))
    made.update()
    assert len(wire.begun) == 3 * num_sums


def _buckets_do_not_change_a_bit(rank: int, folder: Path) -> None:
    for name in ("lazy_decoder", "hstu", "causal_lm"):
        for settings in ({}, {"micro_batches": 3}):
            one, many = (
                program(name, ComputeSettings(**settings, reduce_bucket=size))
                for size in (ONE_BUCKET, MANY_BUCKETS)
            )
            assert train(one, name, rank, range(4)) == train(many, name, rank, range(4))
            for key, value in one.weights().items():
                assert value.tobytes() == many.weights()[key].tobytes(), key
    name = "lazy_decoder"
    for parallel in ("replicated", "fsdp2"):
        plain, halved = (
            program(name, ComputeSettings(parallel=parallel, reduce_dtype=dtype))
            for dtype in ("float32", "bfloat16")
        )
        np.testing.assert_allclose(
            train(halved, name, rank, range(3)), train(plain, name, rank, range(3)), rtol=1e-3
        )
        ours, theirs = halved.weights(), plain.weights()
        assert any((ours[key] != theirs[key]).any() for key in ours)  # they were rounded


@pytest.mark.slow
def test_two_trainers_have_the_same_bits_whatever_the_buckets(tmp_path):
    """With more, a bucket's place in gloo's ring decides in which order its numbers are added."""
    in_processes(_buckets_do_not_change_a_bit, tmp_path)
