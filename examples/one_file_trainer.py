"""RayRec in one file: what `rayrec train` computes, without Ray, servers or pipeline.

    python examples/one_file_trainer.py configs/CONFIG.yaml [--steps N] [--out weights.npz]

Reads the same config and the same prepared data set, visits the rows in the same order, and uses the same
initial weights and dropout masks. So it ends with the same weights, which a test checks.

Axes: B rows (users) of a batch, N events of all of them one after the other, T the longest row, D width,
I items, L code levels, K codes of a level, V rows of a table, M of them updated by a step, S state of one.
"""

import argparse
import itertools
import json
import math
from collections import namedtuple
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional

# What a config may leave out. Its other settings (servers, readers, modes) mean nothing here.
DEFAULTS = yaml.safe_load("""
seed: 0
data: {semantic_ids: null, window_rows: 65536}
model: {item_matrix: dense, item_embedding: true, decoder_dim: 256, label_smoothing: 0.0,
  backbone: {dim: 64, num_layers: 2, num_heads: 2, feedforward_dim: 256, max_length: 50, dropout: 0.2}}
sparse: {optimizer: {kind: rowwise_adagrad}, tables: {}, init_scale: 0.02}
pipeline: {trainer_threads: null}
training: {batch_size: 256, epochs: 10, optimizer: {learning_rate: 0.001, weight_decay: 0.0,
  max_grad_norm: null}, schedule: {warmup_steps: 100, decay: none}}
""")
GOLDEN, FIRST, SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def with_defaults(config: dict, defaults: dict = DEFAULTS) -> dict:
    """The config, completed section by section."""
    sections = {key: value for key, value in defaults.items() if isinstance(value, dict)}
    return defaults | config | {key: with_defaults(config.get(key, {}), sections[key]) for key in sections}


# Random numbers are hashes of what they are for: how the work is cut up does not change them.
def hash64(*parts: int | Tensor) -> Tensor:
    """splitmix64 of int64 values, each folded into the hash of those before it."""
    h = torch.zeros((), dtype=torch.int64)
    for part in parts:
        h = (h ^ part) + GOLDEN
        # torch shifts copies of the sign in from the left; the masks clear them.
        h = (h ^ ((h >> 30) & (1 << 34) - 1)) * FIRST
        h = (h ^ ((h >> 27) & (1 << 37) - 1)) * SECOND
        h = h ^ ((h >> 31) & (1 << 33) - 1)
    return h


# N events, each with the item after it, its place in its row, its slot in the padded rectangle of
# shape (B, T), and the key that its dropout is drawn from. Only attention pads.
Batch = namedtuple("Batch", "items_N targets_N place_N slot_N keys_N shape")


class TrainingData:
    """Every training sequence, in memory, and the order in which an epoch visits them."""

    def __init__(self, config: dict) -> None:
        folder, self.seed = Path(config["data"]["path"]), config["seed"]
        self.batch_size, self.window_rows = config["training"]["batch_size"], config["data"]["window_rows"]
        self.max_length = config["model"]["backbone"]["max_length"]
        files = [pq.ParquetFile(path) for path in sorted((folder / "train").glob("*.parquet"))]
        lists = [file.read(["item_ids"])["item_ids"].combine_chunks() for file in files]
        lengths = np.concatenate([rows.value_lengths().to_numpy() for rows in lists])
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.row_keys = torch.cat([hash64(n, torch.arange(len(rows))) for n, rows in enumerate(lists)])
        # The model sees an item's place in the catalog, never its id.
        self.item_ids = pq.read_table(folder / "items.parquet")["item_id"].to_numpy()
        by_id, ids = np.argsort(self.item_ids), np.concatenate([rows.flatten().to_numpy() for rows in lists])
        self.items = by_id[np.searchsorted(self.item_ids[by_id], ids)]
        groups = [file.metadata.row_group(g).num_rows for file in files for g in range(file.num_row_groups)]
        self.group_starts = np.concatenate([[0], np.cumsum(groups)])
        self.steps_per_epoch = -(-len(lengths) // self.batch_size)
        self.order = lru_cache(maxsize=1)(self._order)

    def _order(self, epoch: int) -> np.ndarray:
        """Row groups are permuted and gathered into windows; then the rows of each window are permuted."""
        starts, sizes, order, window = self.group_starts, np.diff(self.group_starts), [], []
        groups = np.random.default_rng([self.seed, epoch, 0]).permutation(len(sizes))
        for group in groups:
            window.append(group)
            if sizes[window].sum() >= self.window_rows or group == groups[-1]:
                rows = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in sorted(window)])
                order.append(np.random.default_rng([self.seed, epoch, 1 + len(order)]).permutation(rows))
                window = []
        return np.concatenate(order)

    def batch(self, step: int) -> Batch:
        """Of each row's newest events s, s[:-1] goes in and s[1:] is to be predicted."""
        epoch, number = divmod(step, self.steps_per_epoch)
        rows_B = self.order(epoch)[number * self.batch_size : (number + 1) * self.batch_size]
        stops_B = self.offsets[rows_B + 1] - 1
        lengths_B = np.minimum(stops_B - self.offsets[rows_B], self.max_length)
        row_N = np.repeat(np.arange(len(rows_B)), lengths_B)
        place_N = np.arange(len(row_N)) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
        at_N = (stops_B - lengths_B)[row_N] + place_N
        arrays = self.items[at_N], self.items[at_N + 1], place_N, row_N * lengths_B.max() + place_N
        items_N, targets_N, place_N, slot_N = map(torch.from_numpy, arrays)
        keys_N = hash64(self.seed, step, self.row_keys[rows_B[row_N]], place_N)
        return Batch(items_N, targets_N, place_N, slot_N, keys_N, (len(rows_B), int(lengths_B.max())))


