"""How far the gradient of a sampled softmax is off that of the whole catalog, for a trained model.

    python -m benchmarks.sampled_gradient RUN [--negatives 2048] [--draws 12]

RUN is one of SASRec, BSARec or HSTU with the dense item matrix. Of one training batch, without dropout, the
gradient by the softmax over all items is taken, and those by sampled softmaxes with several draws of
negatives. Printed is the length of the difference over the length of the right gradient, on average over the
draws, of the item matrix and of all other weights. `counted` is the estimate of Bengio & Senécal (IEEE TNN
2008): a negative counts as often as it is drawn, over the expected number, and nothing is certain. `once` has
each that is drawn once, over the probability that it is drawn, and nothing is certain either.

Axes: N events, I items, S negatives, W weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.models.sequence.item_losses import CrossEntropy, ItemLoss, ItemVectors, SampledSoftmax
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.platform.console import log
from rayrec.samples.reading.reader import SampleReader


class Drawn(nn.Module):
    """The sampled softmaxes that this one is compared with: of the target and what is drawn alone."""

    def __init__(self, log_weight_I: Tensor, is_once: bool) -> None:
        """
        Args:
            log_weight_I: what a negative counts is divided by, as a logarithm.
            is_once: whether one that is drawn twice counts once.
        """
        super().__init__()
        self.log_weight_I, self.is_once = log_weight_I, is_once

    def forward(self, context_ND: Tensor, items: ItemVectors, batch: TensorBatch) -> Tensor:
        assert batch.targets_N is not None
        assert batch.negatives_S is not None
        target_N = (context_ND * items.targets(batch)).sum(1)
        negative_NS = context_ND @ items.negatives(batch).T - self.log_weight_I[batch.negatives_S]
        is_out_NS = batch.negatives_S[None, :] == batch.targets_N[:, None]
        if self.is_once:
            is_out_NS |= functional.pad(batch.negatives_S.diff() == 0, (1, 0))
        logits = torch.cat([target_N[:, None], negative_NS.masked_fill(is_out_NS, -torch.inf)], dim=1)
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
    rows = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
    log_q_I = assembly.task.catalog.negative_log_q_I
    product = SampledSoftmax.of_draws(log_q_I, num_negatives)
    sampled: dict[str, ItemLoss] = {
        "counted": Drawn(torch.tensor(log_q_I + math.log(num_negatives), dtype=torch.float32), False),
        "once": Drawn(product.log_inclusion_I, True),
        "sampled_softmax": product,
    }

    def gradient(loss: ItemLoss, step: int) -> tuple[Tensor, Tensor]:
        (features,) = assembly.features.training(step, rows)
        batch = TensorBatch.build(features, {}, seed=0, device=torch.device("cpu"), training=False)
        model.item_loss = loss
        model.zero_grad()
        model.loss(batch).backward()
        others = [p.grad for p in model.parameters() if p is not model.items_ID and p.grad is not None]
        assert model.items_ID.grad is not None
        return model.items_ID.grad.flatten().clone(), torch.cat([grad.flatten() for grad in others])

    right = gradient(CrossEntropy(), 0)
    found = {}
    for name, loss in sampled.items():
        drawn = [gradient(loss, step) for step in range(num_draws)]
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
