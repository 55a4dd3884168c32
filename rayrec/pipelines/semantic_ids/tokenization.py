"""`rayrec tokenize`: a prepared data set in, the semantic IDs of its items out.

tokenize           fit a tokenizer on the catalog; registry and tokenizer are written side by side
extend             a catalog that has grown: new items get codes of that tokenizer, others keep theirs
import_published   codes that others published
compare            registries of one catalog, measured alike
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import Field, field_validator, model_validator

from rayrec.models.decoding.trie_file import FEWEST_ITEMS, TRIE_FILE, TrieFile
from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.fit import VARIANCE, quantized_registry, reconstruction_errors
from rayrec.models.tokenizers.item_tokenizer import FILES as TOKENIZER_FILES
from rayrec.models.tokenizers.item_tokenizer import LETTER, TOKENIZERS, ItemTokenizer
from rayrec.models.tokenizers.letter import LetterSettings
from rayrec.models.tokenizers.out_of_core.catalog import TokenizerSettings
from rayrec.models.tokenizers.published import published_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.report import prefix_purity
from rayrec.models.tokenizers.vector_report import NextPairs, prefixes_in_common, vectors_compared
from rayrec.models.tokenizers.vector_sources import (
    CONTENT,
    GRAPH,
    INTERACTIONS,
    ITEM_VECTORS,
    OF_RAYREC,
    TEXT,
    ItemData,
    Progress,
    dataset_of_vectors,
    vector_source,
)
from rayrec.pipelines.semantic_ids.large_catalog import CatalogSizes, StageProgress, Tokenized, tokenize_large
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.pipelines.tasks.later_catalog import check_same_items
from rayrec.platform.arrays import Float32Array, Float64Array, Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.item_bags import ItemBags
from rayrec.platform.tasks import RunTasks, run_tasks_locally
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.item_content import item_content
from rayrec.samples.dataset.item_labels import item_labels
from rayrec.samples.dataset.manifest import ITEMS_FILE, Manifest
from rayrec.samples.graph import SimilarityConfig, graph_of_dataset, similar_items

logger = logging.getLogger(__name__)

BOTH = "both"
"""In `vectors`, for interactions and texts."""


class TokenizeConfig(Config):
    """How items get their codes."""

    vectors: str = INTERACTIONS
    """What the codes are made of: `interactions` (co-occurrence in training sequences), `text` (the items'
    texts; needs the extra `text`), `both` (these two), `content` (words and attributes that items have in
    common), `graph` (similarity by Swing), `image` (pictures, by a vision model; needs the extra `image` and
    `vector_settings`), or a source that another package brings. Several side by side:
    joined by `+` or commas, for example `interactions+my_source`."""
    vector_files: dict[str, str] = Field(default_factory=dict)
    """By name in `vectors`, an array (`.npy`) of vectors that were computed elsewhere, such as of images; the
    items' keys are beside it, one a line, in a file of the same name that ends in `.txt`."""
    vector_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the source `image`, or of one that another package brings."""
    text_weight: float = Field(1.0, gt=0)
    """Length of a text vector beside other vectors of length 1."""
    components: int = Field(64, ge=1)
    """Principal components of these vectors that are clustered; k-means fails in many more."""
    tokenizer: str = "rq_kmeans"
    """What makes codes of vectors: `rq_kmeans` (residual k-means), `balanced_rq_kmeans` (the same with
    clusters of nearly equal size), `rq_vae` (a residual quantized autoencoder), `letter` (the same, drawn
    towards vectors of interactions: give it others to encode, such as `text`), `opq` (optimized product
    quantization, whose levels do not refine one another), or one that another package brings."""
    num_levels: int = Field(3, ge=1, le=8)
    codebook_size: int | None = Field(None, ge=2, le=32_768)
    """Values a code may have; None takes `max_codebook_size`, or fewer where too few distinct items would
    fill them."""
    max_codebook_size: int = Field(256, ge=2, le=32_768)
    """Most values that a code gets where `codebook_size` is None."""
    iterations: int | None = Field(None, ge=1)
    """Rounds over the vectors (of `rq_vae` and `letter`, epochs); None takes what suits the tokenizer."""
    collisions: Literal["extra_digit", "reassign", "share"] = "extra_digit"
    """Items with the same codes: number them with one more digit, move some to the nearest free tuple, or let
    them share the tuple and its probability."""
    dim: int = Field(64, ge=1)
    """Width of the interaction vectors."""
    window: int = Field(5, ge=1)
    """Events of a user this many places apart or fewer count as neighbors."""
    seed: int = Field(0, ge=0)
    large_catalog: int = Field(500_000, ge=1)
    """Items from which on a catalog is tokenized in tasks with files between them, so that no process holds
    it, and the tokenizer learns a sample of it."""
    fit_items: int = Field(262_144, ge=1)
    """Items of a large catalog that the tokenizer learns, more where codes would have too few of them."""
    categories: str | None = None
    """Column of the items by which the report measures prefixes; None takes one that is called so."""

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_known(cls, value: str) -> str:
        _check_known("tokenizer", value, TOKENIZERS.names())
        return value

    @model_validator(mode="after")
    def _sources_are_known(self) -> Self:
        for name in self.sources:
            if name not in self.vector_files:
                known = (*ITEM_VECTORS.names(), BOTH)
                _check_known("vectors", name, known, " or a name of vector_files")
        if unused := sorted(set(self.vector_files) - set(self.sources)):
            raise ValueError(
                f"vector_files has one of {unused[0]!r}, and vectors is {self.vectors!r}: name it there, too"
            )
        if self.vector_settings and len(self._others) != 1:
            raise ValueError(
                f"vector_settings are set, and vectors is {self.vectors!r}: they are of the source 'image' "
                "or one that another package brings, and of one"
            )
        if self.tokenizer == LETTER and self.sources == (INTERACTIONS,):
            raise ValueError(
                f"tokenizer {LETTER!r} draws other vectors towards those of interactions, and vectors is "
                f"{self.vectors!r}: name others, such as 'text' or 'content'"
            )
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources of item vectors, each once."""
        named = self.vectors.replace(",", "+").split("+")
        each = (name for one in named for name in ((INTERACTIONS, TEXT) if one == BOTH else (one,)))
        return tuple(dict.fromkeys(each))

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(name for name in self.sources if name not in (*OF_RAYREC, *self.vector_files))

    def settings_of(self, source: str) -> dict[str, Any]:
        """Settings of a source, as its class takes them."""
        if source in self.vector_files:
            return {"file": str(Path(self.vector_files[source]).resolve())}
        if source == INTERACTIONS:
            return {"dim": self.dim, "window": self.window, "seed": self.seed}
        if source in (GRAPH, CONTENT):
            return {"dim": self.dim, "seed": self.seed}
        return dict(self.vector_settings) if source in self._others else {}

    def settings_of_others(self) -> dict[str, dict[str, Any]]:
        """By source of another package or file, the settings that new items will need, too."""
        others = self._others if self.vector_settings else ()
        return {
            name: self.settings_of(name) for name in self.sources if name in (*others, *self.vector_files)
        }


