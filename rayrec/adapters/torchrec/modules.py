"""torchrec's collections with their rows from outside.

`adapt` puts modules of the same interface in the place of a model's collections. They have no weights:
`using` lends them the rows of one batch, and takes the gradients.

Axes: M distinct ids of a table, B rows of the batch, D numbers of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from rayrec.adapters.torchrec.lookups import KjtLookups
from rayrec.adapters.torchrec.tables import TableSpec, table_specs
from rayrec.models.sequence.feature_lookups import Pooling, pooled, sequence
from rayrec.platform.errors import InputError

_POOLING: dict[PoolingType, Pooling] = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


class RowGradients:
    """The rows lent for one batch; after `backward` they have gradients."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self._rows = rows

    def by_table(self) -> dict[str, np.ndarray]:
        """[M, D] gradient of each row, in the order of the batch's distinct ids; zeros where none came."""
        return {
            name: (torch.zeros_like(rows_MD) if rows_MD.grad is None else rows_MD.grad).cpu().numpy()
            for name, rows_MD in self._rows.items()
        }


@dataclass
class _Loan:
    """One batch's rows while the model runs."""

    batch: KjtLookups
    rows: dict[str, Tensor]
    inverse: dict[str, Tensor]

    def number_of(self, features: KeyedJaggedTensor, asked_by: str) -> int:
        for number, kjt in enumerate(self.batch.kjts):
            if kjt is features:
                return number
        raise InputError(
            f"{asked_by} got a KeyedJaggedTensor that the lookup stage has not seen: rows are looked up "
            "before forward runs, so a KeyedJaggedTensor that is built, split, permuted or moved in there "
            "has none. Do that first, and give forward one that went through split_kjt (`kjts` of its result)"
        )

    def inverse_of(self, number: int, table: str, feature: str) -> Tensor:
        place = self.batch.positions.get((number, table, feature))
        if place is None:
            keys = ", ".join(self.batch.kjts[number].keys())
            raise InputError(
                f"table {table!r} reads the feature {feature!r}, which this KeyedJaggedTensor does not have; "
                f"it has {keys}"
            )
        return self.inverse[table][place]


class _Lender:
    """Common to all collections of a model."""

    def __init__(self) -> None:
        self._loan: _Loan | None = None

    def lend(self, loan: _Loan | None) -> None:
        self._loan = loan

    def loan(self, asked_by: str) -> _Loan:
        if self._loan is None:
            raise InputError(
                f"{asked_by} has no rows: run the model inside `with adapted.using(batch, rows)`, with rows "
                "from the lookup stage"
            )
        return self._loan


class LentEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """`EmbeddingBagCollection` without weights."""

    def __init__(self, configs: list[EmbeddingBagConfig], is_weighted: bool, lender: _Lender) -> None:
        super().__init__()
        self._configs = configs
        self._is_weighted = is_weighted
        self._lender = lender
        names = get_embedding_names_by_table(configs)
        self._keys = [name for of_table in names for name in of_table]
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """[B, sum of D] vectors, one for each feature of each table."""
        loan = self._lender.loan("an EmbeddingBagCollection")
        number = loan.number_of(features, "an EmbeddingBagCollection")
        jagged = features.to_dict()
        vectors = []
        for config in self._configs:
            for feature in config.feature_names:
                inverse_N = loan.inverse_of(number, config.name, feature)
                of_feature = jagged[feature]
                weights_N = of_feature.weights() if self._is_weighted else None
                pooling = _POOLING[config.pooling]
                vectors.append(
                    pooled(loan.rows[config.name], inverse_N, of_feature.offsets(), pooling, weights_N)
                )
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=torch.cat(vectors, dim=1))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted


