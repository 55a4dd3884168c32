"""Names that data sets and models share for the labels of events and the parts of an instruction."""

from __future__ import annotations

from typing import Literal, get_args

Label = Literal["behavior", "scenario"]
"""Fields of an event besides user, item and time: what was done, and where."""
LABELS: tuple[Label, ...] = get_args(Label)

Part = Literal["scenario", "behavior", "trigger_item"]
"""Parts of an instruction: labels that the next event should have, and the item that triggers the request."""
PARTS: tuple[Part, ...] = get_args(Part)
"""In the order in which a decoder reads them."""

UNKNOWN = -1
"""Code of an unknown label, and of a part that is not given."""
