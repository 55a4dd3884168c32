"""A model's `recommend` as a function of tensors alone: weights first, then the inputs of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from rayrec.models.base.made_of_weights import made_of_weights
from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.models.compiled_ranking.inputs import Signature
from rayrec.models.sequence.sequence_model import SequenceModel, TopItems
from rayrec.models.sequence.tensor_batch import TensorBatch


def weights_of(model: SequenceModel) -> dict[str, Tensor]:
    """All that differs between versions of a model, by name, in an order that does not: parameters, buffers
    and the rows of the catalog, as they are in memory.

    Raises:
        ValueError: the model has a catalog that was not set.
    """
    weights = {name: each.detach() for name, each in model.named_parameters()}
    weights |= {name: each.detach() for name, each in model.named_buffers()}
    if model.table_of_catalog is not None:
        if model.catalog_ID is None:
            raise ValueError(f"{type(model).__name__} ranks without the rows of its catalog")
        weights["catalog"] = model.catalog_ID
    return weights


class MadeVectors:
    """Vectors that a model makes once of its weights, and programs take beside them: a program that made them
    would do so for every batch."""

    def __init__(self, model: SequenceModel) -> None:
        self._keepers = made_of_weights(model)

    @property
    def are_there(self) -> bool:
        """Whether the model has made them, or makes none."""
        return not self._keepers or any(keeper.kept is not None for keeper in self._keepers)

    @property
    def tensors(self) -> list[Tensor]:
        """What the model keeps, in an order that is the same for all versions, once it has ranked a batch."""
        return [each.contiguous() for keeper in self._keepers for each in _tensors(keeper.kept)]

    def given(self, tensors: Sequence[Tensor]) -> ExitStack:
        """Within it, the model has these as what it keeps; for one thread."""
        left, stack = list(tensors), ExitStack()
        for keeper in self._keepers:
            count = len(_tensors(keeper.kept))
            mine, left = left[:count], left[count:]
            if count:
                stack.enter_context(keeper.given(mine if isinstance(keeper.kept, list) else mine[0]))
        return stack


def _tensors(kept: Tensor | list[Tensor] | None) -> list[Tensor]:
    if kept is None:
        return []
    return kept if isinstance(kept, list) else [kept]


class PaddedRanking(nn.Module):
    """Computes nothing of its own: whatever the model does with a padded batch."""

    def __init__(self, model: SequenceModel, signature: Signature, bucket: Bucket) -> None:
        """
        Args:
            model: in evaluation, and has ranked a batch; its weights are not read.
        """
        super().__init__()
        # In a list, so that its weights are none of this module: they would be kept with the program.
        self._asked = [_Asked(model)]
        self._names = list(weights_of(model))
        self._made = MadeVectors(model)
        self._signature = signature
        self._bucket = bucket

    def forward(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """([B, width] items, [B, width] scores).

        Args:
            weights: `weights_of` the model and after them the tensors of its `MadeVectors`.
        """
        num_weights = len(self._names)
        by_name = dict(zip(self._names, weights[:num_weights], strict=True))
        catalog_ID = by_name.pop("catalog", None)
        batch, excluded_BE = self._signature.batch(self._bucket, inputs)
        (asked,) = self._asked
        before = asked.model.catalog_ID
        if catalog_ID is not None:
            asked.model.set_catalog(catalog_ID)
        try:
            with self._made.given(weights[num_weights:]):
                ranking: TopItems = torch.func.functional_call(
                    asked,
                    {f"model.{name}": each for name, each in by_name.items()},
                    (batch, self._bucket.width, excluded_BE),
                )
        finally:
            asked.model.catalog_ID = before
        return ranking.items_BK, ranking.scores_BK


class _Asked(nn.Module):
    """`recommend` under the name by which modules are called with other weights."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TensorBatch, width: int, excluded_BE: Tensor) -> TopItems:
        return self.model.recommend(batch, width, excluded_BE, [width] * batch.layout.num_rows)


def first_difference(
    items_BK: Tensor, scores_BK: Tensor, other_items_BK: Tensor, other_scores_BK: Tensor, tolerance: float
) -> str | None:
    """What two rankings differ in beyond rounding; None if nothing.

    Items may have changed places, or one fallen off the end for another, where their scores are within the
    rounding of each other.

    Args:
        tolerance: of scores, relative to the largest score there is.
    """
    if items_BK.shape != other_items_BK.shape:
        return f"shapes {tuple(items_BK.shape)} and {tuple(other_items_BK.shape)}"
    there = items_BK >= 0
    if not torch.equal(there, other_items_BK >= 0):
        return "the number of items found"
    if not there.any():
        return None
    allowed = tolerance * max(1.0, float(scores_BK[there].abs().max()))
    apart = (scores_BK - other_scores_BK)[there].abs()
    if not bool((apart <= allowed).all()):
        return f"scores by {float(apart.max())}"
    for row, place in (there & (items_BK != other_items_BK)).nonzero().tolist():
        score = float(scores_BK[row, place])
        elsewhere = (other_items_BK[row] == items_BK[row, place]).nonzero()
        # Where it has left the list, the end of the list is what it must tie with.
        other = float(
            other_scores_BK[row, int(elsewhere[0])]
            if len(elsewhere)
            else other_scores_BK[row][there[row]].min()
        )
        if abs(score - other) > 2 * allowed:
            return f"item {int(items_BK[row, place])} of row {row}, at {score} and {other}"
    return None
