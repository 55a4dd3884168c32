"""Language models whose weights or layers are split against identical copies, in two processes over gloo."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.language.text_program import TextProgram, TextProgramSpec
from rayrec.models.program.program import ProgramPlacement
from rayrec.models.program.sharding import local
from tests.models.language.texts import (
    LLAMA,
    PROMPTS,
    ROWS,
    SHAPE,
    VOCABULARY,
    Lookup,
    Text,
    config,
    optimizer,
    text,
)
from tests.models.test_sharding import close, in_processes

FSDP2, TENSOR = ComputeSettings(parallel="fsdp2"), ComputeSettings(parallel="tensor")
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}  # inputs and outputs share a matrix
GROUPS = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
CASES = {
    "llama": (LLAMA, {}, (FSDP2, TENSOR)),
    "gpt2": (GPT2, {}, (FSDP2,)),
    "padded": ({"model_type": "bloom", **SHAPE}, {"rows": "padded"}, (FSDP2,)),
    "adapters": (LLAMA, {"lora": {"rank": 2}}, (FSDP2,)),
    # Norms within heads, of which a trainer has some; biases; padded rows; inputs and outputs in one matrix.
    "qwen3": ({"model_type": "qwen3", **GROUPS, "tie_word_embeddings": True}, {}, (TENSOR,)),
    "phi": ({"model_type": "phi", **SHAPE}, {}, (TENSOR,)),
    "gemma2": ({"model_type": "gemma2", **GROUPS}, {"rows": "padded"}, (TENSOR,)),
    "tables": (LLAMA, {"table_dims": {"user": 4}}, (FSDP2, TENSOR)),
}


def program(name: str, compute: ComputeSettings = PLAIN) -> TextProgram:
    settings, more, _ = CASES[name]
    spec = TextProgramSpec(
        config(settings, **more),
        VOCABULARY,
        optimizer(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5),
    )
    placement = ProgramPlacement(
        torch.device("cpu"), 3, sum_over_trainers=torch.distributed.all_reduce, compute=compute
    )
    made = spec.build(placement)
    made.join()
    return made


def share(name: str, rank: int, step: int) -> Text:
    """One row for the first trainer, and the others for the second."""
    mine = slice(0, 1) if rank == 0 else slice(1, None)
    whole, part = text(step=step), text(ROWS[mine], PROMPTS[mine], step)
    found = Text(part.tokens_N, part.is_target_N, part.offsets_B1, whole.num_targets, step)
    if name != "tables":
        return found
    places_P = np.array([0]) if rank == 0 else np.array([0, 3])  # of each row the first token or two
    ids_M, inverse = np.array([7, 9])[: 1 + rank], np.arange(1 + rank)[::-1].copy()
    return replace(found, filled_P={"user": places_P}, lookups={"user": Lookup(ids_M, inverse)})


def table_rows(features: Text) -> dict[str, np.ndarray]:
    return {
        table: np.sin(lookup.ids_M[:, None] + np.arange(4)).astype(np.float32)
        for table, lookup in features.lookups.items()
    }


class Steps(NamedTuple):
    losses: np.ndarray
    """Of all trainers together."""
    row_grads: list[np.ndarray]
    """Of this trainer's rows."""


def train(trained: TextProgram, name: str, rank: int, steps: range) -> Steps:
    losses, row_grads = [], []
    for step in steps:
        mine = share(name, rank, step)
        found = trained.backward(mine, table_rows(mine))
        losses.append(found.loss_sum)
        row_grads += found.row_grads.values()
        trained.update()
    summed = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(summed)
    return Steps(summed.numpy(), row_grads)


def equal(ours: Steps, theirs: Steps, name: str) -> None:
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-6, err_msg=name)
    assert len(ours.row_grads) == len(theirs.row_grads)
    for mine, expected in zip(ours.row_grads, theirs.row_grads, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-6, err_msg=name)


def _split_networks_train_as_copies_do(rank: int, folder: Path) -> None:
    for name, (_, _, ways) in CASES.items():
        for compute in ways:
            _one_way(name, compute, rank)
    _either_loads_what_the_other_saved(rank)


def _one_way(name: str, compute: ComputeSettings, rank: int) -> None:
    copies, parts = program(name), program(name, compute)
    held = sum(local(weight).numel() for weight in parts.model.parameters())
    assert held < (0.7 if compute == FSDP2 else 0.9) * sum(
        weight.numel() for weight in copies.model.parameters()
    )

    equal(train(parts, name, rank, range(4)), train(copies, name, rank, range(4)), name)
    close(parts.weights(), copies.weights())
    close(parts.optimizer_state(), copies.optimizer_state())

    # What is judged and written differs between trainers in number and length.
    parts.begin_inference()
    for _ in range(1 + rank):
        asked = share(name, rank, 0)
        rows = table_rows(asked)
        np.testing.assert_allclose(
            parts.log_likelihoods(asked, rows), copies.log_likelihoods(asked, rows), rtol=1e-4
        )
        answers = zip(parts.generate(asked, rows, 4), copies.generate(asked, rows, 4), strict=True)
        assert all(ours.tolist() == theirs.tolist() for ours, theirs in answers)
    equal(train(parts, name, rank, range(4, 5)), train(copies, name, rank, range(4, 5)), name)


def _either_loads_what_the_other_saved(rank: int) -> None:
    begun = {compute.parallel: program("llama", compute) for compute in (PLAIN, FSDP2, TENSOR)}
    for trained in begun.values():
        train(trained, "llama", rank, range(3))
    for source in begun.values():
        weights, state = source.weights(), source.optimizer_state()
        expected = None
        for compute in (PLAIN, FSDP2, TENSOR):
            target = program("llama", compute)
            target.load(weights, state)
            for held, given in ((target.weights(), weights), (target.optimizer_state(), state)):
                assert all(held[key].tobytes() == given[key].tobytes() for key in given)
            found = train(target, "llama", rank, range(3, 5))
            equal(found, expected or found, compute.parallel)
            expected = expected or found


@pytest.mark.slow
def test_split_networks_train_as_copies_do(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    in_processes(_split_networks_train_as_copies_do, tmp_path)