class Table:
    """Embeddings of which a step changes only those that its batch reads; first values are hashes of ids."""

    def __init__(self, name: str, ids_V: Tensor, config: dict) -> None:
        self.ids_V, dim, sparse = ids_V, config["model"]["backbone"]["dim"], config["sparse"]
        seed = 1000 * config["seed"] + {"item": 1, "code": 3}[name]
        bits_VD = (hash64(seed, ids_V[:, None], torch.arange(dim)) >> 40) & (1 << 24) - 1
        self.weight_VD = (sparse["init_scale"] * (bits_VD * 2.0**-23 - 1.0)).requires_grad_()
        self.settings = dict((sparse["tables"].get(name) or sparse)["optimizer"])
        initial = self.settings.pop("initial_accumulator", 0.0)
        self.change = {"rowwise_adagrad": rowwise_adagrad, "adam": lazy_adam}[self.settings.pop("kind")]
        self.state_VS = torch.full((len(ids_V), 1 if self.change is rowwise_adagrad else 2 * dim), initial)

    @torch.no_grad()
    def update(self, step: int, factor: float) -> None:
        grad, self.weight_VD.grad = self.weight_VD.grad.coalesce(), None
        rows_M = grad.indices()[0]
        weight_MD, state_MS = self.weight_VD[rows_M], self.state_VS[rows_M]
        self.change(weight_MD, state_MS, grad.values(), step, factor, **self.settings)
        self.weight_VD[rows_M], self.state_VS[rows_M] = weight_MD, state_MS


def rowwise_adagrad(weight_MD, sum_M1, grad_MD, step, factor, lr=0.05, eps=1e-8, weight_decay=0.0) -> None:
    """Adagrad with one accumulator per row: the running sum of its mean squared gradient."""
    grad_MD = grad_MD + weight_decay * weight_MD
    sum_M1 += grad_MD.square().mean(1, keepdim=True)
    weight_MD -= factor * lr / (sum_M1.sqrt() + eps) * grad_MD


def lazy_adam(
    weight_MD, moments_MS, grad_MD, step, factor, lr=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
) -> None:
    """Adam as torch.optim.SparseAdam has it: a row's moments and weights decay only when it is touched."""
    weight_MD *= 1 - factor * lr * weight_decay
    mean_MD, square_MD = moments_MS.chunk(2, dim=1)
    mean_MD.lerp_(grad_MD, 1 - betas[0])
    square_MD.lerp_(grad_MD.square(), 1 - betas[1])
    rate = factor * lr * math.sqrt(1 - betas[1] ** (step + 1)) / (1 - betas[0] ** (step + 1))
    weight_MD -= rate * (mean_MD / (square_MD.sqrt() + eps))


