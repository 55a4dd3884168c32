"""The dense part of a recommender: features and rows of a batch -> its best items.

Recommender ─ features, rows, seen items ─► ItemRanker ─► RankedItems
                                            ├─ a SequenceProgram, in the same process
                                            └─ `serve.services`: one of another process
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.program.frozen_base import BASE, FrozenBase
from rayrec.models.program.program import AllowedItems, RankedItems, Rows
from rayrec.models.program.torch_program import check_shapes
from rayrec.models.sequence.sequence_model import CacheMetrics
from rayrec.models.sequence.sequence_program import SequenceProgram, build_model
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import FeatureBatch


class ItemRanker(Protocol):
    """What a recommender asks of a network."""

    def recommend(
        self,
        features: FeatureBatch,
        rows: Rows,
        k: int,
        excluded_BE: Int64Array | None,
        beams_B: Sequence[Beams] | None = None,
        allowed: AllowedItems | None = None,
    ) -> RankedItems:
        """As `SequenceProgram.recommend`."""
        ...

    def num_beams(self, k: int, max_beams: int | None = None) -> int:
        """Beams of such a `recommend`; 0 where every item is scored."""
        ...


def item_ranker_of(model: TrainedModel) -> SequenceProgram:
    """The network with its weights; without the rows of the catalog, see `give_catalog`.

    Raises:
        InputError: the model ranks what is shown.
    """
    assembly = model.assembly
    config, task = assembly.config, assembly.task
    if not isinstance(task, NextItemTask):
        raise InputError(f"{model.run}: {config.model.name!r} scores what is shown, and names no items")
    program = SequenceProgram(
        build_model(task.model, task.catalog_known_to(model.state), config.seed),
        assembly.dense_optimizer(),
        get_device(config.device).torch,
        config.seed,
    )
    program.load(dict(model.weights), optimizer_state=None)
    return program


@dataclass(frozen=True)
class UnloadedRanker:
    """A network without its weights: only whether they fit, and what it can be asked, is known."""

    model: Any
    """Its weights are on the meta device, as far as the network can be built so."""

    @classmethod
    def of(cls, model: TrainedModel) -> UnloadedRanker:
        """The network of a model that was loaded without weights.

        Raises:
            InputError: the model ranks what is shown, or has weights of another network.
        """
        config, task = model.assembly.config, model.assembly.task
        if not isinstance(task, NextItemTask):
            raise InputError(f"{model.run}: {config.model.name!r} scores what is shown, and names no items")
        network = task.network(task.catalog_known_to(model.state))
        shapes = {name: saved.shape for name, saved in model.weights.items() if name != BASE}
        try:
            check_shapes(shapes, FrozenBase(network).without(dict(network.named_parameters())))
        except ValueError as error:
            raise InputError(f"{model.run}: {error}; its config was changed after training") from error
        return cls(network)

    def recommend(self, *asked: Any, **more: Any) -> RankedItems:
        raise AssertionError("it has no weights")

    def num_beams(self, k: int, max_beams: int | None = None) -> int:
        raise AssertionError("it answers nobody")


def use_prefix_cache(
    program: SequenceProgram | UnloadedRanker, model: TrainedModel, sizes: CacheSizes
) -> CacheMetrics:
    """Have the network keep what it reads of histories, at most so much of it.

    Raises:
        InputError: it reads them again each time, or reads rows of tables, which change beside it, or
            summaries before them.
    """
    name, task = model.assembly.config.model.name, model.assembly.task
    if isinstance(task, NextItemTask) and task.model.summarized is not None:
        raise InputError(
            f"{model.run}: {name!r} reads summaries of old events before the newest ones, and with each "
            "further chunk these begin elsewhere; leave out --prefix-cache-mib: what is old is kept as "
            "summaries (rayrec nearline)"
        )
    try:
        kept = program.model.use_prefix_cache(sizes)
    except OSError as error:
        raise InputError(
            f"prefix_cache_folder: contexts cannot be kept on disk ({error}); name a folder that can be "
            "written to, or leave out --prefix-cache-disk-mib"
        ) from error
    if kept is None or model.assembly.tables:
        why = "reads each history as a whole" if kept is None else "reads rows of tables, which change"
        raise InputError(
            f"{model.run}: {name!r} {why}, so nothing can be kept of it for users who return; leave out "
            "--prefix-cache-mib, or serve a prefix_decoder or causal_lm without tables"
        )
    return kept


def give_catalog(program: SequenceProgram, model: TrainedModel) -> None:
    """The rows of the catalog, to a network that needs them."""
    if (table := program.table_of_catalog) is not None:
        assert isinstance(model.assembly.task, NextItemTask), "the program is of it"
        item_ids_I = model.assembly.task.dataset.items.ids_I
        program.take_catalog(item_ids_I, lambda ids_M: model.tables.read({table: ids_M})[table])
