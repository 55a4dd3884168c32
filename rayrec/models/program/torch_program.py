"""PyTorch behind `DenseProgram`: forward, backward, sums over trainers and AdamW of modules with a loss."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.base.made_of_weights import made_of_weights
from rayrec.models.program.bucketed_sum import BucketedSum, gradient_or_zeros
from rayrec.models.program.compiled_parts import compile_parts, explained
from rayrec.models.program.flops import ModelFlops
from rayrec.models.program.frozen_base import FrozenBase
from rayrec.models.program.master_weights import MasterWeights
from rayrec.models.program.program import DenseGradients, DivergedError, Rows, SumOverTrainers
from rayrec.models.program.sharding import (
    ShardedModel,
    SplitModel,
    held_as,
    is_distributed,
    is_split,
    local,
    whole,
)
from rayrec.platform.devices import HOST
from rayrec.platform.shares import balanced_bounds

AFTER_LOAD = "after_load"
"""Method of a module that holds weights in another form, too; called with its name when they are loaded."""


def check_shapes(shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]) -> None:
    """Check that saved weights are those of a network.

    Args:
        shapes: of the weights in the snapshot, by name.
        parameters: of the network.

    Raises:
        ValueError: one is missing, or has another shape.
    """
    if unmatched := shapes.keys() ^ parameters.keys():
        raise ValueError(f"dense weights {sorted(unmatched)} are in only one of the snapshot and the model")
    for name, parameter in parameters.items():
        if shapes[name] != tuple(parameter.shape):
            raise ValueError(
                f"dense weight {name!r} has shape {shapes[name]} in the snapshot, but "
                f"{tuple(parameter.shape)} in the model"
            )


class TrainableModel(Protocol):
    """What `TorchProgram` asks of a module."""

    def loss(self, batch: Any) -> Tensor:
        """Scalar: the loss summed over the batch's targets."""


class TrainingBatch(Protocol):
    """What `TorchProgram` asks of a batch of tensors."""

    @property
    def rows(self) -> dict[str, Tensor]:
        """Table name to [M, D] leaf tensors."""

    @property
    def lengths_B(self) -> np.ndarray:
        """How much of the work each row is; one of length 0 has nothing to learn from."""

    def some_rows(self, rows: slice) -> Self:
        """Neighboring rows alone, with the same leaves."""

    def stand_in(self) -> Self:
        """One row of no meaning, with the same leaves where they have a row."""


