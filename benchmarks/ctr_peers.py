"""What ranking models are trained with elsewhere: one loop in one process, each a generator of losses.

All read the same Parquet, in which ids are rows of tables already, and train the same network with a fused
Adam; rows of tables by row-wise Adagrad where the peer has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class PeerSettings:
    """The same for every peer."""

    train: Path
    num_columns: int
    num_numbers: int
    ids_per_column: int
    batch_size: int
    dim: int
    bottom_dims: tuple[int, ...]
    hidden_dims: tuple[int, ...]
    learning_rate: float
    row_learning_rate: float


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(numbers_BF, rows_CB, labels_B)"""


def batches(settings: PeerSettings) -> Iterator[Arrays]:
    """Whole batches, over and over, in the order of the file."""
    while True:
        for batch in pq.ParquetFile(settings.train).iter_batches(settings.batch_size):
            if len(batch) == settings.batch_size:
                yield arrays(batch, settings.num_columns, settings.num_numbers)


def arrays(batch: pa.RecordBatch, num_columns: int, num_numbers: int) -> Arrays:
    numbers = [batch[f"N{at + 1}"].to_numpy(zero_copy_only=False) for at in range(num_numbers)]
    rows = [batch[f"C{at + 1}"].to_numpy() for at in range(num_columns)]
    labels_B = batch["click"].to_numpy(zero_copy_only=False).astype(np.float32)
    return np.stack(numbers, axis=1), np.stack(rows), labels_B


def torchrec_fused(settings: PeerSettings) -> Iterator[float]:
    """TorchRec's DLRM on tables of fbgemm, whose optimizer runs inside of backward."""
    import torchrec.optim
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    tables = FusedEmbeddingBagCollection(
        _torchrec_tables(settings),
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": settings.row_learning_rate, "eps": 1e-8},
        device=torch.device("cpu"),
    )
    yield from _torchrec_losses(settings, tables, [])


def torchrec_plain(settings: PeerSettings) -> Iterator[float]:
    """The same on TorchRec's own bags, with torch's Adagrad for sparse gradients."""
    from torchrec import EmbeddingBagCollection

    tables = EmbeddingBagCollection(tables=_torchrec_tables(settings), device=torch.device("cpu"))
    for bag in tables.embedding_bags.values():
        bag.sparse = True
    optimizer = torch.optim.Adagrad(tables.parameters(), lr=settings.row_learning_rate, eps=1e-8)
    yield from _torchrec_losses(settings, tables, [optimizer])


def _torchrec_tables(settings: PeerSettings) -> list[Any]:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    return [
        EmbeddingBagConfig(
            name=f"t{at + 1}",
            embedding_dim=settings.dim,
            num_embeddings=settings.ids_per_column,
            feature_names=[f"C{at + 1}"],
        )
        for at in range(settings.num_columns)
    ]


def _torchrec_losses(
    settings: PeerSettings, tables: nn.Module, further: list[torch.optim.Optimizer]
) -> Iterator[float]:
    from torchrec import KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM

    model = DLRM(
        tables,
        settings.num_numbers,
        [*settings.bottom_dims, settings.dim],
        [*settings.hidden_dims, 1],
    )
    of_tables = {id(parameter) for parameter in tables.parameters()}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in of_tables]
    optimizers = [torch.optim.AdamW(dense, lr=settings.learning_rate, fused=True), *further]
    keys = [f"C{at + 1}" for at in range(settings.num_columns)]
    lengths = torch.ones(settings.num_columns * settings.batch_size, dtype=torch.int32)
    for numbers_BF, rows_CB, labels_B in batches(settings):
        ids = KeyedJaggedTensor(keys=keys, values=torch.from_numpy(rows_CB).flatten(), lengths=lengths)
        logits_B = model(torch.from_numpy(numbers_BF), ids).squeeze(1)
        yield _step(logits_B, torch.from_numpy(labels_B), optimizers)


