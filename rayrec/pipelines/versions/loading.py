"""A published version -> a model, with as much as possible of the one that is held already."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rayrec.embeddings.snapshot.layered_tables import LayeredTables, reading_config
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.loading import TrainedModel, weights_in
from rayrec.pipelines.runs.run_folder import COLUMNS_FILE, read_columns
from rayrec.pipelines.runs.snapshots import WEIGHTS
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.versions.catalog import CatalogBundles, with_catalog_of
from rayrec.pipelines.versions.gate import check_weights
from rayrec.pipelines.versions.manifest import SETTINGS, ModelVersion
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.samples.operations.python_function import PythonConfig

ALLOWED_FUNCTIONS = "RAYREC_ALLOWED_FUNCTIONS"
"""Environment variable of a host that serves versions: modules, or functions as `module:name`, with commas,
that an `op: python` of a published version may call."""


@dataclass(frozen=True)
class LoadedVersion:
    """A version in memory."""

    manifest: ModelVersion
    model: TrainedModel
    tables: LayeredTables


def load_version(
    store: VersionStore,
    manifest: ModelVersion,
    device: str | None = None,
    held: LoadedVersion | None = None,
    with_rows: bool = True,
    with_weights: bool = True,
) -> LoadedVersion:
    """Load a published version as a recommender.

    Args:
        device: overrides the device that the run was trained on.
        held: a version, loaded with rows or without like this one, that shares what it can with it. It stays
            as it is.
        with_rows: False leaves the tables empty, for who reads none of them.
        with_weights: False takes their shapes alone, whose values nobody checks.

    Raises:
        InputError: a file of the version is missing or damaged, what it holds does not fit together, or its
            weights are not finite.
        OSError: the store does not answer.
    """
    assembly = assembly_of(store, manifest, device, held)
    return load_on(store, manifest, assembly, held, with_rows, with_weights)


def load_on(
    store: VersionStore,
    manifest: ModelVersion,
    assembly: Assembly,
    held: LoadedVersion | None = None,
    with_rows: bool = True,
    with_weights: bool = True,
) -> LoadedVersion:
    """Load weights and rows of a published version.

    Args:
        assembly: settings and catalog that they are read with.
        others: as of `load_version`.

    Raises: as `load_version`.
    """
    where = f"{store.url}: version {manifest.number}"
    assembly.task.check_state(manifest.run_state, where)
    tables = _tables(store, manifest, assembly, held) if with_rows else LayeredTables({}, None)
    weights = weights_in(store.fetch(manifest.weights) / WEIGHTS, with_weights)
    if with_weights:
        check_weights(weights, where)
    model = TrainedModel(manifest.run, assembly, manifest.run_state, weights, tables, manifest.number)
    return LoadedVersion(manifest, model, tables)


def assembly_of(
    store: VersionStore,
    manifest: ModelVersion,
    device: str | None = None,
    held: LoadedVersion | None = None,
) -> Assembly:
    """Settings, catalog and semantic IDs of a version.

    Args: as `load_version`.

    Raises: as `load_version`.
    """
    if held is not None:
        same_settings = held.manifest.definition == manifest.definition
        if same_settings and CatalogBundles.of(held.manifest) == CatalogBundles.of(manifest):
            return held.model.assembly
    definition = store.fetch(manifest.definition)
    config = RunConfig.load(definition / SETTINGS)
    _check_functions(config, f"{store.url}: version {manifest.number}")
    if device is not None:
        config = config.model_copy(update={"device": device})
    return with_catalog_of(store, manifest, config, read_columns(definition / COLUMNS_FILE))


def _check_functions(config: RunConfig, where: str) -> None:
    """A store says which functions its settings call, and this host which of them it runs.

    Raises:
        InputError: one is not allowed; names it.
    """
    allowed = {name.strip() for name in os.environ.get(ALLOWED_FUNCTIONS, "").split(",")}
    for operation in config.data.features:
        if isinstance(operation, PythonConfig):
            module = operation.function.partition(":")[0]
            if not allowed & {operation.function, module}:
                raise InputError(
                    f"{where}: its settings call the function {operation.function!r}, but "
                    "the writers of a store must not choose what runs here; set "
                    f"{ALLOWED_FUNCTIONS}={module} on this machine to allow it"
                )


def _tables(
    store: VersionStore, manifest: ModelVersion, assembly: Assembly, held: LoadedVersion | None
) -> LayeredTables:
    num_servers = assembly.config.sparse.num_servers
    # One process has the rows of all servers, so where rows are on disk it needs the memory of all of them.
    configs = [
        reading_config(table).model_copy(update={"disk": table.disk and table.disk.times(num_servers)})
        for table in assembly.tables
    ]
    segments = manifest.segments
    if not segments:
        return LayeredTables({}, None)
    tables, num_done = None, 0
    if held is not None and held.manifest.segments == segments[: len(held.manifest.segments)]:
        tables, num_done = held.tables, len(held.manifest.segments)
    for segment in segments[num_done:]:
        folder = store.fetch(segment.bundle)
        paths = [folder / file.name for file in segment.bundle.files]
        if tables is None or segment.since is None:
            tables = LayeredTables.load(configs, paths, segment.step)
        else:
            tables = tables.changed_by(configs, paths, segment.step)
    assert tables is not None
    return tables
