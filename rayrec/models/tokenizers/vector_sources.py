"""Where item vectors come from, by name: what `rayrec tokenize --vectors` chooses from.

Another package adds a source by an entry point of the group `rayrec.item_vectors`; see
docs/guides/add-item-vectors.md.

Axes: I items in catalog order, D dimensions of a vector, N events of all training sequences one after the
other, B sequences.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rayrec.models.tokenizers.item_vectors import (
    ContentDirections,
    content_vectors,
    interaction_vectors,
    similarity_vectors,
    text_vectors,
)
from rayrec.platform.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_json
from rayrec.platform.item_bags import ItemBags
from rayrec.platform.registry import Registry

INTERACTIONS, TEXT, GRAPH, CONTENT = "interactions", "text", "graph", "content"
OF_RAYREC = (INTERACTIONS, TEXT, GRAPH, CONTENT)
ORIGIN_FILE = "rayrec.json"
"""Beside vectors that `rayrec export` wrote: where they come from."""

Progress = Callable[[int, int], None]
"""Called with (items done, items in all)."""


@dataclass(frozen=True)
class ItemData:
    """What a source may know about the items."""

    dataset: str
    """The data set's folder, for messages."""
    keys: Sequence[str]
    """[I] ids as the source of the data writes them."""
    texts: Sequence[str | None]
    """[I] titles, descriptions and other texts, joined; None where an item has none."""
    sequences: Callable[[], tuple[Int64Array, Int64Array]] | None
    """Reads the training sequences: ([N] catalog positions, oldest first, [B + 1] offsets). None where the
    items are new to a catalog that was tokenized before."""
    similar_items: Callable[[], tuple[Int64Array, Float64Array]] | None = None
    """Finds the most similar items of each in the graph of training events: ([I, K] catalog positions, -1
    after the last; [I, K] similarities). None where `sequences` is."""
    content: Callable[[Int64Array], ItemBags] | None = None
    """Reads words and values of the items, as weighted numbers, counted in items of these ids, which may be
    others."""
    ids_I: Int64Array | None = None
    """Of the items, as `content` takes them; None where it is not given."""
    trained_I: BoolArray | None = None
    """The items with a training event; the others have no say in what is learned of all. None: all have one,
    or the items are new."""


class FittedVectors(NamedTuple):
    """Vectors of a catalog, and what those of items that come later depend on."""

    vectors_ID: Float32Array
    learned: Mapping[str, NDArray[Any]] = {}
    """Arrays by name, without dots, which are kept with the tokenizer."""


class ItemVectorSource(Config):
    """A source of item vectors; fields are its settings."""

    of_new_items: ClassVar[bool] = True
    """Whether an item's vector depends on that item alone, so that items that come later have one, too."""

    @abstractmethod
    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        """[I, D] vectors, with a row of NaN for an item that the source knows nothing about.

        Raises:
            InputError: vectors cannot be made from this data; says what to do.
        """

    def fit(self, items: ItemData, progress: Progress | None = None) -> FittedVectors:
        """The same, with what was learned of these items that vectors of others depend on."""
        return FittedVectors(self.vectors(items, progress))

    def of_others(
        self, items: ItemData, learned: Mapping[str, NDArray[Any]], progress: Progress | None = None
    ) -> Float32Array | None:
        """[I, D] vectors of items that came later; None where nothing can be known of them.

        Args:
            learned: what `fit` has returned, when the tokenizer was fitted.
        """
        return self.vectors(items, progress) if self.of_new_items else None


class InteractionVectors(ItemVectorSource):
    """Items that occur close together in training sequences get similar vectors."""

    of_new_items: ClassVar[bool] = False

    dim: int = Field(64, ge=1)
    window: int = Field(5, ge=1)
    """Events of a user at most this many positions apart count as neighbors."""
    seed: int = Field(0, ge=0)

    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        assert items.sequences is not None, "new items are in no sequence"
        positions_N, offsets_B1 = items.sequences()
        try:
            return interaction_vectors(
                positions_N, offsets_B1, len(items.keys), self.dim, self.window, seed=self.seed
            )
        except ValueError as error:
            raise InputError(f"{items.dataset}: {error}; use --vectors text") from error


class GraphVectors(ItemVectorSource):
    """Items that resemble each other in the graph of users and items (Swing) get similar vectors."""

    of_new_items: ClassVar[bool] = False

    dim: int = Field(64, ge=1)
    seed: int = Field(0, ge=0)

    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        assert items.similar_items is not None, "new items have no edges"
        items_IK, scores_IK = items.similar_items()
        try:
            return similarity_vectors(items_IK, scores_IK, self.dim, seed=self.seed)
        except ValueError as error:
            raise InputError(f"{items.dataset}: {error}; use --vectors text") from error


class TextVectors(ItemVectorSource):
    """Sentence embeddings of the items' texts."""

    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        if items.sequences is not None and not any(items.texts):
            raise InputError(
                f"{items.dataset}: its items have no text; use --vectors interactions, "
                "or prepare the data with an items file that has titles or descriptions"
            )
        return text_vectors(items.texts, progress)


