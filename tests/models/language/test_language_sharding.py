"""Language models whose weights are split (FSDP2) against identical copies, in two processes over gloo."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.language.text_program import TextProgram, TextProgramSpec
from rayrec.models.program.program import ProgramPlacement
from tests.models.language.texts import LLAMA, PROMPTS, ROWS, SHAPE, VOCABULARY, Text, config, optimizer, text
from tests.models.test_sharding import close, in_processes

SPLIT = ComputeSettings(parallel="fsdp2")
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}  # inputs and outputs share a matrix
CASES = {
    "llama": (LLAMA, {}),
    "gpt2": (GPT2, {}),
    "padded": ({"model_type": "bloom", **SHAPE}, {"rows": "padded"}),
    "adapters": (LLAMA, {"lora": {"rank": 2}}),
}


def program(name: str, compute: ComputeSettings = PLAIN) -> TextProgram:
    settings, more = CASES[name]
    spec = TextProgramSpec(config(settings, **more), VOCABULARY, optimizer(weight_decay=0.01))
    placement = ProgramPlacement(
        torch.device("cpu"), 3, sum_over_trainers=torch.distributed.all_reduce, compute=compute
    )
    made = spec.build(placement)
    made.join()
    return made


def share(rank: int, step: int) -> Text:
    """One row for the first trainer, and the others for the second."""
    mine = slice(0, 1) if rank == 0 else slice(1, None)
    whole, part = text(step=step), text(ROWS[mine], PROMPTS[mine], step)
    return Text(part.tokens_N, part.is_target_N, part.offsets_B1, whole.num_targets, step)


def train(trained: TextProgram, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(trained.backward(share(rank, step), {}).loss_sum)
        trained.update()
    return losses


def _split_networks_train_as_copies_do(rank: int, folder: Path) -> None:
    for name in CASES:
        copies, shards = program(name), program(name, SPLIT)
        held = sum(weight.to_local().numel() for weight in shards.model.parameters())
        assert held < 0.7 * sum(weight.numel() for weight in copies.model.parameters())

        np.testing.assert_allclose(
            train(shards, rank, range(4)), train(copies, rank, range(4)), rtol=1e-6, err_msg=name
        )
        close(shards.weights(), copies.weights())
        close(shards.optimizer_state(), copies.optimizer_state())

        # A snapshot of either goes on as the other.
        for source, target in ((shards, program(name)), (copies, program(name, SPLIT))):
            target.load(source.weights(), source.optimizer_state())
            np.testing.assert_allclose(
                train(target, rank, range(4, 6)), _continued(name, copies, rank), rtol=1e-6, err_msg=name
            )

        # What is judged and written differs between trainers in number and length.
        shards.begin_inference()
        for _ in range(1 + rank):
            asked = share(rank, 0)
            np.testing.assert_allclose(
                shards.log_likelihoods(asked, {}), copies.log_likelihoods(asked, {}), rtol=1e-4
            )
            answers = zip(shards.generate(asked, {}, 4), copies.generate(asked, {}, 4), strict=True)
            assert all(ours.tolist() == theirs.tolist() for ours, theirs in answers)


def _continued(name: str, copies: TextProgram, rank: int) -> list[float]:
    going_on = program(name)
    going_on.load(copies.weights(), copies.optimizer_state())
    return train(going_on, rank, range(4, 6))


@pytest.mark.slow
def test_split_networks_train_as_copies_do(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    in_processes(_split_networks_train_as_copies_do, tmp_path)
