"""What the settings and requests say of behaviors, scenarios and triggers by name, as a model reads it."""

from __future__ import annotations

from collections.abc import Mapping

from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Label, Part
from rayrec.samples.dataset.dataset import Dataset

MOST_NAMES = 20
"""Known names that a message lists."""


def check_labels(config: RunConfig, model: SequenceModelConfig, dataset: Dataset) -> None:
    """Refuse settings that name labels of events which the data set lacks.

    Raises:
        InputError: the data set lacks a label of events that the model needs; or settings name a behavior or
            scenario that no event has.
    """
    for label in model.needs_labels:
        dataset.check_label(label, of_histories=label in model.input_labels)
    for name in model.weighted_behaviors:
        _code_of("behavior", name, dataset, "model.behavior_weights")
    evaluation_instruction(config, model, dataset)


def evaluation_instruction(
    config: RunConfig, model: SequenceModelConfig, dataset: Dataset
) -> dict[Part, int]:
    """What users are ranked for in validation and evaluation.

    Raises:
        InputError: as `instruction_of`.
    """
    wanted = config.evaluation.instruction
    if wanted is None:
        return {}
    names: dict[Part, str | None] = {"scenario": wanted.scenario, "behavior": wanted.behavior}
    return instruction_of(model, dataset, names, "evaluation.instruction")


def instruction_of(
    model: SequenceModelConfig, dataset: Dataset, names: Mapping[Part, str | None], where: str
) -> dict[Part, int]:
    """By part that something is said of: the code of a label, or the trigger's catalog position.

    Args:
        names: as the data's source writes them; None where nothing is said.
        where: names the instruction, for messages.

    Raises:
        InputError: a part that the model does not read, or a name that the data set does not know.
    """
    parts = model.instruction_parts
    codes: dict[Part, int] = {}
    for part, name in names.items():
        if name is None:
            continue
        if part not in parts:
            known = f"it reads {', '.join(parts)}" if parts else "it reads no instructions"
            raise InputError(
                f"{where}: the model does not read the part {part!r} (model.instruction): {known}"
            )
        if part == "trigger_item":
            codes[part] = _position_of(name, dataset, where)
        else:
            codes[part] = _code_of(part, name, dataset, where)
    return codes


def _code_of(label: Label, name: str, dataset: Dataset, where: str) -> int:
    names = dataset.manifest.labels[label]
    if name not in names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        raise InputError(
            f"{where}: no event has the {label} {name!r}; those that occur: "
            f"{', '.join(names[:MOST_NAMES])}{more}"
        )
    return names.index(name)


def _position_of(key: str, dataset: Dataset, where: str) -> int:
    position = dataset.position_by_key(key)
    if position is None:
        raise InputError(
            f"{where}: the trigger_item {key!r} is not in the catalog of {len(dataset.items):,} items"
        )
    return position
