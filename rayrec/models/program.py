"""The dense stage behind one small interface, so that nothing above it knows the framework."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rayrec.models.compiled_parts import compile_parts, explained
from rayrec.models.compute import PLAIN, ComputeSettings
from rayrec.models.dense_optimizer import DenseOptimizerSettings
from rayrec.models.master_weights import MasterWeights
from rayrec.models.sequence_model import SequenceModel
from rayrec.models.sharding import ShardedModel, local, whole
from rayrec.models.tensor_batch import Features, TensorBatch
from rayrec.platform.devices import HOST
from rayrec.platform.shares import balanced_bounds

Rows = Mapping[str, np.ndarray | Tensor]
"""Table name to [M, D] float32 rows, in the order of the batch's distinct ids; tensors where they are on the
device already."""

SumOverTrainers = Callable[[Tensor], None]
"""Replaces a flat tensor by its sum over all trainers, in place."""


class DenseGradients(NamedTuple):
    """What one batch asks of the sparse stage, and how good the model was on it."""

    loss_sum: float
    """Summed over this trainer's targets, not divided by their number."""
    row_grads: dict[str, np.ndarray | Tensor]
    """Table name to [M, D] gradients of the loss divided by the global number of targets; tensors on the
    device of tables whose rows were tensors."""


class RankedItems(NamedTuple):
    """Best items of each row, best first; see `models.sequence_model.Ranking`."""

    items_BK: np.ndarray
    scores_BK: np.ndarray