def _check_known(setting: str, name: str, known: Sequence[str], more: str = "") -> None:
    if name not in known:
        raise ValueError(f"{setting}: expected one of {', '.join(map(repr, known))}{more}, got {name!r}")


@dataclass(frozen=True)
class TokenizeReport:
    """What the codes look like."""

    path: Path
    num_without_data: int
    """Items about which nothing was known; their codes are arbitrary."""
    report: dict[str, Any]
    """`SemanticIdRegistry.report()`; `purity` where items have categories; `next_items` where users have
    events for validation; and `vectors` where codes were made of some."""
    of_other_data: tuple[str, ...] = ()
    """Vectors that `rayrec export` wrote of a model of another data set, which may have learned what this one
    keeps for validation and test."""


def tokenize(
    data: str | Path,
    out: str | Path | None = None,
    config: TokenizeConfig | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    large: LargeCatalog | None = None,
) -> TokenizeReport:
    """Fit a tokenizer on the items of a data set; write it, and their registry.

    Args:
        out: folder of the registry; `semantic_ids` inside the data set if None.
        overwrite: whether other IDs of this data set that lie there may go.
        large: how a catalog of `large_catalog` items or more is tokenized; None: by this process.

    Raises:
        InputError: no such data set, vectors that cannot be made or clustered, or other IDs lie there.
    """
    config = config or TokenizeConfig()
    dataset = Dataset.open(data)
    if dataset.manifest.files[ITEMS_FILE].rows >= config.large_catalog:
        return _tokenize_large(dataset, _folder(data, out), config, overwrite, large or LargeCatalog())
    ids_I = dataset.items.ids_I
    items = _item_data(dataset)
    fitted = {
        name: vector_source(name, config.settings_of(name)).fit(items, progress) for name in config.sources
    }
    blocks = {name: each.vectors_ID for name, each in fitted.items()}
    weights = _weights(config)
    try:
        tokenizer = ItemTokenizer.fit(
            config.tokenizer,
            blocks,
            ids_I,
            config.num_levels,
            config.codebook_size,
            config.seed,
            config.iterations,
            weights,
            config.components,
            config.max_codebook_size,
            config.settings_of_others(),
            _interactions(config, items, progress),
            {name: each.learned for name, each in fitted.items() if each.learned},
        )
        vectors = tokenizer.vectors(blocks, ids_I)
        registry = quantized_registry(
            tokenizer.quantizer,
            torch.from_numpy(vectors.vectors_ID),
            ids_I,
            dataset.fingerprint,
            config.collisions,
            vectors_from=f"{vectors.vectors_ID.shape[1]} components of {config.vectors}",
            popularity_I=dataset.items.train_counts_I,
            tokenizer_version=tokenizer.version,
        )
    except ValueError as error:
        raise InputError(f"{data}: {error} (--vectors, --codebook-size, --levels)") from error
    path = _folder(data, out)
    _check_target(path, registry, overwrite)
    # The registry last: it names the tokenizer beside it.
    tokenizer.save(path)
    registry.save(path)
    _warn_if_alike(registry, config.vectors)
    report = _measured(registry, dataset, config.categories)
    if (pairs := _next_pairs(dataset)) is not None:
        together = {config.vectors: vectors.vectors_ID} if len(blocks) > 1 else {}
        report["vectors"] = vectors_compared(blocks, pairs, together)
    return TokenizeReport(path, vectors.num_without_data, report, _of_other_data(config, dataset))