def _step(logits_B: Tensor, labels_B: Tensor, optimizers: list[torch.optim.Optimizer]) -> float:
    loss = functional.binary_cross_entropy_with_logits(logits_B, labels_B)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def keras_plain(settings: PeerSettings) -> Iterator[float]:
    """The same network of Keras layers on TensorFlow, with an `Embedding` for each column, compiled and fed
    by `train_on_batch`."""
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    numbers = keras.Input((settings.num_numbers,))
    ids = [keras.Input((), dtype="int64") for _ in range(settings.num_columns)]
    x = numbers
    for width in (*settings.bottom_dims, settings.dim):
        x = keras.layers.Dense(width, activation="relu")(x)
    vectors = [x, *(keras.layers.Embedding(settings.ids_per_column, settings.dim)(each) for each in ids)]
    stacked = keras.layers.Lambda(lambda parts: keras.ops.stack(parts, axis=1))(vectors)
    upper = np.flatnonzero(np.triu(np.ones((len(vectors), len(vectors))), 1))

    def products(x_BKD: Any) -> Any:
        all_BKK = keras.ops.matmul(x_BKD, keras.ops.transpose(x_BKD, (0, 2, 1)))
        return keras.ops.take(keras.ops.reshape(all_BKK, (-1, len(vectors) ** 2)), upper, axis=1)

    top = keras.layers.Concatenate()([x, keras.layers.Lambda(products)(stacked)])
    for width in settings.hidden_dims:
        top = keras.layers.Dense(width, activation="relu")(top)
    model = keras.Model([numbers, *ids], keras.layers.Dense(1)(top))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(settings.learning_rate), loss=loss)
    for numbers_BF, rows_CB, labels_B in batches(settings):
        yield float(model.train_on_batch([numbers_BF, *rows_CB], labels_B))


def rechub_dcn(settings: PeerSettings) -> Iterator[float]:
    """DCN-v2 of torch-rechub, trained as its `CTRTrainer` does: batches of its `DataGenerator`, Adam."""
    from torch_rechub.utils.data import DataGenerator

    numbers_NF, rows_CN, labels_N = arrays(
        pq.read_table(settings.train).combine_chunks().to_batches()[0],
        settings.num_columns,
        settings.num_numbers,
    )
    columns = {f"N{at + 1}": column_N for at, column_N in enumerate(numbers_NF.T)}
    columns |= {f"C{at + 1}": column_N for at, column_N in enumerate(rows_CN)}
    loader, _, _ = DataGenerator(columns, labels_N).generate_dataloader(
        x_val=columns, y_val=labels_N, x_test=columns, y_test=labels_N, batch_size=settings.batch_size
    )
    model = rechub_model(
        [f"N{at + 1}" for at in range(settings.num_numbers)],
        {f"C{at + 1}": settings.ids_per_column for at in range(settings.num_columns)},
        settings.dim,
        settings.hidden_dims,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    criterion = nn.BCELoss()
    while True:
        for x, labels_B in loader:
            loss = criterion(model(x), labels_B.float())
            model.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()


def rechub_model(
    numbers: Sequence[str], num_ids: Mapping[str, int], dim: int, hidden_dims: Sequence[int]
) -> nn.Module:
    """
    Args:
        numbers: names of the columns of numbers.
        num_ids: by column of ids, which are counted from 0.
    """
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DCNv2

    features = [
        *(DenseFeature(column) for column in numbers),
        *(SparseFeature(column, vocab_size=size, embed_dim=dim) for column, size in num_ids.items()),
    ]
    model: nn.Module = DCNv2(
        features,
        n_cross_layers=CROSS_LAYERS,
        mlp_params={"dims": list(hidden_dims), "dropout": 0.0},
        model_structure="parallel",
        use_low_rank_mixture=False,
    )
    return model


CROSS_LAYERS = 3
PEERS: dict[str, Callable[[PeerSettings], Iterator[float]]] = {
    "torchrec, fused": torchrec_fused,
    "torchrec, plain": torchrec_plain,
    "keras": keras_plain,
    "torch-rechub": rechub_dcn,
}