class DivergedError(FloatingPointError):
    """The loss or a gradient of a step is not finite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])

    def with_note(self, note: str) -> DivergedError:
        """The same error with more to say."""
        return DivergedError(f"{self}. {note}", self.step)


class DenseProgram(Protocol):
    """A dense network with its optimizer, whatever framework it is written in."""

    table_of_catalogue: str | None
    """Sparse table whose rows of every item `rank` needs, if any."""

    def backward(self, features: Features, rows: Rows) -> DenseGradients:
        """Loss and gradients; dense gradients are kept for `update`.

        Raises:
            DivergedError: the loss or a gradient is not finite; names the step, and the parameter, or
                the table and an id. Nothing has changed then.
        """

    def update(self) -> None:
        """Sum the kept gradients over the trainers and take one optimizer step.

        Raises:
            DivergedError: the sum is not finite; names step and parameter. No weight has changed.
        """

    def rank(self, features: Features, rows: Rows, k: int, excluded_BE: np.ndarray | None) -> RankedItems:
        """The k best next items of each row, none of them in `excluded_BE` (padded with -1).

        A row without history gives nothing to go by and gets no items.
        """

    def begin_ranking(self) -> None:
        """Before `rank`, by all trainers at once: they need not rank equally often. Ends with `backward`."""

    def set_catalogue(self, rows_ID: np.ndarray) -> None:
        """Give the rows of every item to a program with a `table_of_catalogue`."""

    def weights(self) -> dict[str, np.ndarray]:
        """Every dense weight by name, whole, as copies.

        Of weights that are split among trainers, asked of all of them at once; so is the optimizer's state.
        """

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """Everything but the weights that the next `update` depends on, as copies."""

    def load(
        self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray] | None
    ) -> None:
        """Take over saved values; names and shapes have to match.

        Raises:
            ValueError: a weight is missing, unknown or of another shape.
        """


class TorchProgram:
    """A `SequenceModel` on one device; several trainers hold identical copies, or after `shard` a part each.

    Identical copies are what DistributedDataParallel keeps, too. Here their gradients are summed in one
    flat collective behind backward: the rows' gradients are on their way meanwhile, and the order of the sum
    does not depend on when gradients become ready.
    """

    def __init__(
        self,
        model: SequenceModel,
        settings: DenseOptimizerSettings,
        device: torch.device,
        seed: int,
        sum_over_trainers: SumOverTrainers | None = None,
        compute: ComputeSettings = PLAIN,
    ) -> None:
        # Weights that will be split go to the device part by part.
        self.model = model if compute.is_sharded else model.to(device)
        self.table_of_catalogue = model.table_of_catalogue
        self._settings = settings
        self._device = device
        self._seed = seed
        self._sum_over_trainers = sum_over_trainers
        self._compute = compute
        self._step = 0
        self._batch_step = 0
        """Step of the batch whose gradients the parameters hold."""
        self._sharded: ShardedModel | None = None
        if compute.compile:
            compile_parts(model)
        self._masters = MasterWeights(self.model) if compute.has_masters else None
        self._parameters, self._optimizer = self._parameters_and_optimizer()

    def shard(self) -> None:
        """Split the weights among the trainers; all do so at once, when their process group has formed.

        To be called once, before anything is trained or loaded, where `compute.parallel` is `fsdp2`.
        """
        assert self._compute.is_sharded, "settings say that every trainer holds all weights"
        assert self._sum_over_trainers is not None, "one trainer has nobody to share with"
        self._sharded = ShardedModel(self.model, self._device)
        self._parameters, self._optimizer = self._parameters_and_optimizer()

    def _parameters_and_optimizer(self) -> tuple[dict[str, Tensor], torch.optim.AdamW]:
        parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        if self._masters is not None:
            parameters = self._masters.by_name
        settings = self._settings
        optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=settings.fused,
            foreach=not settings.fused,
        )
        return parameters, optimizer

    def backward(self, features: Features, rows: Rows) -> DenseGradients:
        batch = TensorBatch.build(features, rows, self._seed, self._device, training=True)
        if self._sharded is not None:
            self._sharded.scatter()
        if self._masters is not None:
            self._masters.narrow()
        self.model.train()
        self._optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self._device)
        with explained() if self._compute.compile else contextlib.nullcontext():
            for piece, counts in self._pieces(batch):
                with self._compute.autocast(self._device):
                    loss = self.model.loss(piece).float() * counts
                (loss / features.num_targets).backward()
                loss_sum += loss.detach()
        for parameter in self._parameters.values():
            parameter.grad = _or_zeros(parameter)
        row_grads = {name: _or_zeros(rows_MD) for name, rows_MD in batch.rows.items()}
        self._batch_step = features.step
        self._check_finite(loss_sum.detach(), row_grads, features)
        return DenseGradients(
            loss_sum.item(),
            {
                name: grads_MD if isinstance(rows[name], Tensor) else grads_MD.cpu().numpy()
                for name, grads_MD in row_grads.items()
            },
        )

    def _pieces(self, batch: TensorBatch) -> Iterator[tuple[TensorBatch, float]]:
        """Micro-batches of about as many tokens each, and how often the loss of each counts.

        Those without tokens are left out; but trainers that gather weights from each other go through equally
        many, so they get one that counts zero times.
        """
        num_pieces, layout = self._compute.micro_batches, batch.layout
        bounds = balanced_bounds(layout.lengths_B, num_pieces)
        for start, stop in pairwise(bounds):
            if layout.offsets_B1[start] < layout.offsets_B1[stop]:
                yield batch if num_pieces == 1 else batch.some_rows(slice(start, stop)), 1.0
            elif self._sharded is not None:
                yield batch.stand_in(), 0.0

    def update(self) -> None:
        gradients = self._dense_gradients()
        if self._sharded is not None:
            # They are summed already; only their norm is everyone's business.
            self._limit(gradients, self._norm_over_trainers(gradients))
        else:
            if self._sum_over_trainers is not None:
                _sum_in_place(gradients, self._sum_over_trainers)
                if not math.isfinite(get_total_norm(gradients).item()):
                    raise self._diverged(self._what_is_not_finite())
            if self._settings.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * self._settings.schedule.factor(self._step)
        self._optimizer.step()
        if self._masters is not None:
            self._masters.hand_down()
        self._step += 1

    def _norm_over_trainers(self, shards: list[Tensor]) -> float:
        """Of gradients of which every trainer has a part."""
        assert self._sum_over_trainers is not None
        # In float64, where the square of a large float32 is finite.
        square = get_total_norm(shards).double().square().reshape(1)
        self._sum_over_trainers(square)
        return math.sqrt(square.item()) if math.isfinite(square.item()) else math.inf

    def _limit(self, shards: list[Tensor], norm: float) -> None:
        """As `clip_grad_norm_`, for a norm that is known."""
        if not math.isfinite(norm):
            raise self._diverged(self._what_is_not_finite())
        if self._settings.max_grad_norm is not None:
            factor = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
            torch._foreach_mul_(shards, factor)

    def _check_finite(self, loss_sum: Tensor, row_grads: Mapping[str, Tensor], features: Features) -> None:
        """One number for the loss and all gradients: the device is waited for once.

        Gradients are judged by their norm. Where it is a finite float32, no number exceeds 2e19, so
        that no sum over trainers can become infinite later, when parts of the step are committed.
        """
        norm = get_total_norm([*self._dense_gradients(), *row_grads.values(), loss_sum])
        if math.isfinite(norm.item()):
            return
        if not math.isfinite(loss_sum.item()):
            raise self._diverged(f"the loss is {loss_sum.item()}")
        for name, grads_MD in row_grads.items():
            norm = torch.linalg.vector_norm(grads_MD)
            if not math.isfinite(norm.item()):
                worst = int(torch.linalg.vector_norm(grads_MD, dim=1).nan_to_num(torch.inf).argmax())
                raise self._diverged(
                    f"the gradient of table {name!r} has a norm of {norm.item()}, the largest part of it "
                    f"from id {features.lookups[name].ids_M[worst]}"
                )
        raise self._diverged(self._what_is_not_finite())

    def _what_is_not_finite(self) -> str:
        norms = {
            name: torch.linalg.vector_norm(gradient).item()
            for name, gradient in zip(self._parameters, self._dense_gradients(), strict=True)
        }
        for name, norm in norms.items():
            if not math.isfinite(norm):
                return f"the gradient of {name!r} has a norm of {norm}"
        largest = max(norms, key=norms.__getitem__)
        return f"the norm of all gradients overflows; the largest is {norms[largest]:.3g}, of {largest!r}"

    def _diverged(self, what: str) -> DivergedError:
        return DivergedError(
            f"step {self._batch_step}: {what}; the training diverged: lower the learning rates "
            "(training.optimizer, sparse.optimizer) or set training.optimizer.max_grad_norm",
            self._batch_step,
        )

    def _dense_gradients(self) -> list[Tensor]:
        """What this trainer holds of each."""
        return [local(_or_zeros(parameter)) for parameter in self._parameters.values()]

    @torch.inference_mode()
    def rank(self, features: Features, rows: Rows, k: int, excluded_BE: np.ndarray | None) -> RankedItems:
        empty_B = np.diff(features.offsets_B1) == 0
        if empty_B.all():
            shape = (len(empty_B), k)
            return RankedItems(np.full(shape, -1), np.full(shape, -np.inf, dtype=np.float32))
        batch = TensorBatch.build(features, rows, self._seed, self._device, training=False)
        self.model.eval()
        if self._masters is not None:
            self._masters.widen()
        excluded = None if excluded_BE is None else torch.tensor(excluded_BE, device=self._device)
        ranking = self.model.rank(batch, k, excluded)
        items_BK, scores_BK = ranking.items_BK.cpu().numpy(), ranking.scores_BK.cpu().numpy()
        items_BK[empty_B], scores_BK[empty_B] = -1, -np.inf
        return RankedItems(items_BK, scores_BK)

    def begin_ranking(self) -> None:
        if self._sharded is not None:
            self._sharded.gather()

    def set_catalogue(self, rows_ID: np.ndarray) -> None:
        self.model.set_catalogue(torch.tensor(rows_ID, device=self._device))

    def weights(self) -> dict[str, np.ndarray]:
        return {name: _copy(parameter) for name, parameter in self._parameters.items()}

    def optimizer_state(self) -> dict[str, np.ndarray]:
        state = {"step": np.array(self._step, dtype=np.int64)}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                state[f"{name}/{key}"] = _copy(value)
        return state

    def load(
        self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray] | None
    ) -> None:
        if unmatched := weights.keys() ^ self._parameters.keys():
            raise ValueError(
                f"dense weights {sorted(unmatched)} are in only one of the snapshot and the model"
            )
        for name, parameter in self._parameters.items():
            if weights[name].shape != tuple(parameter.shape):
                raise ValueError(
                    f"dense weight {name!r} has shape {weights[name].shape} in the snapshot, "
                    f"but {tuple(parameter.shape)} in the model"
                )
            with torch.no_grad():
                parameter.copy_(self._as_held(weights[name]))
        if self._masters is not None:
            self._masters.widen()
        if optimizer_state is None:
            return
        self._step = int(optimizer_state["step"])
        if self._step == 0:
            return
        for name, parameter in self._parameters.items():
            self._optimizer.state[parameter] = {
                "step": torch.tensor(optimizer_state[f"{name}/step"]).to(
                    self._device if self._settings.fused else HOST.torch
                ),
                **{
                    key: self._as_held(optimizer_state[f"{name}/{key}"]).to(self._device)
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }

    def _as_held(self, saved: np.ndarray) -> Tensor:
        """A whole weight, or its like, as this trainer holds it."""
        return torch.tensor(saved) if self._sharded is None else self._sharded.shard_of(saved)


def _or_zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _copy(tensor: Tensor) -> np.ndarray:
    return whole(tensor.detach()).cpu().numpy().copy()


def _sum_in_place(tensors: list[Tensor], sum_over_trainers: SumOverTrainers) -> None:
    """One collective for all tensors: many small ones would pay its latency each."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sum_over_trainers(flat)
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()
