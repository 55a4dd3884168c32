"""What the measurements of language models on a GPU compare is the same, and a difference ends them."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import language_serve_cuda, language_tune_cuda
from benchmarks.language_tune_cuda import Batch

CPU = torch.device("cpu")


def test_padded_rows_have_the_tokens_and_targets_of_packed_ones():
    is_target_N = np.array([False, True, False, True, True])
    batch = Batch(0, np.array([5, 6, 7, 8, 9]), is_target_N, np.array([0, 2, 5]))

    found = {name: tensor.tolist() for name, tensor in batch.padded(CPU).items()}

    assert found == {
        "input_ids": [[5, 6, 0], [7, 8, 9]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
        "labels": [[-100, 6, -100], [-100, 8, 9]],
    }


def test_losses_that_differ_end_it(monkeypatch):
    step = language_tune_cuda.Padded.step
    monkeypatch.setattr(language_tune_cuda.Padded, "step", lambda self, batch: step(self, batch) * 1.01)

    with pytest.raises(SystemExit, match="losses of packed and padded rows differ by"):
        language_tune_cuda.largest_difference(CPU)


def test_an_answer_that_differs_ends_it(monkeypatch):
    monkeypatch.setattr(
        language_serve_cuda.Served, "answers", lambda self, prompts, count: [[] for _ in prompts]
    )

    with pytest.raises(SystemExit, match="the engine answers 0 of 8 prompts as generate does"):
        language_serve_cuda.equal_answers(CPU)