@dataclass(frozen=True)
class LargeCatalog:
    """How a large catalog is tokenized; nothing here changes the result."""

    run_tasks: RunTasks = run_tasks_locally
    """Where tasks run."""
    progress: StageProgress = lambda stage, done, total: None
    resume: bool = False
    """Go on with what an interrupted tokenization has done, if there is one."""
    spill: Path | None = None
    """Folder for the files between the passes, which all nodes have to see; None: beside the registry."""
    sizes: CatalogSizes = dataclasses.field(default_factory=CatalogSizes)


def catalog_size(data: str | Path) -> int:
    """Items of a data set, by its manifest alone.

    Raises:
        InputError: no such data set.
    """
    return Manifest.read(Path(data)).files[ITEMS_FILE].rows


def check_in_parts(data: str | Path, config: TokenizeConfig) -> None:
    """Refuse what cannot be tokenized in parts.

    Raises:
        InputError: the tokenizer reads all items at once.
    """
    if config.tokenizer == LETTER:
        raise InputError(
            f"{data}: tokenizer {LETTER!r} reads the interactions of all items at once, and catalogs of "
            f"{config.large_catalog:,} items and more are tokenized in parts; raise --large-catalog, or "
            "take rq_vae"
        )


def _interactions(config: TokenizeConfig, items: ItemData, progress: Progress | None) -> Float32Array | None:
    """[I, Z] vectors that the tokenizer draws its codes towards; None for one that does not."""
    if config.tokenizer != LETTER:
        return None
    settings = {"dim": LetterSettings.latent_dim, "window": config.window, "seed": config.seed}
    vectors_IZ = vector_source(INTERACTIONS, settings).vectors(items, progress)
    missing = LetterSettings.latent_dim - vectors_IZ.shape[1]  # few items have few components
    return np.pad(vectors_IZ, ((0, 0), (0, missing)))