class TorchProgram(ABC):
    """A module on one device; several trainers hold identical copies, or after `join` a part each.

    Identical copies are what DistributedDataParallel keeps, too. Their gradients are summed in buckets while
    backward still computes others (`BucketedSum`), and rows' gradients are on their way meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: DenseOptimizerSettings,
        device: torch.device,
        seed: int,
        sum_over_trainers: SumOverTrainers | None = None,
        compute: ComputeSettings = PLAIN,
        flops: ModelFlops | None = None,
    ) -> None:
        """
        Args:
            flops: counts them for `flops`; made before the model is given to a program, which may compile or
                split it.
        """
        self._frozen = FrozenBase(model)
        # Weights that will be split go to the device part by part.
        self._module = model if compute.is_split else model.to(device)
        self._settings = settings
        self._device = device
        self._seed = seed
        self._sum_over_trainers = sum_over_trainers
        self._compute = compute
        self._step = 0
        self._batch_step = 0
        """Step of the batch whose gradients the parameters hold."""
        self._flops = flops
        self._split_model: SplitModel | None = None
        if compute.compile:
            compile_parts(model)
        self._masters = MasterWeights(model) if compute.has_masters else None
        self._parameters, self._optimizer = self._parameters_and_optimizer()
        self._bucketed_sum = self._sum_in_buckets()

    def _sum_in_buckets(self) -> BucketedSum | None:
        if self._sum_over_trainers is None or self._compute.is_split:
            return None
        reached = dict(self._module.named_parameters())
        pairs = [(reached[name], holder) for name, holder in self._trained_parameters.items()]
        compute = self._compute
        return BucketedSum(pairs, self._sum_over_trainers, compute.reduce_bucket, compute.sum_dtype)

    @abstractmethod
    def _batch(self, features: Any, rows: Rows, training: bool) -> Any:
        """Features and rows as a `TrainingBatch` on the device."""

    def flops(self, features: Any, dims: Mapping[str, int]) -> float:
        return 0.0 if self._flops is None else self._flops.of(features, dims)

    def join(self) -> None:
        """To be called once, before anything is trained or loaded, by all trainers at once."""
        if not self._compute.is_split:
            return
        assert self._sum_over_trainers is not None, "one trainer has nobody to share with"
        self._split_model = self._split()
        self._parameters, self._optimizer = self._parameters_and_optimizer()

    def _split(self) -> SplitModel:
        """Split the module among the trainers, as the settings say."""
        if self._compute.parallel == "tensor":
            raise ValueError("training.parallel: 'tensor' splits language models alone; take 'fsdp2'")
        return ShardedModel(self._module, self._device, self._compute.sum_dtype)

    def _parameters_and_optimizer(self) -> tuple[dict[str, Tensor], torch.optim.AdamW]:
        parameters: dict[str, Tensor] = dict(self._module.named_parameters())
        if self._masters is not None:
            parameters = self._masters.by_name
        # A frozen weight has no gradient, and weight decay would shrink it all the same.
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._trained_parameters = trained
        settings = self._settings
        optimizer = torch.optim.AdamW(
            _groups(self._module, trained, settings),
            lr=settings.learning_rate,
            fused=settings.fused,
            foreach=not settings.fused,
        )
        return parameters, optimizer

    def backward(self, features: Any, rows: Rows) -> DenseGradients:
        if self._bucketed_sum is not None:
            self._bucketed_sum.abandon()  # of a step that failed behind its backward
        batch: TrainingBatch = self._batch(features, rows, training=True)
        if self._split_model is not None:
            self._split_model.scatter()
        if self._masters is not None:
            self._masters.narrow()
        self._begin_training()
        self._optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self._device)
        with explained() if self._compute.compile else contextlib.nullcontext():
            pieces = list(self._pieces(batch))
            for place, (piece, counts) in enumerate(pieces):
                with self._compute.autocast(self._device):
                    loss = self._trained.loss(piece).float() * counts
                if self._bucketed_sum is not None and place == len(pieces) - 1:
                    self._bucketed_sum.begin_last_backward()
                # A batch of a folder that grows may have no target at all.
                (loss / max(features.num_targets, 1)).backward()
                loss_sum += loss.detach()
        for parameter in self._trained_parameters.values():
            parameter.grad = gradient_or_zeros(parameter)
        row_grads = {name: gradient_or_zeros(rows_MD) for name, rows_MD in batch.rows.items()}
        self._batch_step = features.step
        self._check_finite(loss_sum.detach(), row_grads, features)
        return DenseGradients(
            loss_sum.item(),
            {
                name: grads_MD if isinstance(rows[name], Tensor) else grads_MD.cpu().numpy()
                for name, grads_MD in row_grads.items()
            },
        )

    def _begin_training(self) -> None:
        """Before each time that the module is asked for its loss."""
        self._module.train()

    @property
    def _trained(self) -> TrainableModel:
        """What says the loss of a batch."""
        return cast(TrainableModel, self._module)

    def _pieces(self, batch: TrainingBatch) -> Iterator[tuple[TrainingBatch, float]]:
        """Micro-batches of about as many tokens each, and how often the loss of each counts.

        Those without tokens are left out; but trainers that gather weights from each other go through equally
        many, so they get one that counts zero times.
        """
        num_pieces, lengths_B = self._compute.micro_batches, batch.lengths_B
        bounds = balanced_bounds(lengths_B, num_pieces)
        for start, stop in pairwise(bounds):
            if lengths_B[start:stop].any():
                yield batch if num_pieces == 1 else batch.some_rows(slice(start, stop)), 1.0
            elif self._split_model is not None:
                yield batch.stand_in(), 0.0

    def update(self) -> None:
        if self._split_model is not None:
            # They are summed already; only their norm is everyone's business.
            self._limit(self._dense_gradients(), self._norm_over_trainers())
        else:
            if self._bucketed_sum is not None:
                self._bucketed_sum.finish()
                if not math.isfinite(get_total_norm(self._dense_gradients()).item()):
                    raise self._diverged(self._what_is_not_finite())
            if self._settings.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(
                    self._trained_parameters.values(), self._settings.max_grad_norm
                )
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * self._settings.schedule.factor(self._step)
        self._optimizer.step()
        if self._masters is not None:
            self._masters.hand_down()
        self._forget_what_weights_made()
        self._step += 1

    def _norm_over_trainers(self) -> float:
        """Of gradients of which every trainer has a part; what is not split, every trainer has whole."""
        assert self._sum_over_trainers is not None
        trained = self._trained_parameters.values()
        parts = [local(gradient_or_zeros(parameter)) for parameter in trained if is_split(parameter)]
        rest = [local(gradient_or_zeros(parameter)) for parameter in trained if not is_split(parameter)]
        # In float64, where the square of a large float32 is finite.
        square = get_total_norm(parts).double().square().reshape(1)
        self._sum_over_trainers(square)()
        if rest:
            square += get_total_norm(rest).double().square()
        return math.sqrt(square.item()) if math.isfinite(square.item()) else math.inf

    def _limit(self, shards: list[Tensor], norm: float) -> None:
        """As `clip_grad_norm_`, for a norm that is known."""
        if not math.isfinite(norm):
            raise self._diverged(self._what_is_not_finite())
        if self._settings.max_grad_norm is not None:
            factor = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
            torch._foreach_mul_(shards, factor)

    def _check_finite(self, loss_sum: Tensor, row_grads: Mapping[str, Tensor], features: Any) -> None:
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
            for name, gradient in zip(self._trained_parameters, self._dense_gradients(), strict=True)
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
        return [local(gradient_or_zeros(parameter)) for parameter in self._trained_parameters.values()]

    def _begin_inference(self) -> None:
        """Before each time that the module is asked for anything but its loss."""
        self._module.eval()
        if self._masters is not None:
            self._masters.widen()

    def begin_inference(self) -> None:
        if self._split_model is not None:
            self._split_model.gather()

    @property
    def _kept_parameters(self) -> dict[str, Tensor]:
        """Those that a snapshot has: not those that were read and are frozen."""
        return self._frozen.without(self._parameters)

    def weights(self) -> dict[str, np.ndarray]:
        return self._frozen.beside(
            {name: _copy(parameter) for name, parameter in self._kept_parameters.items()}
        )

    def views(self) -> dict[str, np.ndarray]:
        """As `weights`, without a copy of those on the host: they change with the module."""
        kept = self._frozen.without(dict(self._module.named_parameters()))
        return self._frozen.beside({name: one.detach().cpu().numpy() for name, one in kept.items()})

    def optimizer_state(self) -> dict[str, np.ndarray]:
        state = {"step": np.array(self._step, dtype=np.int64)}
        for name, parameter in self._trained_parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                state[f"{name}/{key}"] = _copy(value)
        return state

    def load(
        self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray] | None
    ) -> None:
        kept, weights = self._kept_parameters, self._frozen.checked(weights)
        check_shapes({name: saved.shape for name, saved in weights.items()}, kept)
        for name, parameter in kept.items():
            self._take(parameter, weights[name])
        for name, module in self._module.named_modules():
            if (after_load := getattr(module, AFTER_LOAD, None)) is not None:
                after_load(name)
        self._forget_what_weights_made()
        if self._masters is not None:
            self._masters.widen()
        if optimizer_state is None:
            return
        self._step = int(optimizer_state["step"])
        self._optimizer.state.clear()
        if self._step == 0:
            return
        for name, parameter in self._trained_parameters.items():
            if f"{name}/step" not in optimizer_state:
                raise ValueError(
                    f"the optimizer state has nothing of {name!r}, which was frozen when it was saved and is "
                    "trained now; begin with the weights alone (init_from)"
                )
            self._optimizer.state[parameter] = {
                "step": torch.tensor(optimizer_state[f"{name}/step"]).to(
                    self._device if self._settings.fused else HOST.torch
                ),
                **{
                    key: held_as(parameter, optimizer_state[f"{name}/{key}"]).to(self._device)
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }

    def _forget_what_weights_made(self) -> None:
        for each in made_of_weights(self._module):
            each.forget()

    def _take(self, parameter: Tensor, saved: np.ndarray) -> None:
        is_plain = self._split_model is None and parameter.device == HOST.torch
        if is_plain and parameter.dtype == torch.float32:
            # Without a copy on the way, which PyTorch makes of arrays that it may not write.
            np.copyto(parameter.detach().numpy(), saved)
            return
        with torch.no_grad():
            parameter.copy_(held_as(parameter, saved))


def _groups(
    module: nn.Module, parameters: Mapping[str, Tensor], settings: DenseOptimizerSettings
) -> list[dict[str, Any]]:
    """The parameters that decay and those that do not, each in their order."""
    rows = {
        f"{name}.weight" if name else "weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }

    def decays(name: str, parameter: Tensor) -> bool:
        if settings.decayed == "all":
            return True
        return parameter.ndim > 1 and not (settings.decayed == "linear" and name in rows)

    groups = []
    # One step of the optimizer takes no mixture of split weights and whole ones.
    for is_decayed, spread in ((True, False), (False, False), (True, True), (False, True)):
        members = [
            one
            for name, one in parameters.items()
            if decays(name, one) == is_decayed and is_distributed(one) == spread
        ]
        if members:
            groups.append({"params": members, "weight_decay": settings.weight_decay if is_decayed else 0.0})
    return groups


def _copy(tensor: Tensor) -> np.ndarray:
    return whole(tensor.detach()).cpu().numpy().copy()
