"""Language models whose weights or layers are split against identical copies, in two processes over gloo."""

from pathlib import Path

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
    Text,
    config,
    optimizer,
    text,
)
from tests.models.test_sharding import close
from tests.models.two_trainers import begin_sum, in_processes

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
}


def program(name: str, compute: ComputeSettings = PLAIN) -> TextProgram:
    settings, more, _ = CASES[name]
    spec = TextProgramSpec(
        config(settings, **more),
        VOCABULARY,
        optimizer(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5),
    )
    placement = ProgramPlacement(torch.device("cpu"), 3, sum_over_trainers=begin_sum, compute=compute)
    made = spec.build(placement)
    made.join()
    return made


def share(rank: int, step: int) -> Text:
    """One row for the first trainer, and the others for the second."""
    mine = slice(0, 1) if rank == 0 else slice(1, None)
    whole, part = text(step=step), text(ROWS[mine], PROMPTS[mine], step)
    return Text(part.tokens_N, part.is_target_N, part.offsets_B1, whole.num_targets, step)


def train(trained: TextProgram, rank: int, steps: range) -> np.ndarray:
    """Losses of all trainers together, step by step."""
    losses = []
    for step in steps:
        losses.append(trained.backward(share(rank, step), {}).loss_sum)
        trained.update()
    summed = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(summed)
    return summed.numpy()


def equal(ours: np.ndarray, theirs: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)


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

    equal(train(parts, rank, range(4)), train(copies, rank, range(4)), name)
    close(parts.weights(), copies.weights())
    close(parts.optimizer_state(), copies.optimizer_state())

    # What is judged and written differs between trainers in number and length.
    parts.begin_inference()
    for _ in range(1 + rank):
        asked = share(rank, 0)
        np.testing.assert_allclose(
            parts.log_likelihoods(asked, {}), copies.log_likelihoods(asked, {}), rtol=1e-4
        )
        answers = zip(parts.generate(asked, {}, 4), copies.generate(asked, {}, 4), strict=True)
        assert all(ours.tolist() == theirs.tolist() for ours, theirs in answers)
    equal(train(parts, rank, range(4, 5)), train(copies, rank, range(4, 5)), name)


def _either_loads_what_the_other_saved(rank: int) -> None:
    begun = {compute.parallel: program("llama", compute) for compute in (PLAIN, FSDP2, TENSOR)}
    for trained in begun.values():
        train(trained, rank, range(3))
    for source in begun.values():
        weights, state = source.weights(), source.optimizer_state()
        expected = None
        for compute in (PLAIN, FSDP2, TENSOR):
            target = program("llama", compute)
            target.load(weights, state)
            for held, given in ((target.weights(), weights), (target.optimizer_state(), state)):
                assert all(held[key].tobytes() == given[key].tobytes() for key in given)
            found = train(target, rank, range(3, 5))
            expected = found if expected is None else expected
            equal(found, expected, compute.parallel)


@pytest.mark.slow
def test_split_networks_train_as_copies_do(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    in_processes(_split_networks_train_as_copies_do, tmp_path)
