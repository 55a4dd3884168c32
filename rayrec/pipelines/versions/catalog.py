"""The catalog of a version: items, users and histories of a data set, and the semantic IDs of its items.

It is that of the run, or a later one that has further items, which a model knows by codes that it has
learned, or by their words. Of words, the version says which items were there when the run was trained.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.snapshots import RunState
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.content_items import packed, unpacked
from rayrec.pipelines.tasks.features import registry_folder
from rayrec.pipelines.tasks.later_catalog import EarlierItems
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.versions.manifest import Bundle, EarlierCatalog, ModelVersion
from rayrec.pipelines.versions.store import BUNDLES, VersionStore
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.dataset_folder import HISTORIES
from rayrec.samples.dataset.manifest import HISTORY_FILE, ITEMS_FILE, USERS_FILE

_KEPT_FILES = (ITEMS_FILE, USERS_FILE, HISTORY_FILE)


@dataclass(frozen=True)
class CatalogBundles:
    """What a version's manifest says of its catalog."""

    catalog: Bundle
    semantic_ids: Bundle | None
    earlier: EarlierCatalog | None

    @classmethod
    def of(cls, version: ModelVersion) -> CatalogBundles:
        return cls(version.catalog, version.semantic_ids, version.earlier)


def put_catalog(store: VersionStore, task: NextItemTask) -> CatalogBundles:
    """Publish the data set and the semantic IDs of a task."""
    semantic_ids = None
    if task.registry is not None:
        files = sorted(path for path in registry_folder(task.config).iterdir() if path.is_file())
        semantic_ids = store.put("ids", files)
    earlier = None
    if task.earlier is not None:
        earlier = EarlierCatalog(
            dataset_fingerprint=task.earlier.dataset_fingerprint, known_items=packed(task.earlier.known_I)
        )
    return CatalogBundles(_put_dataset(store, task.dataset), semantic_ids, earlier)


def _put_dataset(store: VersionStore, dataset: Dataset) -> Bundle:
    with tempfile.TemporaryDirectory(prefix="rayrec-publish-") as folder:
        copy = Path(folder)
        held = [name for name in _KEPT_FILES if name in dataset.manifest.files]
        for name in held:
            shutil.copyfile(dataset.root / name, copy / name)
        dataset.manifest.model_copy(update={"held": tuple(held)}).write(copy)
        return store.put("catalogue", sorted(copy.iterdir()))


def num_items(store: VersionStore, version: ModelVersion) -> int | None:
    """Items of a version's catalog, by one small file; None where it cannot be read."""
    content = store.read(f"{BUNDLES}/{version.catalog.name}/{HISTORIES.manifest_file}")
    try:
        return None if content is None else int(json.loads(content)["counts"]["items"])
    except (ValueError, KeyError, TypeError):
        return None


def with_catalog_of(
    store: VersionStore,
    version: ModelVersion,
    config: RunConfig,
    columns: pa.Schema | None,
    state: RunState | None = None,
) -> Assembly:
    """Settings of a run, and the catalog of a version of it.

    Args:
        columns: of the training rows, where they are known.
        state: of the run that reads it; None: as the version has it.

    Raises:
        InputError: a file of the version is missing or damaged, or the catalog is none that the run's model
            knows the items of.
        OSError: the store does not answer.
    """
    changed = {"path": str(store.fetch(version.catalog))}
    if version.semantic_ids is not None:
        changed["semantic_ids"] = str(store.fetch(version.semantic_ids))
    config = config.model_copy(update={"data": config.data.model_copy(update=changed)})
    assembly = assemble(config.for_inference(), checksums=False, columns=columns)
    if version.earlier is None:
        return assembly
    where = f"{store.url}: version {version.number}"
    task = assembly.task
    if not isinstance(task, NextItemTask) or task.model.item_content is None:
        raise InputError(f"{where}: its catalog is later than its run, whose model reads no words of items")
    known_I = unpacked(version.earlier.known_items, len(task.dataset.items))
    earlier = EarlierItems(version.earlier.dataset_fingerprint, known_I)
    return replace(assembly, task=task.reading_items_since(earlier, state or version.run_state, where))
