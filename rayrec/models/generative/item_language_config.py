"""Settings of models that read words and semantic IDs together.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayrec.models.generative.config import CodeSoftmaxSettings, GeneratingConfig
from rayrec.models.language.config import TunedBase
from rayrec.models.sequence.config import DEFAULT_MAX_LENGTH
from rayrec.platform.config import Config
from rayrec.platform.prompt_template import PromptTemplate

if TYPE_CHECKING:
    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.backbone import GenerativeBackbone
    from rayrec.models.generative.recommender import GenerativeRecommender
    from rayrec.models.sequence.catalog import Catalog

NEXT_ITEM = "{codes}"
"""What is said behind the prompt that recommendations are made by."""


class AlignmentTask(Config):
    """Further prompts by which words and codes are learned to mean the same."""

    prompt: str
    """Text with slots, as of the operation `prompt`. With a history, the item that it is about is the one
    that follows; without, one of the catalog."""
    completion: str
    """What is to be said: text with the slots {title}, {category} and {codes}."""
    weight: float = Field(1.0, gt=0.0)
    """Such prompts for each training row, on average: relative to 1 for the row's own, not a share."""

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        template = PromptTemplate.parse(self.prompt, self.completion)
        if not template.answer.parts:
            raise ValueError(f"the prompt {self.prompt!r} has no completion: nothing would be learned of it")
        if not template.of_item:
            raise ValueError(
                f"the prompt {self.prompt!r} with the completion {self.completion!r} is about no item; name "
                "{title}, {category} or {codes} in one of them"
            )
        return self


class ItemLanguageConfig(TunedBase, CodeSoftmaxSettings, GeneratingConfig):
    """A language model over text and codes."""

    not_compiled_because: ClassVar[str | None] = (
        "of whose layers, which are those of transformers, it reaches none"
    )
    not_sharded_because: ClassVar[str | None] = "in which its prompts have not been tried"

    name: Literal["item_language"]
    prompt: str = "{history.codes}"
    """What is read of a user to say the next item: text with a history ({history}, {history.codes},
    {history.titles}, {history.categories}), and {table:user} for a row of the user's on parameter servers."""
    event: str = "{codes}"
    """What {history} says of an event: {title}, {category}, {codes}, and {table:item} for a row of the
    item's."""
    learn_history: bool = True
    """Whether the codes of a history are predicted, too, each item from those before it. Otherwise, and where
    events are written without codes, only the last item of each window is learned."""
    alignment: tuple[AlignmentTask, ...] = ()
    aligned_items: Literal["trained", "catalog"] = "trained"
    """Of alignment prompts without a history: items with training events, or all of them, so that words are
    learned of items that nobody has met."""
    table_dim: int = Field(32, gt=0)
    """Width of the rows of tables that prompts name, which are projected to the width of the network."""
    max_events: int = Field(DEFAULT_MAX_LENGTH, gt=1)
    """Events of a history at most, the newest."""
    max_tokens: int = Field(512, gt=1)
    """Tokens of a prompt with its answer at most; the oldest events are cut off, each as a whole."""
    title_characters: int | None = Field(100, ge=1)
    """Of a title or category that is written out; None: all."""
    category: str | None = None
    """Column of the items for the slot {category}; None: the first of the usual names that there is."""

    @model_validator(mode="after")
    def _prompt_is_known_before_the_item(self) -> Self:
        template = self.template
        if template.event is None:
            raise ValueError(f"model.prompt {self.prompt!r} has no history; name {{history.codes}}, say")
        if about := [name for name in template.given if name != "table:user"]:
            raise ValueError(
                f"model.prompt {self.prompt!r} has the slot {{{about[0]}}} of the item that is to be said; "
                "leave it out, or name it in model.event"
            )
        return self

    @model_validator(mode="after")
    def _codes_are_not_told_before(self) -> Self:
        event = self.template.event
        if not self.learn_history or event is None or "codes" not in event.slots:
            return self
        if before := event.slots[: event.slots.index("codes")]:
            raise ValueError(
                f"model.event {self.event!r} says {{{before[0]}}} of an item before its codes, from which "
                "they would be learned instead of from the history (model.learn_history); put {codes} "
                "first, or set learn_history to false"
            )
        return self

    @model_validator(mode="after")
    def _tokens_are_not_weighed(self) -> Self:
        if self.behavior_weights:
            raise ValueError("model.behavior_weights: targets of item_language are tokens, all alike")
        return self

    @cached_property
    def template(self) -> PromptTemplate:
        """By which recommendations are made."""
        return PromptTemplate.parse(self.prompt, NEXT_ITEM, self.event)

    @cached_property
    def alignment_templates(self) -> tuple[PromptTemplate, ...]:
        return tuple(
            PromptTemplate.parse(each.prompt, each.completion, self.event) for each in self.alignment
        )

    @property
    def history_length(self) -> int:
        return self.max_events

    @property
    def tables(self) -> dict[str, int]:
        templates = (self.template, *self.alignment_templates)
        names = {table for template in templates for table in template.tables}
        return dict.fromkeys(sorted(names), self.table_dim)

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> GenerativeRecommender:
        from rayrec.models.attention.choice import choice_named
        from rayrec.models.generative.item_language import ItemLanguageRecommender

        backbone = self.build_backbone(catalog, choice_named(self.attention, attention_file))
        return ItemLanguageRecommender(
            backbone, catalog.codes, self.beam_width, len(catalog.level_sizes), trie=catalog.trie
        )

    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        from rayrec.models.generative.item_language import ItemLanguageBackbone
        from rayrec.models.language.language_model import LanguageModel
        from rayrec.models.language.networks import Wanted

        vocabulary = catalog.vocabulary
        assert vocabulary is not None, "of a model that reads text"
        network = self.network(vocabulary, Wanted(self.max_tokens, "model.base"))
        language = LanguageModel(network, self.tables, choice=choice, dropout=self.dropout)
        return ItemLanguageBackbone(
            language, catalog.level_sizes, vocabulary.first_new, choice, self.build_softmax(catalog)
        )
