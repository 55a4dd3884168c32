"""From a run's settings to prompts about its items.

Imports no torch: feature workers make their features with this, and start within a second.
"""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from rayrec.models.generative.item_language_config import ItemLanguageConfig
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.text_rows import tokenizer_folder
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.prompt_template import CATEGORY, ROW_OF_ITEM, TITLE, PromptTemplate
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.item_labels import USUAL_COLUMNS
from rayrec.samples.dataset.manifest import ITEMS_FILE
from rayrec.samples.features.prompt_features import AlignmentPrompts, PromptFeatures
from rayrec.samples.operations.prompt import tokenizer_with_codes
from rayrec.samples.text.item_facts import ItemFacts, text_column
from rayrec.samples.text.prompts import PromptWriter
from rayrec.samples.text.tokens import TextTokenizer


def prompt_features(
    config: RunConfig, model: ItemLanguageConfig, dataset: Dataset, registry: SemanticIdRegistry
) -> PromptFeatures:
    """What makes prompts of the rows of a data set.

    Raises:
        InputError: the tokenizer is missing or does not fit, or the items lack what a template says.
    """
    templates = (model.template, *model.alignment_templates)
    facts = facts_of(model, dataset, registry)
    facts.check(tuple(name for template in templates for name in template.slots), config.data.path)
    tokenizer = tokenizer_with_codes(tokenizer_folder(model), facts)

    def writer(template: PromptTemplate) -> PromptWriter:
        return PromptWriter(template, tokenizer, facts, model.max_tokens, model.title_characters)

    may_be_asked_I = np.ones(len(facts.ids_I), dtype=np.bool_)
    if model.aligned_items == "trained":
        may_be_asked_I = dataset.items.train_counts_I > 0
    alignment = []
    for task, template in zip(model.alignment, model.alignment_templates, strict=True):
        known_I = facts.known(template.of_item)
        items_I: Int64Array = np.flatnonzero(known_I & may_be_asked_I)
        if not len(items_I):
            raise InputError(
                f"{config.data.path}: no item has all that the alignment prompt {task.prompt!r} with "
                f"{task.completion!r} says; leave it out, or set model.aligned_items: catalog"
            )
        alignment.append(AlignmentPrompts(writer(template), task.weight, known_I, items_I))
    return PromptFeatures(
        dataset.items.ids_I,
        writer=writer(model.template),
        num_codes=registry.num_learned_levels,
        learn_history=model.learn_history,
        alignment=alignment,
        max_length=model.history_length,
        windows=config.windows,
        window_step=model.windows_begin_at,
        seed=config.seed,
        num_trainers=config.pipeline.num_trainers,
    )


def facts_of(model: ItemLanguageConfig, dataset: Dataset, registry: SemanticIdRegistry) -> ItemFacts:
    """What the templates of a model may say of the items of a data set."""
    slots = {name for template in (model.template, *model.alignment_templates) for name in template.slots}
    texts = {}
    if TITLE in slots:
        texts[TITLE] = text_column(dataset.items.titles)
    if CATEGORY in slots:
        texts[CATEGORY] = text_column(dataset.read(ITEMS_FILE, [column := _category(model, dataset)])[column])
    return ItemFacts(
        dataset.items.ids_I,
        registry.learned_codes_IL,
        registry.learned_level_sizes,
        registry.version,
        texts,
    )


def item_vocabulary(model: ItemLanguageConfig, registry: SemanticIdRegistry) -> Vocabulary:
    """The tokens of the base, and behind them those of codes."""
    info = item_tokenizer(model, registry).info
    return Vocabulary(info.num_tokens, info.first_new, info.pad, info.ends)


def item_tokenizer(model: ItemLanguageConfig, registry: SemanticIdRegistry) -> TextTokenizer:
    codes = ItemFacts(
        registry.item_ids_I, registry.learned_codes_IL, registry.learned_level_sizes, registry.version
    )
    return tokenizer_with_codes(tokenizer_folder(model), codes)


def places_of_items(model: ItemLanguageConfig) -> int:
    """Most rows of items that the prompts of one window read, those of alignment prompts included."""
    weights = (1.0, *(task.weight for task in model.alignment))
    found = 0.0
    for weight, template in zip(weights, (model.template, *model.alignment_templates), strict=True):
        of_event = () if template.event is None else template.event.slots
        count = of_event.count(ROW_OF_ITEM) * model.max_events + template.given.count(ROW_OF_ITEM)
        found += np.ceil(weight) * count
    return int(found)


def _category(model: ItemLanguageConfig, dataset: Dataset) -> str:
    names = pq.read_schema(dataset.root / ITEMS_FILE).names
    usual = [name for name in USUAL_COLUMNS if name in names]
    column = model.category or next(iter(usual), None)
    if column is None or column not in names:
        what = "none of the usual columns of categories" if column is None else f"no column {column!r}"
        raise InputError(
            f"{dataset.root}: its items have {what}; they have {', '.join(names)}; name one (model.category)"
        )
    return column
