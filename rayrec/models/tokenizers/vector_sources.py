"""Where item vectors come from, by name: what `rayrec tokenize --vectors` chooses from.

Another package adds a source by an entry point of the group `rayrec.item_vectors`; see
docs/guides/add-item-vectors.md.

Axes: I items in catalog order, D dimensions of a vector, N events of all training sequences one after the
other, B sequences.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from rayrec.models.tokenizers.item_vectors import interaction_vectors, similarity_vectors, text_vectors
from rayrec.platform.arrays import Float32Array, Float64Array, Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry

INTERACTIONS, TEXT, GRAPH = "interactions", "text", "graph"

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


ITEM_VECTORS: Registry[type[ItemVectorSource]] = Registry(
    "rayrec.item_vectors",
    "source of item vectors",
    {
        INTERACTIONS: f"{__name__}:InteractionVectors",
        TEXT: f"{__name__}:TextVectors",
        GRAPH: f"{__name__}:GraphVectors",
    },
)
"""Name of a source to the class of its settings."""
