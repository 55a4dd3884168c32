"""How far the gradient of a sampled softmax is off that of the whole catalog, for a trained model.

    python -m benchmarks.sampled_gradient RUN [--negatives 2048] [--draws 12]

RUN is one of SASRec, BSARec or HSTU with the dense item matrix. Of one training batch, without dropout, the
gradient by the softmax over all items is taken, and those by sampled softmaxes with several draws of
negatives. Printed is the length of the difference over the length of the right gradient, on average over the
draws, of the item matrix and of all other weights. `counted` is the estimate of Bengio & Senécal (IEEE TNN
2008): a negative counts as often as it is drawn, over the expected number, and nothing is certain. `once` has
each that is drawn once, over the probability that it is drawn, and nothing is certain either.

Axes: N events, D width, I items, S negatives.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.sequence.item_losses import CrossEntropy, ItemLoss, ItemVectors, SampledSoftmax
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.platform.console import log
from rayrec.samples.base.batches import FeatureBatch
from rayrec.samples.reading.reader import SampleReader


class Drawn(nn.Module):
    """The sampled softmaxes that this one is compared with: of the target and what is drawn alone."""

    def __init__(self, log_weight_I: Tensor) -> None:
        """`log_weight_I`: what each negative counts."""
        super().__init__()
        self.log_weight_I = log_weight_I

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        assert batch.negatives_S is not None
        target_N = (context_ND * items.targets(batch)).sum(1)
        negative_NS = context_ND @ items.negatives(batch).T + self.log_weight_I[batch.negatives_S]
        is_target_NS = batch.negatives_S[None, :] == batch.targets_N[:, None]
        logits = torch.cat([target_N[:, None], negative_NS.masked_fill(is_target_NS, -torch.inf)], dim=1)
        return (logits.logsumexp(1) - target_N).sum()


def errors(run: Path, num_negatives: int, num_draws: int) -> dict[str, tuple[float, float]]:
    """Of each estimate: the error of the item matrix, and that of all other weights."""
    recommender = Recommender.load(run, device="cpu")
    model = recommender.network.eval()
    assert isinstance(model, DenseNextItemModel), "a run with the dense item matrix"
    settings = RunFolder.open(run).config.model_dump(mode="json")
    settings["model"] |= {"loss": "sampled_softmax", "num_negatives": num_negatives}
    settings["data"] |= {"redraw_ties": False}
    assembly = assemble(RunConfig.parse(settings))
    plan = assembly.plan.batch(0)
    assert plan is not None, "there are training rows"
    rows = SampleReader(assembly.plan.spec).read_batch(plan)
    assert isinstance(assembly.task, NextItemTask), "a run with an item matrix"
    log_q_I = assembly.task.catalog.negative_log_q_I
    assert log_q_I is not None, "the loss samples"
    product = SampledSoftmax.of_draws(log_q_I, num_negatives)
    once = Drawn(-product.log_inclusion_I)

    def counted(step: int) -> tuple[ItemLoss, Tensor]:
        draws = np.random.default_rng(step).choice(len(log_q_I), num_negatives, p=np.exp(log_q_I))
        drawn_S, counts_S = np.unique(draws, return_counts=True)
        weight_I = np.zeros(len(log_q_I))
        weight_I[drawn_S] = np.log(counts_S) - np.log(num_negatives) - log_q_I[drawn_S]
        return Drawn(torch.tensor(weight_I, dtype=torch.float32)), torch.tensor(drawn_S)

    estimates: dict[str, Callable[[int], tuple[ItemLoss, Tensor | None]]] = {
        "counted": counted,
        "once": lambda step: (once, None),
        "sampled_softmax": lambda step: (product, None),
    }

    def gradient(loss: ItemLoss, step: int, negatives_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
        (features,) = assembly.features.training(step, rows)
        assert isinstance(features, FeatureBatch), "of histories"
        batch = TensorBatch.build(features, {}, seed=0, device=torch.device("cpu"), training=False)
        if negatives_S is not None:
            batch = replace(batch, negatives_S=negatives_S)
        model.item_loss = loss
        model.zero_grad()
        model.loss(batch).backward()
        others = [p.grad for p in model.parameters() if p is not model.items_ID and p.grad is not None]
        assert model.items_ID.grad is not None
        return model.items_ID.grad.flatten().clone(), torch.cat([grad.flatten() for grad in others])

    right = gradient(CrossEntropy(), 0)
    found = {}
    for name, estimate in estimates.items():
        drawn = []
        for step in range(num_draws):
            loss, negatives_S = estimate(step)
            drawn.append(gradient(loss, step, negatives_S))
        items, others = (
            sum(float((each[part] - right[part]).norm()) for each in drawn)
            / num_draws
            / float(right[part].norm())
            for part in (0, 1)
        )
        found[name] = (items, others)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sampled_gradient")
    parser.add_argument("run", type=Path)
    parser.add_argument("--negatives", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--draws", type=int, default=12)
    options = parser.parse_args(arguments)
    for num_negatives in options.negatives:
        for name, (items, others) in errors(options.run, num_negatives, options.draws).items():
            log.print(f"{num_negatives:>6,} negatives, {name}: items {items:.3f}, other weights {others:.3f}")


if __name__ == "__main__":
    main()