def _tokenize_large(
    dataset: Dataset, path: Path, config: TokenizeConfig, overwrite: bool, large: LargeCatalog
) -> TokenizeReport:
    check_in_parts(dataset.root, config)
    _check_free(path, dataset.fingerprint, overwrite)
    settings = TokenizerSettings(
        name=config.tokenizer,
        num_levels=config.num_levels,
        codebook_size=config.codebook_size,
        max_codebook_size=config.max_codebook_size,
        num_iterations=config.iterations,
        seed=config.seed,
        weights=_weights(config),
        num_components=config.components,
        fit_items=config.fit_items,
        collision_policy=config.collisions,
        vectors_from=config.vectors,
        vector_settings=config.settings_of_others(),
    )

    def keep(tokenized: Tokenized) -> None:
        tokenized.tokenizer.save(path)
        tokenized.registry.save(path)

    _, registry, num_without_data = tokenize_large(
        dataset,
        path,
        settings,
        {name: config.settings_of(name) for name in config.sources},
        large.run_tasks,
        large.progress,
        large.resume,
        large.spill,
        large.sizes,
        keep,
    )
    _warn_if_alike(registry, config.vectors)
    if registry.num_items >= FEWEST_ITEMS:
        TrieFile(path / TRIE_FILE, registry.version).trie(registry.codes_IL)
    measured = _measured(registry, dataset, config.categories, _MOST_USERS)
    return TokenizeReport(path, num_without_data, measured, _of_other_data(config, dataset))


_MOST_USERS = 200_000
"""Whose next items tell what codes of a large catalog are like."""


MANY_ALIKE = 0.5
"""Share of the items whose codes, before collisions are dealt with, are those of another item."""


def _warn_if_alike(registry: SemanticIdRegistry, vectors: str) -> None:
    """Say of IDs that tell few items apart: what comes after the codes lists items, and means nothing."""
    counts = registry.fit_report["collisions"]
    share = counts["items"] / registry.num_items
    if share > MANY_ALIKE:
        logger.warning(
            "%s of %s items (%.0f %%) share all their codes with another item, up to %s in one place: "
            "their vectors of %s hardly differ, or codes are few; tokenize again (--overwrite), with further "
            "vectors (--vectors) or, where vectors differ, with more codes (--codebook-size, --levels)",
            f"{counts['items']:,}",
            f"{registry.num_items:,}",
            100 * share,
            f"{counts['largest_group']:,}",
            vectors,
        )


def _of_other_data(config: TokenizeConfig, dataset: Dataset) -> tuple[str, ...]:
    fingerprints = {name: dataset_of_vectors(Path(file)) for name, file in config.vector_files.items()}
    return tuple(name for name, one in fingerprints.items() if one not in (None, dataset.fingerprint))


def _weights(config: TokenizeConfig) -> dict[str, float]:
    return {name: config.text_weight if name == TEXT else 1.0 for name in config.sources}


def extend(
    data: str | Path,
    semantic_ids: str | Path,
    out: str | Path | None = None,
    progress: Progress | None = None,
    categories: str | None = None,
    overwrite: bool = False,
    vector_files: Mapping[str, str] | None = None,
) -> TokenizeReport:
    """Give codes to the items that a data set has and a registry lacks, with the tokenizer fitted for that
    one.

    New items get vectors from the sources that need nothing but the item, such as their texts. Their
    interaction vectors are not known: they get the mean of those that were fitted, and if there is nothing
    else, their codes are arbitrary.

    Args:
        data: a data set whose catalog has all items of the registry.
        semantic_ids: folder of the registry, with its tokenizer.
        out: folder of the new registry; `semantic_ids` inside the data set if None.
        overwrite: as of `tokenize`.
        vector_files: by source, where vectors of the new items are; None: where those of the others were.

    Returns:
        `num_without_data` counts new items only.

    Raises:
        InputError: something is missing or does not belong together, an item of the registry is not in the
            data set or is called something else there, there is no room for a new one, or a file of vectors
            is of a source that the tokenizer does not have.
    """
    dataset, path = Dataset.open(data), _folder(data, out)
    if path.resolve() == Path(semantic_ids).resolve():
        raise InputError(
            f"{path}: is the registry to be extended, which models may depend on; "
            "name another folder with --out"
        )
    registry = SemanticIdRegistry.load(semantic_ids)
    _check_same_items(registry, Path(semantic_ids), dataset)
    tokenizer = _tokenizer_of(registry, Path(semantic_ids))
    known = tokenizer.preparation.blocks
    # An unused file would leave the new items without data, and their codes arbitrary.
    if unused := sorted(set(vector_files or {}) - set(known)):
        raise InputError(
            f"{semantic_ids}: vector_files (--vector-file) has one of {unused[0]!r}, and these semantic IDs "
            f"are made of {', '.join(map(repr, known))}; name one of these"
        )
    ids_I = dataset.items.ids_I
    new_N = np.flatnonzero(~np.isin(ids_I, registry.item_ids_I))
    blocks, new_items = {}, _item_data(dataset, new_N)
    for name in known if len(new_N) else ():
        settings = tokenizer.vector_settings.get(name, {})
        if name in (vector_files or {}):
            settings = {"file": (vector_files or {})[name]}
        learned = tokenizer.learned.get(name, {})
        found = vector_source(name, settings).of_others(new_items, learned, progress)
        if found is not None:
            blocks[name] = found
    try:
        vectors = tokenizer.vectors(blocks, ids_I[new_N])
        vectors_ND = torch.from_numpy(vectors.vectors_ID)
        new = NewItems(ids_I[new_N], vectors_ND, vectors.num_without_data)
        extended = extend_registry(registry, tokenizer.quantizer, new, ids_I, dataset.fingerprint)
    except ValueError as error:
        raise InputError(f"{data}: {error}") from error
    _check_target(path, extended, overwrite)
    tokenizer.save(path)
    extended.save(path)
    report = _measured(extended, dataset, categories)
    if len(new_N):
        codes_NL, variance = tokenizer.quantizer.encode(vectors_ND), registry.fit_report.get(VARIANCE)
        report["new_items_reconstruction_error"] = reconstruction_errors(
            vectors_ND, codes_NL, tokenizer.quantizer, variance
        )
    return TokenizeReport(path, vectors.num_without_data, report)


