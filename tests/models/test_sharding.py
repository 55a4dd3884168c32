"""FSDP2 against identical copies: two processes that meet over gloo, as two trainers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.program.program import DivergedError
from rayrec.models.program.sharding import ShardedModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.schedule import RateSchedule
from tests.models.ctr.programs import RANKING, ranking_program
from tests.models.keras import impressions
from tests.models.networks import CPU, table_rows
from tests.models.recipes import ROWS, features_of, model_of
from tests.models.two_trainers import NUM_TRAINERS, begin_sum, in_processes

NAMES = (
    "sasrec",
    "bsarec",
    "prefix_decoder",
    "prefix_decoder, hybrid",
    "light_decoder",
    "lazy_decoder",
    "encoder_decoder",
    "lazy_decoder, instructed",
    "encoder_decoder, instructed",
    "hstu",
    "hstu, dense",
    "causal_lm",
)
SETTINGS = DenseOptimizerSettings(0.01, 0.01, RateSchedule(), max_grad_norm=0.5, fused=True)
SPLIT = ComputeSettings(parallel="fsdp2")


def program(name: str, compute: ComputeSettings = PLAIN) -> SequenceProgram:
    made = SequenceProgram(model_of(name), SETTINGS, CPU, 5, sum_over_trainers=begin_sum, compute=compute)
    if compute.is_split:
        made.join()
    return made


def train(trained: SequenceProgram, name: str, rank: int, steps: range, rows: Any = ROWS) -> list[float]:
    """Loss of this trainer's share, step by step."""
    losses = []
    for step in steps:
        mine = features_of(name, step, rows, NUM_TRAINERS)[rank]
        losses.append(trained.backward(mine, table_rows(mine)).loss_sum)
        trained.update()
    return losses


def close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, name
        np.testing.assert_allclose(value, theirs[name], rtol=2e-3, atol=2e-5, err_msg=name)


def _all_that_two_trainers_promise(rank: int, folder: Path) -> None:
    for name in NAMES:
        _shards_train_as_copies_do(rank, name)
    for name in RANKING:
        _shards_of_ranking_models_train_as_copies_do(rank, name)
    _either_loads_what_the_other_saved(rank)
    _an_empty_share_takes_part(rank)
    _in_pieces_and_in_bfloat16(rank)
    _trainers_need_not_rank_equally_often(rank)
    _what_diverges_is_refused(rank)
    _single_numbers_are_refused()


def _shards_train_as_copies_do(rank: int, name: str) -> None:
    copies, shards = program(name), program(name, SPLIT)
    held = sum(parameter.to_local().numel() for parameter in shards.model.parameters())
    assert held < 0.7 * sum(parameter.numel() for parameter in copies.model.parameters())

    losses = train(shards, name, rank, range(5))

    np.testing.assert_allclose(losses, train(copies, name, rank, range(5)), rtol=1e-4)
    close(shards.weights(), copies.weights())
    close(shards.optimizer_state(), copies.optimizer_state())


def _shards_of_ranking_models_train_as_copies_do(rank: int, name: str) -> None:
    copies, shards = (ranking_program(name, CPU, compute, begin_sum) for compute in (PLAIN, SPLIT))
    shards.join()
    num_rows = 17  # not as many for one trainer as for the other
    mine = slice(0, 6) if rank == 0 else slice(6, num_rows)
    for step in range(3):
        features = impressions.batch(num_rows, step, rows=mine)
        rows = impressions.table_rows(features)
        ours, expected = shards.backward(features, rows), copies.backward(features, rows)
        assert ours.loss_sum == pytest.approx(expected.loss_sum, rel=1e-4)
        for table, grads_MD in ours.row_grads.items():
            np.testing.assert_allclose(grads_MD, expected.row_grads[table], rtol=1e-3, atol=1e-6)
        for trained in (shards, copies):
            trained.update()
    close(shards.weights(), copies.weights())
    shards.begin_inference()
    np.testing.assert_allclose(shards.predict(features, rows), copies.predict(features, rows), rtol=1e-4)


def _either_loads_what_the_other_saved(rank: int) -> None:
    name = "light_decoder"
    begun = {compute.parallel: program(name, compute) for compute in (ComputeSettings(), SPLIT)}
    for trained in begun.values():
        train(trained, name, rank, range(3))
    for saved, loaded in (("replicated", "fsdp2"), ("fsdp2", "replicated"), ("fsdp2", "fsdp2")):
        source, target = begun[saved], program(name, ComputeSettings(parallel=loaded))
        weights, state = source.weights(), source.optimizer_state()
        target.load(weights, state)
        for held, given in ((target.weights(), weights), (target.optimizer_state(), state)):
            assert all(held[key].tobytes() == given[key].tobytes() for key in given)
        continued = program(name, ComputeSettings(parallel=saved))
        continued.load(weights, state)
        train(target, name, rank, range(3, 6))
        train(continued, name, rank, range(3, 6))
        close(target.weights(), continued.weights())


def _an_empty_share_takes_part(rank: int) -> None:
    for name in NAMES:
        rows = [[1, 2, 3]]  # of which one trainer gets nothing
        copies, shards = program(name), program(name, SPLIT)
        losses = train(shards, name, rank, range(2), rows)
        np.testing.assert_allclose(losses, train(copies, name, rank, range(2), rows), rtol=1e-4)
        close(shards.weights(), copies.weights())


def _in_pieces_and_in_bfloat16(rank: int) -> None:
    name = "light_decoder"
    for precision in ("float32", "bfloat16"):
        whole = program(name, ComputeSettings(precision=precision))
        pieces = program(name, ComputeSettings(precision=precision, parallel="fsdp2", micro_batches=4))
        losses = train(pieces, name, rank, range(3))
        rtol = 1e-4 if precision == "float32" else 2e-2
        np.testing.assert_allclose(losses, train(whole, name, rank, range(3)), rtol=rtol)


def _trainers_need_not_rank_equally_often(rank: int) -> None:
    name = "encoder_decoder"
    copies, shards = program(name), program(name, SPLIT)
    features = features_of(name)[0]
    for trained in (copies, shards):
        train(trained, name, rank, range(1))
        trained.begin_inference()
        trained.begin_inference()
    for _ in range(2 * rank):
        ranked = shards.recommend(features, table_rows(features), 3, None)
        expected = copies.recommend(features, table_rows(features), 3, None)
        assert ranked.items_BK.tolist() == expected.items_BK.tolist()
    close(shards.weights(), copies.weights())
    np.testing.assert_allclose(
        train(shards, name, rank, range(1, 3)), train(copies, name, rank, range(1, 3)), rtol=1e-4
    )


def _what_diverges_is_refused(rank: int) -> None:
    shards = program("sasrec", SPLIT)
    weights = shards.weights()
    shards.load({**weights, "items_ID": np.full_like(weights["items_ID"], np.nan)}, None)
    with pytest.raises(DivergedError, match="step 0: the loss is nan"):
        train(shards, "sasrec", rank, range(1))


def _single_numbers_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"cannot split 'temperature'.*'replicated'"):
        ShardedModel(model, CPU)


@pytest.mark.slow
def test_shards_train_as_copies_do(tmp_path):
    """In one test, since two processes take long to start."""
    in_processes(_all_that_two_trainers_promise, tmp_path)
