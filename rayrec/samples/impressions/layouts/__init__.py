"""From what people have on disk to rows of impressions, one module per layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import option
from rayrec.samples.impressions.config import ImpressionsConfig, LayoutName
from rayrec.samples.impressions.layouts import avazu, criteo, deskdrop, movielens, table
from rayrec.samples.impressions.layouts.query_columns import QueryColumns
from rayrec.samples.impressions.manifest import ImpressionManifest
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
        InputError: nothing there, it is not as the layout says, or lacks a feature that is to be left out.
    """
    if not source.exists():
        raise InputError(f"{source}: no such file or folder; give the folder or file with the impressions")
    loaded = _LAYOUTS[config.layout](source, config)
    features = loaded.schema.features
    if unknown := [name for name in config.leave_out if name not in features]:
        raise InputError(
            f"{option('leave_out')} names {unknown[0]!r}; the features of {source} are {', '.join(features)}"
        )
    if set(config.leave_out) == set(features):
        raise InputError(f"{option('leave_out')} names all features, which leaves nothing to learn from")
    return replace(loaded, schema=loaded.schema.without(config.leave_out))


def query_columns_of(manifest: ImpressionManifest) -> QueryColumns | None:
    """How to make the columns of impressions for a request; None where the layout has no users and items, or
    an earlier version prepared the data set."""
    if manifest.history is None:
        return None
    if manifest.layout == "table":
        return table.query_columns(manifest.history, manifest.origins) if manifest.origins else None
    made_by = {"movielens": movielens.query_columns, "deskdrop": deskdrop.query_columns}.get(manifest.layout)
    return None if made_by is None else made_by(manifest.history)