def import_published(
    data: str | Path,
    file: str | Path,
    out: str | Path | None = None,
    collisions: str = "extra_digit",
    key_offset: int = 0,
    codebook_size: int | None = None,
    categories: str | None = None,
    overwrite: bool = False,
) -> TokenizeReport:
    """Write a registry of codes that others published.

    Arguments as those of `rayrec.models.tokenizers.published.published_registry`, and `overwrite` as of
    `tokenize`.

    Raises:
        InputError: no such data set, or a file that is no such codes of its items.
    """
    dataset = Dataset.open(data)
    registry = published_registry(
        file,
        dataset.items.keys.to_pylist(),
        dataset.items.ids_I,
        dataset.fingerprint,
        collisions,
        key_offset,
        codebook_size,
        dataset.items.train_counts_I,
    )
    path = _folder(data, out)
    _check_target(path, registry, overwrite)
    registry.save(path)
    TOKENIZER_FILES.remove(path)  # one that may lie there made other codes
    return TokenizeReport(path, 0, _measured(registry, dataset, categories))


def compare(
    data: str | Path, folders: Sequence[str | Path], categories: str | None = None
) -> list[TokenizeReport]:
    """Measure registries of one catalog; nothing is written.

    Raises:
        InputError: no such data set or registry, or one of other items.
    """
    dataset = Dataset.open(data)
    reports = []
    for folder in folders:
        registry = SemanticIdRegistry.load(folder)
        if not np.array_equal(registry.item_ids_I, dataset.items.ids_I):
            raise InputError(
                f"{folder}: the registry has other items than {data}; compare those of one data set"
            )
        reports.append(TokenizeReport(Path(folder), 0, _measured(registry, dataset, categories)))
    return reports


def _item_data(dataset: Dataset, new_N: Int64Array | None = None) -> ItemData:
    """What tokenizers and item vectors may read of the items.

    Args:
        new_N: catalog positions of items that were added after the tokenizer was fitted; None: all items.
    """

    def sequences() -> tuple[Int64Array, Int64Array]:
        tables = [pq.read_table(dataset.root / name, columns=["item_ids"]) for name in dataset.train_files]
        item_ids_N, offsets_B1 = list_values(pa.concat_tables(tables)["item_ids"])
        return dataset.item_positions(item_ids_N), offsets_B1

    def content(counted_ids: Int64Array) -> ItemBags:
        counted_I = np.isin(dataset.items.ids_I, counted_ids)
        bags = item_content(dataset, None, _DISTINCT, min_items=2, fitted_I=counted_I)
        return bags if new_N is None else bags.some(new_N)

    items = dataset.items
    chosen = np.arange(len(items)) if new_N is None else new_N
    known = ItemData(
        str(dataset.root),
        items.keys.take(pa.array(chosen)).to_pylist(),
        items.texts.take(pa.array(chosen)).to_pylist(),
        None,
        content=content,
        ids_I=items.ids_I[chosen],
    )
    if new_N is not None:
        return known
    return dataclasses.replace(
        known,
        sequences=sequences,
        similar_items=lambda: _similar(dataset),
        trained_I=items.train_counts_I > 0,
    )


_DISTINCT = 1 << 48
"""Buckets of words, so many that hardly two share one: here they cost nothing."""


