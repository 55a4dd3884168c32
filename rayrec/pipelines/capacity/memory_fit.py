"""Whether a run's tables, weights and buffers fit a cluster's nodes and cards; names what does not.

The bytes are those of `rayrec.embeddings.capacity` and `memory_plan`, which tests compare with real
processes. Activations are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.embeddings.capacity import (
    ShardPlan,
    batch_bytes,
    caller_bytes,
    device_batch_bytes,
    plan_shards,
    spread,
)
from rayrec.embeddings.config import TableConfig
from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.step_model import layout_of
from rayrec.pipelines.capacity.workload import Workload
from rayrec.pipelines.training.memory_plan import (
    PROCESS_BYTES,
    TRAINER_PROCESS_BYTES,
    DenseSize,
    TrainerPlan,
)
from rayrec.platform.errors import InputError
from rayrec.platform.memory import human_size


@dataclass(frozen=True)
class MemoryFit:
    """Bytes of the fullest server and of a trainer, and what their nodes have."""

    server: ShardPlan | None
    """The fullest; None without tables."""
    trainer: TrainerPlan
    server_node_bytes: float
    server_node_limit: float
    trainer_node_bytes: float
    """Without the servers on it, where nodes are shared they are in here."""
    trainer_node_limit: float
    card_bytes: float
    card_limit: float | None
    """None without accelerators."""

    def check(self, cluster: ClusterSpec, work: Workload) -> None:
        """Refuse what does not fit.

        Raises:
            InputError: names the node or card, the component that takes most of it, and what to change.
        """
        if self.card_limit is not None and self.card_bytes > self.card_limit:
            component, size = _largest(_card_components(self.trainer))
            remedy = (
                "split the weights (training.parallel: fsdp2)"
                if not self.trainer.is_sharded
                else "use more cards, or a smaller network"
            )
            raise InputError(
                f"the model does not fit: a card would need {human_size(self.card_bytes)} and has "
                f"{human_size(self.card_limit)}; most of it is {component} ({human_size(size)}); {remedy}"
            )
        if self.server is not None and self.server_node_bytes > self.server_node_limit:
            component, size = _largest(_server_components(self.server))
            needed = self.server_node_bytes / self.server_node_limit
            raise InputError(
                "the model does not fit: a servers' node would need "
                f"{human_size(self.server_node_bytes)} and has "
                f"{human_size(self.server_node_limit)}; most of a server is {component} "
                f"({human_size(size)}); use at least {needed:.1f} times as many nodes for servers, tables "
                "with rows on disk (sparse.tables), or an optimizer with less state"
            )
        if self.trainer_node_bytes > self.trainer_node_limit:
            component, size = _largest(_host_components(self.trainer))
            raise InputError(
                f"the model does not fit: a trainers' node would need {human_size(self.trainer_node_bytes)} "
                f"and has {human_size(self.trainer_node_limit)}; most of a trainer is {component} "
                f"({human_size(size)}); lower training.batch_size, or use more nodes"
            )


def memory_fit(work: Workload, tables: Sequence[TableConfig], cluster: ClusterSpec) -> MemoryFit:
    """What the processes of a scaled run hold.

    Args:
        tables: the run's, of which optimizers, types of weights and rows on disk are taken; widths and sizes
            are those of `work`.
    """
    layout = layout_of(work, cluster)
    by_name = {table.table: table for table in work.tables}
    resized = tuple(
        table.model_copy(update={"dim": by_name[table.name].dim, "servers": by_name[table.name].servers})
        for table in tables
        if table.name in by_name
    )
    ids = {table.table: round(table.ids) for table in work.tables}
    caller_ids = {table.table: round(table.ids) for table in work.caller_tables}
    shards: Sequence[ShardPlan] = ()
    if resized and work.num_servers:
        shards = plan_shards(
            resized,
            {
                table.table: spread(round(table.rows), work.num_servers, table.servers)
                for table in work.tables
            },
            caller_ids,
            work.num_servers,
            work.num_callers,
            int(work.mode == "bounded_stale"),
            work.step_buffer,
            {table.table: round(table.ids) for table in work.step_tables},
        )
    fullest = sorted(shards, key=lambda shard: shard.peak_bytes, reverse=True)[: layout.servers_per_node]
    has_cards = cluster.trainers.card is not None
    trainer = TrainerPlan(
        dense=DenseSize(round(work.dense_parameters), round(4 * work.dense_parameters), 0),
        batch_bytes=batch_bytes(resized, ids, work.mode != "sync"),
        cache_bytes=0,
        catalog_bytes=0,
        num_trainers=work.num_trainers,
        device_cache_bytes=0,
        device_batch_bytes=device_batch_bytes(resized, ids) if has_cards else 0,
        is_sharded=work.is_sharded,
    )
    per_node = min(layout.trainers_per_node, work.num_trainers)
    host = _host_bytes(trainer, has_cards) + TRAINER_PROCESS_BYTES
    workers = -(-(work.num_readers + work.num_feature_workers) // max(layout.trainer_nodes, 1))
    of_trainers = per_node * host + workers * PROCESS_BYTES
    if work.group_size > 1:
        held = caller_bytes(resized, ids, work.group_size, int(work.mode == "bounded_stale"))
        of_trainers += -(-per_node // work.group_size) * (held + PROCESS_BYTES)
    of_servers = float(sum(shard.peak_bytes + PROCESS_BYTES for shard in fullest))
    if layout.is_shared:
        of_trainers += of_servers
        of_servers = of_trainers
    servers = cluster.servers
    return MemoryFit(
        server=fullest[0] if fullest else None,
        trainer=trainer,
        server_node_bytes=of_servers,
        server_node_limit=(cluster.trainers if servers is None else servers).memory.value,
        trainer_node_bytes=of_trainers,
        trainer_node_limit=cluster.trainers.memory.value,
        card_bytes=sum(_card_components(trainer).values()) if has_cards else 0.0,
        card_limit=cluster.trainers.card.memory.value if cluster.trainers.card is not None else None,
    )


def _host_bytes(trainer: TrainerPlan, has_cards: bool) -> float:
    if not has_cards:
        return trainer.peak_bytes
    # Weights are on the card; the host has batches, and copies of the weights while a snapshot is taken.
    copies = trainer.dense.weights_bytes * 3
    return trainer.batch_bytes + (copies / trainer.num_trainers if trainer.is_sharded else copies)


def _card_components(trainer: TrainerPlan) -> dict[str, float]:
    """What a card holds.

    Of weights that are split it is a part of everything, and all of the weights while it validates, which is
    more than the blocks that a step gathers.
    """
    weights = float(trainer.dense.weights_bytes)
    rows = {"the rows of a batch": float(trainer.device_batch_bytes)}
    if not trainer.is_sharded:
        return rows | {
            "the dense weights": weights,
            "the gradients of the dense weights": float(trainer.gradients_bytes),
            "the state of the dense optimizer": float(trainer.optimizer_bytes),
        }
    return rows | {
        "its part of weights, gradients and optimizer": 4 * weights / trainer.num_trainers,
        "the dense weights that validation gathers": weights,
    }


def _host_components(trainer: TrainerPlan) -> dict[str, float]:
    return {
        "the rows and gradients of a batch": trainer.batch_bytes,
        "copies of the dense weights for a snapshot": 3.0 * trainer.dense.weights_bytes,
    }


def _server_components(server: ShardPlan) -> dict[str, float]:
    found: dict[str, float] = {"the buffers of a step, which grow with the trainers": server.step_bytes}
    for table in server.tables:
        found |= {
            f"the weights of table {table.table!r}": table.weights_bytes,
            f"the optimizer state of table {table.table!r}": table.state_bytes,
            f"the index of table {table.table!r}": table.index_bytes,
            f"the copy-on-write buffer of table {table.table!r}": table.buffer_bytes,
        }
    return found


def _largest(components: dict[str, float]) -> tuple[str, float]:
    return max(components.items(), key=lambda pair: pair[1])


def server_row_bytes(fit: MemoryFit) -> float:
    """Bytes of rows that the fullest server writes to a snapshot."""
    return 0.0 if fit.server is None else float(sum(table.records_bytes for table in fit.server.tables))
