"""Where the time of a run's actors went."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayrec.actors.parameter_server import ServerStats
from rayrec.actors.trainer import TrainerStats
from rayrec.platform.metrics import StageTimes


@dataclass(frozen=True)
class StageStats:
    """Every actor's account of its time, by stage."""

    readers: list[StageTimes]
    feature_workers: list[StageTimes]
    servers: list[ServerStats]
    trainers: list[TrainerStats]
    callers: list[StageTimes] = field(default_factory=list)
    """Of groups of trainers."""

    def summary(self) -> dict[str, float]:
        """Where the time of training went, averaged over the members of a stage; no validation in it.

        `*_busy_s` is work and `*_waiting_s` idling between batches. A trainer waits within batches as
        well, `lookup_waiting_s` for rows and `update_waiting_s` for updates: with these, every stage's
        seconds add up to those of training. `dense_busy_s` is a part of `trainer_busy_s`; servers are
        busy for `servers_lookup_s` and `servers_update_s`. `callers_*` are there where trainers have groups.
        Rows that the trainers' caches held are `cache_hits`; the rest, `cache_misses`. `max_staleness` is
        the most updates that were not acknowledged when the rows of a batch were asked for.
        `lookup_early_rows` were asked for before the update of the step before was sent, and
        `lookup_late_rows` had to wait for it.
        `mfu` is the share of the device's rate in products of matrices, `matrix_flops_per_s` of all trainers
        together, that training took for `model_flops`; `dense_mfu`, that dense compute alone took.
        """
        trainers = self.trainers
        lookups = [stats.lookups for stats in trainers]
        return {
            **_seconds("read", self.readers),
            **_seconds("features", self.feature_workers),
            **_seconds("servers", [stats.stage for stats in self.servers]),
            **(_seconds("callers", self.callers) if self.callers else {}),
            **_seconds("trainer", [stats.stage for stats in trainers]),
            "dense_busy_s": _mean([stats.dense_s for stats in trainers]),
            "lookup_waiting_s": _mean([stats.rows_wait_s for stats in lookups]),
            "update_waiting_s": _mean([stats.update_wait_s for stats in lookups]),
            "lookup_early_rows": float(sum(stats.num_early for stats in lookups)),
            "lookup_late_rows": float(sum(stats.num_late for stats in lookups)),
            "cache_hits": float(sum(stats.num_cache_hits for stats in lookups)),
            "cache_misses": float(sum(stats.num_cache_misses for stats in lookups)),
            "max_staleness": float(max(stats.max_staleness for stats in lookups)),
            "model_flops": float(sum(stats.model_flops for stats in trainers)),
            "matrix_flops_per_s": float(sum(stats.matrix_rate for stats in trainers)),
            "mfu": _mean([stats.mfu for stats in trainers]),
            "dense_mfu": _mean([stats.dense_mfu for stats in trainers]),
            "servers_lookup_s": _mean([stats.shard.lookup_s for stats in self.servers]),
            "servers_update_s": _mean([stats.shard.update_s for stats in self.servers]),
            "sparse_rows": float(sum(sum(stats.shard.num_rows.values()) for stats in self.servers)),
            "sparse_rows_evicted": float(
                sum(sum(table.num_evicted for table in stats.shard.counts.values()) for stats in self.servers)
            ),
            "sparse_gradients_not_admitted": float(
                sum(
                    sum(table.num_not_admitted for table in stats.shard.counts.values())
                    for stats in self.servers
                )
            ),
            "sparse_bytes": float(sum(stats.shard.num_bytes for stats in self.servers)),
        }


def _seconds(stage: str, members: list[StageTimes]) -> dict[str, float]:
    return {
        f"{stage}_busy_s": _mean([times.busy_s for times in members]),
        f"{stage}_waiting_s": _mean([times.waiting_s for times in members]),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0  # a model without tables has no servers