def _similar(dataset: Dataset) -> tuple[Int64Array, Float64Array]:
    """The most similar items of each by Swing, by catalog position."""
    ids_I = dataset.items.ids_I
    table = similar_items(graph_of_dataset(dataset), ids_I, SimilarityConfig("swing"))
    place_I = np.searchsorted(table.item_ids_I, ids_I)
    ids_IK, scores_IK = table.ids_IK[place_I], table.scores_IK[place_I]
    is_there_IK = scores_IK > -np.inf
    return np.where(is_there_IK, dataset.item_positions(ids_IK), -1), np.where(is_there_IK, scores_IK, 0.0)


def _measured(
    registry: SemanticIdRegistry, dataset: Dataset, categories: str | None, max_users: int | None = None
) -> dict[str, Any]:
    report = registry.report()
    labels = item_labels(dataset, categories)
    if labels is not None:
        codes_IC = registry.codes_IL[:, : registry.num_codebooks]
        purity = prefix_purity(codes_IC, labels.items_P, labels.labels_P)
        report["purity"] = {"column": labels.column, "levels": purity}
    if (pairs := _next_pairs(dataset, max_users)) is not None:
        levels = prefixes_in_common(registry.codes_IL[:, : registry.num_codebooks], pairs)
        report["next_items"] = {"pairs": len(pairs.from_P), "levels": levels}
    return report


def _next_pairs(dataset: Dataset, max_users: int | None = None) -> NextPairs | None:
    """The newest event of each history that is validated, and what came next; None where there is nothing.

    Users are in the order of a hash of their ids.
    """
    rows = dataset.evaluation_rows("valid", max_rows=max_users)
    has_events_B = np.diff(rows.offsets_B1) > 0
    newest_B = rows.history_ids_N[rows.offsets_B1[1:][has_events_B] - 1]
    from_P, to_P = (dataset.item_positions(ids) for ids in (newest_B, rows.targets_B[has_events_B]))
    kept_P = (from_P >= 0) & (to_P >= 0) & (from_P != to_P)
    return NextPairs(from_P[kept_P], to_P[kept_P]) if kept_P.any() else None


def _tokenizer_of(registry: SemanticIdRegistry, folder: Path) -> ItemTokenizer:
    if registry.tokenizer_version is None:
        raise InputError(
            f"{folder}: this registry has no tokenizer that could give codes to new items: it was published "
            "by others or made before tokenizers were kept; make new ones with: rayrec tokenize DATA"
        )
    tokenizer = ItemTokenizer.load(folder)
    if tokenizer.version != registry.tokenizer_version:
        raise InputError(
            f"{folder}: the tokenizer there has version {tokenizer.version}, but the codes were made by "
            f"{registry.tokenizer_version}; put the files of one tokenizer together"
        )
    return tokenizer


def _check_same_items(registry: SemanticIdRegistry, folder: Path, dataset: Dataset) -> None:
    """Refuse a data set whose ids mean other items, where a registry lies in the one that it was made of."""
    try:
        earlier = Dataset.open(folder.resolve().parent, checksums=False)
    except InputError:
        return
    if earlier.fingerprint == registry.dataset_fingerprint:
        way_out = "make IDs of its own (rayrec tokenize without --extend)"
        check_same_items(earlier, dataset, str(folder), way_out)


def _check_target(path: Path, registry: SemanticIdRegistry, overwrite: bool) -> None:
    """Runs depend on the IDs that they were trained with, to the version."""
    _check_free(path, registry.dataset_fingerprint, overwrite, registry.version)


def _check_free(path: Path, dataset_fingerprint: str, overwrite: bool, version: str | None = None) -> None:
    """As `_check_target`, before the version is known."""
    if overwrite or not path.is_dir():
        return
    try:
        there = SemanticIdRegistry.load(path)
    except InputError:  # none, or one that nobody can use
        return
    if there.dataset_fingerprint == dataset_fingerprint and there.version != version:
        raise InputError(
            f"{path}: has other semantic IDs of this data set already ({there.method}; version "
            f"{there.version}), and runs that were trained with them need them; name another folder "
            "with --out (and with data.semantic_ids of a run), or set overwrite (--overwrite)"
        )


def _folder(data: str | Path, out: str | Path | None) -> Path:
    return Path(out) if out is not None else Path(data) / SEMANTIC_IDS_FOLDER
