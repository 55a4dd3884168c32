"""Names that data sets and models have in common for what is said of events and of what is wanted next."""

from __future__ import annotations

from typing import Literal, get_args

Label = Literal["behavior", "scenario"]
"""What a log says of an event beside user, item and time: what was done, and where."""
LABELS: tuple[Label, ...] = get_args(Label)

Part = Literal["scenario", "behavior", "trigger_item"]
"""Of an instruction: the labels that the next event is to have, and the item that it is asked for beside."""
PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which a decoder reads them."""

UNKNOWN = -1
"""Code of a label that nobody knows, and of a part that nothing is said of."""
