"""One run, described: what `configs/*.yaml` holds and `train` takes; sections are checked together here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from rayrec.embeddings.base.row_codec import Wire
from rayrec.embeddings.config import (
    TableConfig,
)
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.registry import AnyModelConfig
from rayrec.pipelines.config.placement import PlacementConfig
from rayrec.pipelines.config.sections import (
    TABLE_SEEDS,
    DataConfig,
    EvaluationConfig,
    PipelineConfig,
    RecoveryConfig,
    SnapshotConfig,
    SparseConfig,
    TableSettings,
    TrackingConfig,
    TrainingConfig,
)
from rayrec.platform.cluster import ClusterConfig
from rayrec.platform.config import Config
from rayrec.platform.devices import HOST, device_named
from rayrec.platform.remote_files import absolute
from rayrec.platform.schedule import RateSchedule


class RunConfig(Config):
    """Everything a run depends on."""

    seed: int = Field(0, ge=0, lt=2**31)
    device: str = HOST.kind
    """`cpu`, `cuda` or `npu`: where dense compute runs."""
    fit_to_data: bool = False
    """Whether `max_length`, `dim` and `feedforward_dim` of the backbone, and the batch size, are chosen by
    the data where they are not given; the log says what was chosen and why."""
    data: DataConfig
    model: AnyModelConfig
    sparse: SparseConfig = SparseConfig()
    pipeline: PipelineConfig = PipelineConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _sizes_can_be_chosen(self) -> RunConfig:
        if self.fit_to_data and not hasattr(self.model, "backbone"):
            raise ValueError(
                f"fit_to_data: {self.model.name!r} has no backbone whose sizes could be chosen; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_published_recommends(self) -> RunConfig:
        if self.snapshots.publish is not None and self.model.kind != "next_item":
            raise ValueError(
                f"snapshots.publish: versions are of models that recommend, and {self.model.name!r} does "
                "not; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _there_are_rows_to_round(self) -> RunConfig:
        publish = self.snapshots.publish
        if publish is not None and (reason := self.why_rows_stay(publish.rows)) is not None:
            raise ValueError(f"snapshots.publish.rows is {publish.rows!r}: {reason}")
        return self

    @model_validator(mode="after")
    def _what_is_quantized_recommends(self) -> RunConfig:
        if self.model.quantization is not None and self.model.kind != "next_item":
            raise ValueError(
                f"model.quantization is of runs that recommend, and {self.model.name!r} does not: leave it "
                "out"
            )
        return self

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        return device_named(value).kind  # which refuses other names

    @model_validator(mode="after")
    def _cache_is_exact(self) -> RunConfig:
        if self.sparse.cache_rows and self.pipeline.mode != "exact_prefetch":
            raise ValueError(
                f"sparse.cache_rows is {self.sparse.cache_rows} and pipeline.mode {self.pipeline.mode!r}: "
                "a cache needs the mode 'exact_prefetch'; set one of the two"
            )
        return self

    @model_validator(mode="after")
    def _cached_rows_are_whole(self) -> RunConfig:
        if self.sparse.cache_rows and self.sparse.wire != "float32":
            raise ValueError(
                f"sparse.cache_rows is {self.sparse.cache_rows} and sparse.wire {self.sparse.wire!r}: a "
                "cache holds rows with the state of their optimizer, which travel as float32 only; leave one "
                "of the two out"
            )
        return self

    @model_validator(mode="after")
    def _every_server_holds_something(self) -> RunConfig:
        held = [self.sparse.tables.get(name, TableSettings()).servers for name in self.model.tables]
        if not held or None in held:
            return self
        empty = sorted(set(range(self.sparse.num_servers)) - {one for each in held for one in each or ()})
        if empty:
            raise ValueError(
                f"sparse.tables: server {empty[0]} holds none of the tables {', '.join(self.model.tables)}; "
                "name it in one of their `servers`, or lower sparse.num_servers"
            )
        return self

    @model_validator(mode="after")
    def _model_can_train_on_the_device(self) -> RunConfig:
        self.model.check_device(device_named(self.device))
        return self

    @model_validator(mode="after")
    def _there_is_something_to_compile(self) -> RunConfig:
        if self.training.compile and self.model.not_compiled_because is not None:
            raise ValueError(
                f"training.compile is set and the model {self.model.name!r}, "
                f"{self.model.not_compiled_because}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _numbers_are_of_impressions(self) -> RunConfig:
        if self.data.numbers and self.model.kind != "impressions":
            raise ValueError(
                f"data.numbers are columns that ranking models read, and {self.model.name!r} is none; leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _forms_are_of_language_models(self) -> RunConfig:
        if self.evaluation.form is not None and self.model.kind != "language":
            raise ValueError(
                f"evaluation.form is set, and the answers of {self.model.name!r} are no texts: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _tables_can_be_made(self) -> RunConfig:
        try:
            self.tables(RateSchedule())
        except ValidationError as error:
            raise ValueError(f"sparse: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        return self

    @model_validator(mode="after")
    def _what_is_about_histories_is_for_models_of_them(self) -> RunConfig:
        if self.model.kind == "next_item":
            return self
        if self.data.redraw_ties:
            raise ValueError(
                "data.redraw_ties is about histories that the next item is predicted of, and model "
                f"{self.model.name!r} reads none; leave it out"
            )
        if self.goes_by_event_times:
            raise ValueError(
                f"eviction.ttl_hours goes by the times of a history's events, and model {self.model.name!r} "
                "reads none; use max_age_steps"
            )
        if self.evaluation.instruction is not None:
            raise ValueError(
                f"evaluation.instruction is set, and {self.model.name!r} recommends nothing: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _shards_have_several_trainers(self) -> RunConfig:
        parallel = self.training.parallel
        if parallel != "replicated" and self.pipeline.num_trainers == 1:
            raise ValueError(
                f"training.parallel is {parallel!r} and pipeline.num_trainers 1: one trainer has nobody to "
                "share weights with; set parallel to 'replicated', or take more trainers"
            )
        if parallel == "fsdp2" and self.model.not_sharded_because is not None:
            raise ValueError(
                f"training.parallel is 'fsdp2', {self.model.not_sharded_because}; set it to 'replicated'"
            )
        if parallel == "tensor" and self.model.kind != "language":
            raise ValueError(
                "training.parallel is 'tensor', which splits language models alone; take 'fsdp2' or "
                "'replicated'"
            )
        if parallel == "tensor" and self.training.micro_batches > 1:
            raise ValueError(
                "training.parallel is 'tensor' and training.micro_batches "
                f"{self.training.micro_batches}: the plans of transformers sum some gradients when they are "
                "computed, which pieces would do again; set micro_batches to 1, or parallel to 'fsdp2'"
            )
        return self

    @model_validator(mode="after")
    def _rows_of_groups_have_no_owner(self) -> RunConfig:
        if self.pipeline.group_size > 1 and self.sparse.cache_rows:
            raise ValueError(
                f"pipeline.trainers_per_group is {self.pipeline.trainers_per_group} and sparse.cache_rows "
                f"{self.sparse.cache_rows}: rows in a cache have one trainer that changes them, and a group "
                "has nothing to add up; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _what_is_followed_has_no_epochs(self) -> RunConfig:
        if self.data.follow is None:
            return self
        if self.evaluation.every_steps is None:
            raise ValueError("data.follow needs evaluation.every_steps: a folder that grows has no epochs")
        if self.training.min_steps_per_epoch > 1:
            raise ValueError(
                "training.min_steps_per_epoch is set, and data.follow too: a folder that grows has no "
                "epochs; leave it out"
            )
        if self.training.schedule.decay != "none":
            raise ValueError(
                f"training.schedule.decay is {self.training.schedule.decay!r} and data.follow set: a folder "
                "that grows has no end to decay towards; set decay to 'none'"
            )
        return self

    def with_absolute_paths(self) -> RunConfig:
        """The same run, to be understood from any working directory."""
        paths: dict[str, Any] = {"path": absolute(self.data.path)}
        for name in ("semantic_ids", "samples", "graph"):
            if (path := getattr(self.data, name)) is not None:
                paths[name] = absolute(path)
        paths["features"] = tuple(feature.with_absolute_paths() for feature in self.data.features)
        if (cache := self.data.cache) is not None:
            paths["cache"] = cache.model_copy(update={"folder": absolute(cache.folder)})
        changed: dict[str, Any] = {
            "data": self.data.model_copy(update=paths),
            "model": self.model.with_absolute_paths(),
            "snapshots": self.snapshots.with_absolute_paths(),
            "sparse": self.sparse.with_absolute_paths(),
        }
        if (run := self.training.init_from) is not None:
            changed["training"] = self.training.model_copy(update={"init_from": absolute(run)})
        return self.model_copy(update=changed)

    def for_inference(self) -> RunConfig:
        """The same run for those who train nothing: they need not know how long it is or what counts how much
        in the loss, and may be on another device, where the attention that it trained with has no kernels."""
        schedule = self.training.schedule.model_copy(update={"decay": "none"})
        changed: dict[str, Any] = {
            "training": self.training.model_copy(update={"schedule": schedule}),
            "model": self.model.for_inference(),
        }
        return self.model_copy(update=changed)

    def with_data(self, path: str | Path) -> RunConfig:
        """The same run on data that lies elsewhere now; semantic IDs inside the data set come along."""
        old, paths = Path(self.data.path), {"path": str(path)}
        if self.data.semantic_ids is not None and Path(self.data.semantic_ids).is_relative_to(old):
            paths["semantic_ids"] = str(Path(path) / Path(self.data.semantic_ids).relative_to(old))
        return self.model_copy(update={"data": self.data.model_copy(update=paths)})

    @property
    def windows(self) -> int:
        """Most windows of a training row that a step reads."""
        if self.training.windows is not None:
            return self.training.windows
        return 8 if self.data.samples is None else 1

    @property
    def num_servers(self) -> int:
        """Parameter servers that are started: none for a model without tables."""
        return self.sparse.num_servers if self.model.tables else 0

    @property
    def cpus_needed(self) -> float:
        pipeline = self.pipeline
        num_actors = pipeline.num_readers + pipeline.num_feature_workers + self.num_servers
        return num_actors * pipeline.cpus_per_actor + pipeline.num_trainers * pipeline.cpus_per_trainer

    def rate_schedule(self, total_steps: Callable[[], int | None]) -> RateSchedule:
        """The learning rate of each step.

        Args:
            total_steps: of the run; asked only where the rates depend on it.
        """
        schedule = self.training.schedule
        cosine_steps = total_steps() if schedule.decay == "cosine" else None
        return RateSchedule(schedule.warmup_steps, cosine_steps)

    def tables(self, schedule: RateSchedule) -> tuple[TableConfig, ...]:
        """The embedding tables that the model reads."""
        return tuple(self._table(name, dim, schedule) for name, dim in self.model.tables.items())

    def _table(self, name: str, dim: int, schedule: RateSchedule) -> TableConfig:
        everyone, own = self.sparse, self.sparse.tables.get(name, TableSettings())
        return TableConfig(
            name=name,
            dim=dim,
            weight_dtype=own.weight_dtype or everyone.weight_dtype,
            optimizer=own.optimizer or everyone.optimizer,
            init_scale=self.model.init_scales.get(name, everyone.init_scale)
            if own.init_scale is None
            else own.init_scale,
            admission=own.admission or everyone.admission,
            eviction=own.eviction or everyone.eviction,
            disk=own.disk,
            servers=own.servers,
            schedule=schedule,
            seed=1000 * self.seed + TABLE_SEEDS[name],
        )

    def why_rows_stay(self, wire: Wire) -> str | None:
        """Why rows of versions of the run cannot be rounded so; None where they can."""
        if wire == "float32":
            return None
        if not self.model.tables:
            return f"{self.model.name!r} has no tables here, all of its weights are dense; leave it out"
        for table in self.tables(RateSchedule()):
            if wire == "int8_row" and table.weight_dtype != "float32":
                return (
                    f"table {table.name!r} keeps weights of {table.weight_dtype}, which services would round "
                    "again; take 'bfloat16'"
                )
        return None

    @property
    def goes_by_event_times(self) -> bool:
        """Whether rows of a table live for some hours, by the newest event of each batch."""
        evictions = (table.eviction for table in self.tables(RateSchedule()))
        return any(eviction is not None and eviction.ttl_hours is not None for eviction in evictions)

    def dense_optimizer(self, schedule: RateSchedule, fused: bool) -> DenseOptimizerSettings:
        optimizer = self.training.optimizer
        return DenseOptimizerSettings(
            learning_rate=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            decayed=optimizer.decayed,
            schedule=schedule,
            max_grad_norm=optimizer.max_grad_norm,
            fused=fused,
        )
