"""From what people have on disk to rows of impressions, one module per layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.impressions.config import ImpressionsConfig, LayoutName
from rayrec.samples.impressions.layouts import avazu, criteo, deskdrop, movielens, table
from rayrec.samples.impressions.source import ImpressionSource

_LAYOUTS: dict[LayoutName, Callable[[Path, ImpressionsConfig], ImpressionSource]] = {
    "criteo": criteo.load,
    "avazu": avazu.load,
    "table": table.load,
    "movielens": movielens.load,
    "deskdrop": deskdrop.load,
}


def load_impressions(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source in the layout that is configured.

    Raises:
        InputError: nothing there, or it is not as the layout says.
    """
    if not source.exists():
        raise InputError(f"{source}: no such file or folder; give the folder or file with the impressions")
    return _LAYOUTS[config.layout](source, config)
