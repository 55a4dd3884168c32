"""Settings of the prefix decoder, its softmaxes, and where its vectors are.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from rayrec.models.generative.config import GenerativeConfig
from rayrec.models.sequence.config import ContentConfig, Negatives

if TYPE_CHECKING:
    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.prefix_decoder import PrefixBackbone, PrefixDecoder
    from rayrec.models.sequence.catalog import Catalog
    from rayrec.models.sequence.sequence_model import SequenceModel


class PrefixDecoderConfig(GenerativeConfig):
    """A vector for every prefix of a semantic ID, tied between input and output."""

    name: Literal["prefix_decoder"]
    softmax: Literal["levels", "items", "hybrid"] = "levels"
    """`levels`: over the next codes of a prefix, one level after the other; items are generated. `items`: one
    over all items, each scored by the sum of its prefixes' vectors, with the same weights: what the
    hierarchical softmax and its beams are compared with. `hybrid`: both losses on the same weights; beams
    find items code by code, and those that they found are ranked by both."""
    num_negatives: int = Field(1024, gt=0)
    """Of the softmax `hybrid` with the sparse matrix, whose loss over items is a sampled softmax: drawn for
    each batch by popularity, with replacement; an item that is drawn twice counts once."""
    prefix_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: vectors of prefixes are weights of the network. `sparse`: rows of the table `prefix` of
    parameter servers, for catalogs of any size; a step reads those of its items and those that its targets
    compete with."""
    composed: int | None = Field(None, ge=1)
    """Of the dense matrix: inner width of a network that makes a prefix's vector of its codes, in place of a
    weight for each prefix; then no weight belongs to one item, and weights do not grow with the catalog. The
    vectors of all prefixes of a depth are computed at each step, and for each request and depth: that work
    and memory grow with the catalog (with three levels of 128 components each, 1.5 GB
    for a million items). It is meant for catalogs of up to some 100,000 items."""
    content: ContentConfig | None = None
    """Of the dense matrix: what the catalog says of the items below a prefix, added to its vector. None:
    prefixes are known by their codes and by events alone."""
    num_siblings: int | None = Field(None, ge=1)
    """Of the sparse matrix: children that are sampled of each prefix on the path of a target, for the loss to
    tell the target from; None: all of them."""
    held_prefixes: int = Field(1_000_000, ge=0)
    """Of the sparse matrix: rows that a process may hold to generate items, of the shortest prefixes, whole
    levels alone. Rows of longer ones are read as beams reach them."""

    @model_validator(mode="after")
    def _siblings_are_of_rows(self) -> Self:
        if self.prefix_matrix == "dense" and (own := self._given("num_siblings", "held_prefixes")):
            raise ValueError(
                f"model.{own} is of the prefix_matrix 'sparse', and this one is 'dense', whose vectors "
                "are all in the network; leave it out, or set prefix_matrix: sparse"
            )
        return self

    @model_validator(mode="after")
    def _negatives_are_of_sampled_items(self) -> Self:
        if not self._samples_items and (own := self._given("num_negatives")):
            raise ValueError(
                f"model.{own} is of the softmax 'hybrid' with the prefix_matrix 'sparse', whose loss over "
                "items has negatives; leave it out"
            )
        return self

    def _given(self, *names: str) -> str | None:
        """The first of these settings that is not its default, None where all are."""
        # By value: a run's folder has all settings, also those that nobody gave.
        fields = type(self).model_fields
        return next((name for name in names if getattr(self, name) != fields[name].default), None)

    @model_validator(mode="after")
    def _network_makes_what_it_holds(self) -> Self:
        for name in ("composed", "content"):
            if getattr(self, name) is not None and self.prefix_matrix == "sparse":
                raise ValueError(
                    f"model.{name} is set and the prefix_matrix is 'sparse', whose vectors are rows of "
                    f"servers alone; leave {name} out, or set prefix_matrix: dense"
                )
        return self

    @model_validator(mode="after")
    def _one_softmax_reads_all_prefixes(self) -> Self:
        if self.softmax == "levels":
            return self
        if self.softmax == "items" and self.prefix_matrix == "sparse":
            raise ValueError(
                "model.softmax is 'items' and prefix_matrix 'sparse': a softmax over all items reads the "
                "vectors of all prefixes at every step; set prefix_matrix: dense, or another softmax"
            )
        if self.behavior_weights:
            raise ValueError(
                f"model.behavior_weights are of softmax 'levels', and this one is {self.softmax!r}, in which "
                "every target counts alike; leave them out, or set softmax: levels"
            )
        return self

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> SequenceModel:
        if self.softmax == "levels":
            return super().build(catalog, attention_file)
        import torch

        from rayrec.models.attention.choice import choice_named
        from rayrec.models.generative.flat_softmax import FlatPrefixModel
        from rayrec.models.generative.hybrid_recommender import HybridRecommender
        from rayrec.models.sequence.item_losses import CrossEntropy, ItemLoss, SampledSoftmax

        choice = choice_named(self.attention, attention_file)
        item_loss: ItemLoss
        if self._samples_items:
            assert catalog.negative_log_q_I is not None, "the model reads negatives"
            item_loss = SampledSoftmax.of_draws(catalog.negative_log_q_I, self.num_negatives)
        else:
            item_loss = CrossEntropy(None if catalog.trained_I is None else torch.tensor(catalog.trained_I))
        if self.softmax == "items":
            return FlatPrefixModel(self._build_dense(catalog, choice), item_loss)
        backbone, num_levels = self.build_backbone(catalog, choice), len(catalog.level_sizes)
        return HybridRecommender(
            backbone, item_loss, catalog.codes, self.beam_width, num_levels, catalog.trie
        )

    @property
    def _samples_items(self) -> bool:
        """Whether the loss over items is one of negatives."""
        return self.softmax == "hybrid" and self.prefix_matrix == "sparse"

    @property
    def negatives(self) -> Negatives:
        if self._samples_items:
            # Not uniform: items without a training event are no negatives of the other softmax either.
            return Negatives(per_batch=self.num_negatives, sampling="popularity")
        return super().negatives

    @property
    def has_item_vectors(self) -> bool:
        return self.softmax == "items"

    @property
    def learns_words_alone(self) -> bool:
        return self.content is not None

    @property
    def item_content(self) -> ContentConfig | None:
        return self.content

    @property
    def tables(self) -> dict[str, int]:
        prefixes = {"prefix": self.backbone.dim} if self.prefix_matrix == "sparse" else {}
        return prefixes | super().tables

    @property
    def init_scales(self) -> dict[str, float]:
        # A prefix that nothing was learned of is what its codes are, as one that the dense matrix lacks.
        return {"prefix": 0.0}

    @property
    def siblings_per_prefix(self) -> int | None:
        return self.num_siblings

    @property
    def table_of_catalog(self) -> str | None:
        return "prefix" if self.prefix_matrix == "sparse" else None

    def build_backbone(self, catalog: Catalog, choice: Choice) -> PrefixBackbone[Any]:
        if self.prefix_matrix == "dense":
            return self._build_dense(catalog, choice)
        import torch

        from rayrec.models.generative.prefix_rows import SparsePrefixDecoder

        known_I = None if catalog.known_I is None else torch.tensor(catalog.known_I)
        return SparsePrefixDecoder(
            self.backbone.build(choice),
            catalog.learned_codes,
            catalog.level_sizes,
            known_I,
            self.held_prefixes,
        )

    def _build_dense(self, catalog: Catalog, choice: Choice) -> PrefixDecoder:
        import torch

        from rayrec.models.generative.prefix_composer import PrefixComposer
        from rayrec.models.generative.prefix_decoder import PrefixDecoder

        known_I, trained_I = (
            None if chosen_I is None else torch.tensor(chosen_I)
            for chosen_I in (catalog.known_I, catalog.trained_I)
        )
        content = None
        if self.content is not None:
            assert catalog.content is not None, "the model reads what is said of items"
            content = catalog.content, self.content.buckets
        dim = self.backbone.dim
        return PrefixDecoder(
            self.backbone.build(choice),
            catalog.learned_codes,
            catalog.level_sizes,
            known_I,
            trained_I,
            None if self.composed is None else PrefixComposer(catalog.level_sizes, self.composed, dim),
            content,
        )
