"""What a ranking model has to offer to training, evaluation and serving.

A new one is a subclass with `logits`; everything else is here. The smallest:

    class LogisticRegression(CtrModel):
        def __init__(self, schema: ImpressionSchema, label_loss: LabelLoss) -> None:
            super().__init__(row_dim=1, label_loss=label_loss)
            self.bias_T = nn.Parameter(torch.zeros(len(schema.labels)))

        def logits(self, batch: ImpressionTensors) -> Tensor:
            return batch.embed_ids().sum(1) + self.bias_T  # [B, C, 1] to [B, T]

Three rules hold of all of them, since a batch is cut in any way (micro-batches, trainers, one request in
serving) and runs repeat to the bit:

- An impression's logits depend on that impression alone: no statistics of the batch, so no BatchNorm.
- Random is only `KeyedDropout`, keyed by `batch.keys_B`; every dropout of a network has an index of its own.
- What takes rows by an index is `functional.embedding`, not `x[index]`, whose gradient an accelerator adds up
  in any order.

Axes as in `rayrec.models.ctr.tensors`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from rayrec.models.ctr.losses import LabelLoss
from rayrec.models.ctr.tensors import ImpressionTensors


class CtrModel(nn.Module, ABC):
    """A network that says how likely each label of an impression is 1."""

    def __init__(self, row_dim: int, label_loss: LabelLoss) -> None:
        """
        Args:
            row_dim: width D of the rows that the network reads of the embedding table.
        """
        super().__init__()
        self.row_dim = row_dim
        self.label_loss = label_loss

    @abstractmethod
    def logits(self, batch: ImpressionTensors) -> Tensor:
        """[B, T] log-odds of each label, in the order of `ImpressionSchema.labels`."""

    def loss(self, batch: ImpressionTensors) -> Tensor:
        """Scalar: the loss summed over the batch's known labels, not divided by anything."""
        return self.label_loss(self.logits(batch), batch.labels_BT)

    def predict(self, batch: ImpressionTensors) -> Tensor:
        """[B, T] probabilities; labels are not read.

        Of a label with a positive weight, its odds are those of data in which positives are that many times
        as frequent.
        """
        return self.logits(batch).sigmoid()