class LentEmbeddingCollection(EmbeddingCollectionInterface):
    """`EmbeddingCollection` without weights."""

    def __init__(self, configs: list[EmbeddingConfig], need_indices: bool, lender: _Lender) -> None:
        super().__init__()
        self._configs = configs
        self._need_indices = need_indices
        self._lender = lender
        self._names_by_table = get_embedding_names_by_table(configs)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """By feature, the row of each of its ids."""
        loan = self._lender.loan("an EmbeddingCollection")
        number = loan.number_of(features, "an EmbeddingCollection")
        jagged = features.to_dict()
        vectors = {}
        for config, names in zip(self._configs, self._names_by_table, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                of_feature = jagged[feature]
                vectors[name] = JaggedTensor(
                    values=sequence(loan.rows[config.name], loan.inverse_of(number, config.name, feature)),
                    lengths=of_feature.lengths(),
                    weights=of_feature.values() if self._need_indices else None,
                )
        return vectors

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self._configs

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        return self._names_by_table


class AdaptedModel:
    """A model whose collections take rows from outside; see `adapt`."""

    def __init__(self, model: nn.Module, tables: Sequence[TableSpec], lender: _Lender) -> None:
        self.model = model
        """With dense weights only: what its optimizer and its `state_dict` see."""
        self.tables = tuple(tables)
        self._lender = lender

    @contextmanager
    def using(self, batch: KjtLookups, rows: Mapping[str, np.ndarray]) -> Iterator[RowGradients]:
        """Run the model in here: its collections find the rows of this batch, which collect gradients.

        Args:
            rows: [M, D] by table, in the order of the batch's distinct ids, as lookup modes give them.

        Raises:
            InputError: rows of a table are missing or not of its shape.
        """
        device = batch.kjts[0].device()
        leaves, inverse = {}, {}
        for table in self.tables:
            lookup = batch.lookups[table.name]
            expected = (len(lookup.ids_M), table.dim)
            found = rows[table.name].shape if table.name in rows else None
            if found != expected:
                raise InputError(
                    f"table {table.name!r}: expected rows of shape {expected}, one of {table.dim} numbers "
                    f"for each distinct id; found {'none' if found is None else found}"
                )
            # A copy: arrays from other processes are read-only.
            leaves[table.name] = torch.tensor(rows[table.name], device=device).requires_grad_()
            inverse[table.name] = torch.from_numpy(lookup.inverse).to(device)
        self._lender.lend(_Loan(batch, leaves, inverse))
        try:
            yield RowGradients(leaves)
        finally:
            self._lender.lend(None)


def adapt(model: nn.Module) -> AdaptedModel:
    """Put our tables in the place of torchrec's: every collection in `model` is replaced, in place.

    Collections made with `device="meta"` take no memory before that.

    Raises:
        InputError: the model has no collection, one is of a kind that cannot be replaced, or two tables have
            one name; nothing has changed.
    """
    specs = table_specs(model)
    lender = _Lender()
    replacements: dict[nn.Module, nn.Module] = {
        module: _lent(name, module, lender)
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface)
    }
    if model in replacements:
        return AdaptedModel(replacements[model], specs, lender)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in replacements:
                setattr(module, name, replacements[child])
    return AdaptedModel(model, specs, lender)


def _lent(name: str, module: nn.Module, lender: _Lender) -> nn.Module:
    # Of exactly these classes: their heirs hold rows in ways of their own.
    if isinstance(module, EmbeddingBagCollection) and type(module) is EmbeddingBagCollection:
        bags = module.embedding_bag_configs()
        for config in bags:
            if config.pooling not in _POOLING:
                raise InputError(f"table {config.name!r} has pooling {config.pooling}; expected sum or mean")
        return LentEmbeddingBagCollection(bags, module.is_weighted(), lender)
    if isinstance(module, EmbeddingCollection) and type(module) is EmbeddingCollection:
        return LentEmbeddingCollection(module.embedding_configs(), module.need_indices(), lender)
    raise InputError(
        f"{name or 'the model'} is a {type(module).__name__}, which has tables of its own kind; expected a "
        "plain EmbeddingBagCollection or EmbeddingCollection, neither fused nor sharded nor adapted before"
    )