class ContentVectors(ItemVectorSource):
    """Items whose texts have words in common, or that have the same attributes, get similar vectors: latent
    semantic analysis (Deerwester et al., JASIS 1990), which needs no language model. It is fitted on the
    items that have training events; others, of the same catalog and of later ones, are projected."""

    of_new_items: ClassVar[bool] = False

    dim: int = Field(64, ge=1)
    seed: int = Field(0, ge=0)

    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        return self.fit(items, progress).vectors_ID

    def fit(self, items: ItemData, progress: Progress | None = None) -> FittedVectors:
        assert items.content is not None, "new items are `of_others`"
        assert items.ids_I is not None, "given with it"
        counted_J = items.ids_I if items.trained_I is None else items.ids_I[items.trained_I]
        try:
            vectors_ID, directions = content_vectors(
                items.content(counted_J), self.dim, self.seed, items.trained_I
            )
        except ValueError as error:
            raise InputError(f"{items.dataset}: {error}; use --vectors interactions") from error
        return FittedVectors(vectors_ID, {"counted_J": counted_J, **directions._asdict()})

    def of_others(
        self, items: ItemData, learned: Mapping[str, NDArray[Any]], progress: Progress | None = None
    ) -> Float32Array | None:
        """Projected as in `fit`: words are counted in the items that were there then."""
        if not learned:  # an earlier version fitted it
            return None
        assert items.content is not None, "of the data set that has both"
        directions = ContentDirections(*(learned[name] for name in ContentDirections._fields))
        return directions.vectors(items.content(learned["counted_J"]))


class FileVectors(ItemVectorSource):
    """Vectors that were computed elsewhere, of images say: an array, and beside it the items' keys, one a
    line, in a file of the same name that ends in `.txt`."""

    file: str
    """`.npy`, [N, D] numbers; a row that is not finite knows nothing of its item."""

    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        path = Path(self.file)
        if not path.is_file():
            raise InputError(f"{path}: no such file; name the array itself, such as FOLDER/items.npy")
        try:
            rows_ND = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: not a readable array of vectors ({error}); write it by numpy.save"
            ) from error
        if rows_ND.ndim != 2 or rows_ND.dtype.kind != "f" or 0 in rows_ND.shape:
            raise InputError(
                f"{path}: has {rows_ND.dtype} of shape {rows_ND.shape}; expected a row of floating-point "
                "numbers for each item"
            )
        row_of = _rows_of_keys(path.with_suffix(".txt"), len(rows_ND))
        place_I = np.array([row_of.get(str(key), -1) for key in items.keys], dtype=np.int64)
        known_I = place_I >= 0
        if items.sequences is not None and not known_I.any():
            first = next(iter(row_of))
            raise InputError(
                f"{path}: has vectors of {len(row_of)} items, the first of which is {first!r}, and none of "
                f"{items.dataset}, whose first is {items.keys[0]!r}; write keys as the data's source does"
            )
        vectors_ID = np.full((len(items.keys), rows_ND.shape[1]), np.nan, dtype=np.float32)
        vectors_ID[known_I] = rows_ND[place_I[known_I]]
        vectors_ID[~np.isfinite(vectors_ID).all(axis=1)] = np.nan
        return vectors_ID


def _rows_of_keys(path: Path, num_rows: int) -> dict[str, int]:
    try:
        # Keys may have what other programs call the end of a line, such as U+2028.
        keys = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); write the key of each vector's item into it, one a line"
        ) from error
    row_of = {key: row for row, key in enumerate(keys)}
    if len(keys) != num_rows:
        raise InputError(f"{path}: has {len(keys)} keys for {num_rows} vectors; write one a line for each")
    if len(row_of) < len(keys):
        twice = next(key for row, key in enumerate(keys) if row_of[key] != row)
        raise InputError(f"{path}: names the item {twice!r} twice; every item has one vector")
    return row_of


def write_vectors(file: Path, vectors_ND: Float32Array, keys: Sequence[str], made: Mapping[str, Any]) -> None:
    """Write vectors of items as `FileVectors` reads them.

    Args:
        file: ends in `.npy`.
        keys: of the items, one for each vector.
        made: where they come from, for `rayrec.json` beside them.

    Raises:
        InputError: a key has a line break.
    """
    for key in keys:
        if "\n" in key or "\r" in key:
            raise InputError(
                f"{file}: the item {key!r} has a line break in its id, and ids are written one a line"
            )
    np.save(file, vectors_ND)
    file.with_suffix(".txt").write_text("".join(f"{key}\n" for key in keys), encoding="utf-8", newline="\n")
    write_json(file.with_name(ORIGIN_FILE), dict(made))


def dataset_of_vectors(file: Path) -> str | None:
    """Fingerprint of the data set of the model that `rayrec export` wrote these vectors of; None: unknown."""
    try:
        origin = json.loads(file.with_name(ORIGIN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fingerprint = origin.get("dataset_fingerprint") if isinstance(origin, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None


def vector_source(name: str, settings: Mapping[str, Any]) -> ItemVectorSource:
    """The source of some name; of one with a `file`, that file, whatever the name is.

    Raises:
        InputError: the settings do not fit.
    """
    known = ITEM_VECTORS[name] if name in ITEM_VECTORS.names() else FileVectors
    is_file = set(settings) == {"file"} and "file" not in known.model_fields
    source = FileVectors if is_file else known
    return source.parse(dict(settings), source=f"settings of the item vectors {name!r}")


ITEM_VECTORS: Registry[type[ItemVectorSource]] = Registry(
    "rayrec.item_vectors",
    "source of item vectors",
    {
        INTERACTIONS: f"{__name__}:InteractionVectors",
        TEXT: f"{__name__}:TextVectors",
        GRAPH: f"{__name__}:GraphVectors",
        CONTENT: f"{__name__}:ContentVectors",
        "image": "rayrec.models.tokenizers.image_vectors:ImageVectors",
    },
)
"""Name of a source to the class of its settings."""
