"""Click prediction from a folder of raw Parquet: read, shuffled, prepared and trained in one process.

    python examples/from_parquet.py [--folder FOLDER] [--epochs N]

No Ray, no parameter servers, no prepared data set: only the training read of RayRec and its operations, with
a model of torch's own. Operations are declared as they are in a run's config, under `data.features`. Without
a folder, one is drawn, in which evenings and cheap things are clicked on; any with columns city, price,
shown_at, history and clicked will do.

Axes: B rows of a batch, N clicked-on items of all its rows.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from rayrec.platform import Config, InputError
from rayrec.samples import (
    Arrays,
    Batching,
    FeatureProgram,
    Jagged,
    OperationConfig,
    ParquetSource,
    ReadPlan,
    ReadSettings,
    RowBatch,
    RowContext,
    SampleStream,
    read_spec,
)

FEATURES = """
features:
  - {op: hash, input: city, buckets: 1000}
  - {op: bucketize, input: price, boundaries: [1, 2, 5, 10, 20, 50]}
  - {op: time_features, input: shown_at, unit: s, zone: Europe/Berlin, outputs: {hour: hour}}
  - {op: cross, inputs: [city, hour], output: city_hour, buckets: 10000}
  - {op: fill, input: history, value: []}
  - {op: truncate, inputs: [history], length: 20}
  - {op: hash, input: history, buckets: 10000}
"""
ONE_HOT = {"city": 1000, "price": 7, "hour": 24, "city_hour": 10_000}
"""Columns of one id, with the number of their ids."""
WANTED = (*ONE_HOT, "history", "clicked")
SEED, BATCH_SIZE, DIM = 0, 512, 16


class Declared(Config):
    """The part of a config that declares operations."""

    features: tuple[OperationConfig, ...]


def stream_of(folder: Path, epochs: int) -> SampleStream:
    """Every row once per epoch, as arrays of the columns that are wanted."""
    source = ParquetSource.open(folder)
    operations = Declared.parse(yaml.safe_load(FEATURES)).features
    program = FeatureProgram.compile(operations, source.schema).narrowed(WANTED)

    def prepared(step: int, batch: RowBatch) -> RowBatch:
        context = RowContext(batch.row_keys_B, SEED, step)
        return RowBatch(batch.row_keys_B, program(batch.rows, context))

    spec = read_spec(source, program.input_schema.names, filters=(), on_corrupt="stop")
    plan = ReadPlan(source, spec, ReadSettings(Batching(BATCH_SIZE), SEED))
    return SampleStream(plan, stop_step=plan.first_step(epochs), program=prepared)


class ClickModel(nn.Module):
    """Embeddings side by side, a mean over the history, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(size, DIM) for name, size in ONE_HOT.items()})
        self.history = nn.EmbeddingBag(10_000, DIM, mode="mean")
        self.layers = nn.Sequential(nn.Linear(DIM * (len(ONE_HOT) + 1), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, columns: Arrays) -> Tensor:
        """[B] logits of a click."""
        parts = [table(torch.from_numpy(columns[name]).long()) for name, table in self.tables.items()]
        history = columns["history"]
        assert isinstance(history, Jagged)
        values_N, offsets_B = torch.from_numpy(history.values_N), torch.from_numpy(history.offsets_B1[:-1])
        parts.append(self.history(values_N, offsets_B.long()))
        return self.layers(torch.cat(parts, dim=1)).squeeze(1)


def draw_folder(folder: Path, num_files: int = 4, rows_per_file: int = 4096) -> None:
    """Rows as a service would log them."""
    random = np.random.default_rng(SEED)
    for number in range(num_files):
        price = random.gamma(1.0, 10.0, rows_per_file).astype(np.float32)
        shown_at = random.integers(1_767_225_600, 1_767_225_600 + 28 * 86_400, rows_per_file)
        is_evening = shown_at // 3600 % 24 >= 17  # UTC
        probability = 1 / (1 + np.exp(-2.0 * is_evening + price / 5))
        lengths = random.integers(0, 30, rows_per_file)
        histories = [random.integers(0, 2**62, length) for length in lengths.tolist()]
        columns = {
            "city": pa.array(random.choice(["Berlin", "Paris", "Turin"], rows_per_file)),
            "price": price,
            "shown_at": shown_at,
            "history": pa.array([ids if len(ids) else None for ids in histories], pa.list_(pa.int64())),
            "clicked": random.random(rows_per_file) < probability,
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=1024)


def train(folder: Path, epochs: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(SEED)
    model, losses = ClickModel(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with stream_of(folder, epochs) as batches:
        for batch in batches:
            clicked_B = torch.from_numpy(batch.columns["clicked"]).float()
            loss = binary_cross_entropy_with_logits(model(batch.columns), clicked_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="of Parquet with the columns above; drawn if not given")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if arguments.folder is None:
            draw_folder(folder)
        try:
            losses = train(folder, arguments.epochs)
        except InputError as error:
            parser.error(str(error))
    print(f"{len(losses)} steps, loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")


if __name__ == "__main__":
    main()