def dropout(keys_N: Tensor, probability: float, index: int, x_ND: Tensor) -> Tensor:
    """A hash of the event's key and this dropout's index decides on four elements, by 16 bits each."""
    bits = hash64(keys_N[:, None] ^ hash64(torch.arange((x_ND.shape[1] + 3) // 4) + (index << 32)))
    kept = bits.view(torch.int16)[:, : x_ND.shape[1]] >= round(probability * 65536) - 32768
    return x_ND * kept.to(x_ND.dtype) / (1 - probability)


class Backbone(nn.Module):
    """A causal transformer: vectors of events to contexts, each of which knows its row's past."""

    def __init__(self, dim, num_layers, num_heads, feedforward_dim, max_length, dropout) -> None:
        super().__init__()
        self.num_heads, self.probability, self.blocks = num_heads, dropout, nn.ModuleList()
        self.positions_TD = nn.Parameter(torch.empty(max_length, dim))
        for _ in range(num_layers):
            block = {"attention_norm": nn.LayerNorm(dim), "qkv": nn.Linear(dim, 3 * dim, bias=False)}
            block |= {"out": nn.Linear(dim, dim), "feedforward_norm": nn.LayerNorm(dim)}
            block |= {"up": nn.Linear(dim, feedforward_dim), "down": nn.Linear(feedforward_dim, dim)}
            self.blocks.append(nn.ModuleDict(block))
        self.input_norm, self.final_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x_ND: Tensor, batch: Batch) -> Tensor:
        drop = partial(dropout, batch.keys_N, self.probability)

        def heads(x_ND: Tensor) -> Tensor:  # to [B, heads, T, D / heads], padded on the right
            padded = x_ND.new_zeros(math.prod(batch.shape), x_ND.shape[1]).index_copy(0, batch.slot_N, x_ND)
            return padded.view(*batch.shape, self.num_heads, -1).transpose(1, 2)

        x_ND = drop(0, self.input_norm(x_ND + functional.embedding(batch.place_N, self.positions_TD)))
        for layer, block in enumerate(self.blocks):
            parts = map(heads, block.qkv(block.attention_norm(x_ND)).chunk(3, dim=1))
            # A causal mask does not look to the right, where the padding is.
            attended = functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
            attended_ND = attended.reshape(math.prod(batch.shape), -1).index_select(0, batch.slot_N)
            x_ND = x_ND + drop(3 * layer + 1, block.out(attended_ND))
            hidden = functional.gelu(block.up(block.feedforward_norm(x_ND)))
            x_ND = x_ND + drop(3 * layer + 3, block.down(drop(3 * layer + 2, hidden)))
        return self.final_norm(x_ND)


class SasRec(nn.Module):
    """Cross-entropy over all items, by inner product; one item matrix serves input and output."""

    def __init__(self, config: dict, data: TrainingData) -> None:
        super().__init__()
        backbone, self.tables = config["model"]["backbone"], {}
        self.backbone = Backbone(**backbone)
        self.items_ID = nn.Parameter(torch.empty(len(data.item_ids), backbone["dim"]).normal_(std=0.02))

    def forward(self, batch: Batch) -> Tensor:
        context_ND = self.backbone(functional.embedding(batch.items_N, self.items_ID), batch)
        return functional.cross_entropy(context_ND @ self.items_ID.T, batch.targets_N, reduction="sum")


class Generative(nn.Module):
    """An event enters as the sum of its codes' rows; a feed-forward decoder emits the next item's codes."""

    def __init__(self, config: dict, data: TrainingData) -> None:
        super().__init__()
        model, dim = config["model"], config["model"]["backbone"]["dim"]
        folder = Path(config["data"]["semantic_ids"] or Path(config["data"]["path"]) / "semantic_ids")
        registry = json.loads((folder / "registry.json").read_text())
        # A digit that lists the items of a tuple is not learned.
        num_levels = registry["num_codebooks"] if registry.get("uniform_digit") else None
        sizes = registry["level_sizes"][:num_levels]
        codes_IL = torch.from_numpy(load_file(folder / "codes.safetensors")["codes_IL"]).long()
        self.codes_IL = codes_IL[:, :num_levels]
        self.code_rows_IL = self.codes_IL + torch.tensor([0, *sizes[:-1]]).cumsum(0)
        code_ids_V = torch.cat([torch.arange(size) | level << 32 for level, size in enumerate(sizes)])
        self.tables = {"code": Table("code", code_ids_V, config)}
        if model["item_embedding"]:
            self.tables["item"] = Table("item", torch.tensor(data.item_ids), config)
        self.cross_entropy = nn.CrossEntropyLoss(reduction="sum", label_smoothing=model["label_smoothing"])
        self.backbone = Backbone(**model["backbone"])
        self.chosen_KD = nn.ParameterList(torch.empty(size, dim).normal_(std=0.02) for size in sizes[:-1])
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in sizes)
        self.up = nn.ModuleList(nn.Linear(dim, model["decoder_dim"]) for _ in sizes)
        self.down = nn.ModuleList(nn.Linear(model["decoder_dim"], dim) for _ in sizes)
        self.output_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in sizes)
        self.heads = nn.ModuleList(nn.Linear(dim, size) for size in sizes)

    def forward(self, batch: Batch) -> Tensor:
        rows = {"code": self.code_rows_IL[batch.items_N], "item": batch.items_N[:, None]}
        read = [functional.embedding(rows[name], t.weight_VD, sparse=True) for name, t in self.tables.items()]
        x_ND = sum(vectors.sum(1) for vectors in read)
        state_ND, loss, num_masks = self.backbone(x_ND, batch), 0.0, 1 + 3 * len(self.backbone.blocks)
        for level, codes_N in enumerate(self.codes_IL[batch.targets_N].T):
            hidden = functional.gelu(self.up[level](self.norms[level](state_ND)))
            hidden = dropout(batch.keys_N, self.backbone.probability, num_masks + level, hidden)
            logits_NK = self.heads[level](self.output_norms[level](state_ND + self.down[level](hidden)))
            loss = loss + self.cross_entropy(logits_NK, codes_N)
            if level < len(self.chosen_KD):
                state_ND = state_ND + functional.embedding(codes_N, self.chosen_KD[level])
        return loss


