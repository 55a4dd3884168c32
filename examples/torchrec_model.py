"""TorchRec's DLRM with its tables on RayRec's parameter servers, in one process.

    python examples/torchrec_model.py --steps 300

The model is torchrec's own, written against `EmbeddingBagCollection`; its `num_embeddings` are hints only,
and ids are any 64-bit integers. The shards here lie in this process; `rayrec.actors` puts the same ones on
Ray. Clicks are sampled from hidden scores of users and items, so that there is something to learn.
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM

from rayrec.adapters.torchrec import adapt, split_kjt, table_configs
from rayrec.embeddings import (
    EmbeddingShard,
    ExactPrefetch,
    LocalTransport,
    RowwiseAdagradConfig,
    ShardMap,
    TrainerLink,
)

NUM_USERS, NUM_ITEMS, DIM, BATCH_SIZE = 1000, 200, 16, 256


def model() -> DLRM:
    tables = [
        EmbeddingBagConfig(
            name="t_user", embedding_dim=DIM, num_embeddings=NUM_USERS, feature_names=["user"]
        ),
        EmbeddingBagConfig(
            name="t_item",
            embedding_dim=DIM,
            num_embeddings=NUM_ITEMS,
            feature_names=["item", "liked_before"],  # one table, two features
            pooling=PoolingType.MEAN,
        ),
    ]
    return DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables, device=torch.device("meta")),
        dense_in_features=2,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )


def batches(
    num_batches: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
    """Dense features, ids, and whether the user clicked."""
    random = np.random.default_rng(seed)
    of_users, of_items = random.normal(size=NUM_USERS), random.normal(size=NUM_ITEMS)
    # What a log has: hashes, not row numbers.
    user_ids, item_ids = (random.integers(-(2**63), 2**63 - 1, size=n) for n in (NUM_USERS, NUM_ITEMS))
    for _ in range(num_batches):
        users, items = (random.integers(n, size=BATCH_SIZE) for n in (NUM_USERS, NUM_ITEMS))
        num_liked = random.integers(0, 4, size=BATCH_SIZE)
        liked = random.integers(NUM_ITEMS, size=num_liked.sum())
        kjt = KeyedJaggedTensor.from_lengths_sync(
            keys=["user", "item", "liked_before"],
            values=torch.tensor(np.concatenate([user_ids[users], item_ids[items], item_ids[liked]])),
            lengths=torch.tensor(np.concatenate([np.ones(2 * BATCH_SIZE, dtype=np.int64), num_liked])),
        )
        clicked = random.random(BATCH_SIZE) < 1 / (1 + np.exp(-2 * (of_users[users] + of_items[items])))
        dense = torch.tensor(random.normal(size=(BATCH_SIZE, 2)), dtype=torch.float32)
        yield dense, kjt, torch.tensor(clicked, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--shards", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(0)

    adapted = adapt(model())
    tables = table_configs(adapted.tables, RowwiseAdagradConfig(lr=0.1))
    shards = [EmbeddingShard(tables, shard, num_trainers=1) for shard in range(arguments.shards)]
    lookups = ExactPrefetch(TrainerLink(tables, ShardMap(len(shards)), LocalTransport(shards)))
    optimizer = torch.optim.Adam(adapted.model.parameters(), lr=0.005)  # dense weights only

    stream = [
        (dense, split_kjt(kjt, adapted.tables), clicked) for dense, kjt, clicked in batches(arguments.steps)
    ]
    losses = []
    lookups.prefetch(0, stream[0][1].lookups)
    for step, (dense, batch, clicked) in enumerate(stream):
        if step + 1 < len(stream):
            lookups.prefetch(step + 1, stream[step + 1][1].lookups)  # read ahead what this step leaves alone
        with adapted.using(batch, lookups.rows(step, batch.lookups)) as gradients:
            loss = binary_cross_entropy_with_logits(adapted.model(dense, batch.kjt).squeeze(1), clicked)
            optimizer.zero_grad()
            loss.backward()
        lookups.update(step, batch.lookups, gradients.by_table())
        optimizer.step()
        losses.append(loss.item())
    lookups.drain()

    tenth = max(1, len(losses) // 10)
    print(f"loss {np.mean(losses[:tenth]):.4f} at first, {np.mean(losses[-tenth:]):.4f} at the end")
    for shard in shards:
        stats = shard.stats()
        rows = ", ".join(f"{count:,} of {name!r}" for name, count in stats.num_rows.items())
        print(f"a shard holds {rows}: {stats.num_bytes / 2**10:,.0f} KiB")


if __name__ == "__main__":
    main()
