"""torchrec's table configs as ours."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from rayrec.embeddings.base.layout import WeightDtype
from rayrec.embeddings.config import OptimizerConfig, RowwiseAdagradConfig, TableConfig
from rayrec.platform.errors import InputError
from rayrec.platform.schedule import RateSchedule

ValueT = TypeVar("ValueT")

_WEIGHT_DTYPES: dict[DataType, WeightDtype] = {
    DataType.FP32: "float32",
    DataType.FP16: "float16",
    DataType.BF16: "bfloat16",
}


@dataclass(frozen=True)
class TableSpec:
    """What a model says of one of its tables."""

    name: str
    dim: int
    feature_names: tuple[str, ...]
    num_embeddings: int
    """A hint: how many ids there may be. Ids are any 64-bit integers, and tables grow."""
    init_scale: float | None
    """New rows are uniform in [-init_scale, init_scale); None where the model asks for another start."""
    weight_dtype: WeightDtype


Tables: TypeAlias = nn.Module | Iterable[BaseEmbeddingConfig | TableSpec]
"""A model with collections in it, or the configs of tables."""


def table_specs(tables: Tables) -> tuple[TableSpec, ...]:
    """Every table, in the order of the collections and of the configs in them.

    Raises:
        InputError: there is none, two have one name, or one asks for what rows that come one by one
            cannot have; names the table.
    """
    configs = _configs_in(tables) if isinstance(tables, nn.Module) else list(tables)
    specs = [config if isinstance(config, TableSpec) else _spec(config) for config in configs]
    if not specs:
        raise InputError(
            "there are no tables: expected a model with an EmbeddingBagCollection or an EmbeddingCollection "
            "in it, or their table configs"
        )
    by_name: dict[str, TableSpec] = {}
    for spec in specs:
        if spec.name in by_name:
            other = by_name[spec.name]
            dims = "" if other.dim == spec.dim else f", with rows of {other.dim} and of {spec.dim} numbers"
            raise InputError(
                f"two tables have the name {spec.name!r}{dims}; they would share rows, so give each its own "
                "name (features that should share rows go to one table's feature_names)"
            )
        by_name[spec.name] = spec
    return tuple(specs)


def table_configs(
    tables: Tables,
    optimizer: OptimizerConfig | Mapping[str, OptimizerConfig] = RowwiseAdagradConfig(),  # noqa: B008
    init_scale: float | Mapping[str, float] | None = None,
    schedule: RateSchedule = RateSchedule(),  # noqa: B008
    seed: int = 0,
) -> list[TableConfig]:
    """What servers and lookup modes have to know of the tables.

    Args:
        optimizer: of every table, or by table; a table that is not named takes row-wise Adagrad.
        init_scale: new rows are uniform in [-init_scale, init_scale), of every table or by table; where it
            is not given, as in torchrec: `weight_init_max`, or sqrt(1 / num_embeddings).
        seed: of the run; a table's own seed depends on it and on the table's name.

    Raises:
        InputError: as `table_specs`; or a setting is of a table that is not there; or a table's rows start
            in another way, and no `init_scale` is given.
    """
    specs = table_specs(tables)
    names = [spec.name for spec in specs]
    optimizers = _by_table("optimizer", optimizer, names, RowwiseAdagradConfig())
    scales = _by_table("init_scale", init_scale, names, None)
    configs = []
    for spec in specs:
        given = scales[spec.name]
        scale = spec.init_scale if given is None else given
        if scale is None:
            raise InputError(
                f"table {spec.name!r} starts its rows in a way of its own (init_fn, or weight_init_min and "
                "weight_init_max that are not even around zero); here rows start one by one, uniform in "
                "[-s, s): give s as init_scale"
            )
        configs.append(
            TableConfig(
                name=spec.name,
                dim=spec.dim,
                weight_dtype=spec.weight_dtype,
                optimizer=optimizers[spec.name],
                init_scale=scale,
                schedule=schedule,
                seed=_table_seed(seed, spec.name),
            )
        )
    return configs


def expected_rows(tables: Tables) -> dict[str, int]:
    """`num_embeddings` by table: what to plan memory for, see `rayrec.embeddings.capacity`."""
    return {spec.name: spec.num_embeddings for spec in table_specs(tables)}


def _configs_in(model: nn.Module) -> list[BaseEmbeddingConfig]:
    configs: list[BaseEmbeddingConfig] = []
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollectionInterface):
            configs += module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollectionInterface):
            configs += module.embedding_configs()
    return configs


def _spec(config: BaseEmbeddingConfig) -> TableSpec:
    if not config.name:
        raise InputError(
            f"a table of features {config.feature_names} has no name; rows are kept by table name"
        )
    if config.data_type not in _WEIGHT_DTYPES:
        kinds = ", ".join(kind.name for kind in _WEIGHT_DTYPES)
        raise InputError(
            f"table {config.name!r} has data_type {config.data_type.name}; rows that are trained have one of "
            f"{kinds}"
        )
    return TableSpec(
        name=config.name,
        dim=config.embedding_dim,
        feature_names=tuple(config.feature_names or [config.name]),
        num_embeddings=config.num_embeddings,
        init_scale=_init_scale(config),
        weight_dtype=_WEIGHT_DTYPES[config.data_type],
    )


def _init_scale(config: BaseEmbeddingConfig) -> float | None:
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    # Configs that are given no init_fn make this one.
    start = config.init_fn
    is_uniform = start is None or getattr(start, "func", None) is nn.init.uniform_
    return float(high) if is_uniform and low == -high else None


def _by_table(
    setting: str, value: ValueT | Mapping[str, ValueT], names: Sequence[str], default: ValueT
) -> dict[str, ValueT]:
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    for name in value:
        if name not in names:
            raise InputError(f"{setting} names table {name!r}; the model's tables are {', '.join(names)}")
    return {name: value.get(name, default) for name in names}


def _table_seed(seed: int, name: str) -> int:
    """From the name, not the place: a table keeps its rows' first values when another is added."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