def steps(model: nn.Module, data: TrainingData, training: dict) -> Iterator[float]:
    """Train, batch after batch, without an end; yields the mean loss of each."""
    settings, schedule = training["optimizer"], training["schedule"]
    total_steps = training["epochs"] * data.steps_per_epoch
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=settings["weight_decay"], fused=True)
    for step in itertools.count():
        batch = data.batch(step)
        loss = model(batch) / len(batch.targets_N)
        optimizer.zero_grad()
        loss.backward()
        if settings["max_grad_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        # Linear warm-up, then constant, or along a cosine to zero.
        factor = min(1.0, (step + 1) / max(schedule["warmup_steps"], 1))
        if schedule["decay"] == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * min(1.0, step / total_steps)))
        optimizer.param_groups[0]["lr"] = settings["learning_rate"] * factor
        optimizer.step()
        for table in model.tables.values():
            table.update(step, factor)
        yield loss.item()


def start(config: dict) -> tuple[nn.Module, Iterator[float], int]:
    """The untrained model, the steps that train it (`next` takes one), and how many the config asks for."""
    config = with_defaults(config)
    model, training, data = config["model"], config["training"], TrainingData(config)
    if model["item_matrix"] != "dense" or any(map(model.get, ("user_embedding", "temperature", "loss"))):
        raise SystemExit("no users, temperatures, losses and sparse SASRec in here; use `rayrec train`")
    if model.get("softmax", "codes") != "codes":
        raise SystemExit("no softmax over children in here; set model.softmax: codes, or use `rayrec train`")
    torch.manual_seed(config["seed"])
    network = {"sasrec": SasRec, "light_decoder": Generative}[model["name"]](config, data)
    return network, steps(network, data, training), training["epochs"] * data.steps_per_epoch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model of RayRec without Ray.")
    parser.add_argument("config", help="YAML file of a run")
    parser.add_argument("--steps", type=int, help="instead of the config's epochs")
    parser.add_argument("--out", help="file for the weights (.npz)")
    arguments = parser.parse_args()
    run = with_defaults(yaml.safe_load(Path(arguments.config).read_text()))
    torch.set_num_threads(run["pipeline"]["trainer_threads"] or torch.get_num_threads())
    trained, losses, num_steps = start(run)
    num_steps, began = arguments.steps or num_steps, perf_counter()
    for done, loss in enumerate(itertools.islice(losses, num_steps), start=1):
        if done % 100 == 0 or done == num_steps:
            print(f"step {done}: loss {loss:.4f}, {done / (perf_counter() - began):.1f} steps/s", flush=True)
    if arguments.out:
        arrays = dict(trained.named_parameters()) | {n: t.weight_VD for n, t in trained.tables.items()}
        np.savez(arguments.out, **{name: array.detach().numpy() for name, array in arrays.items()})
