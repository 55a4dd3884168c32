"""What a published version of a model is: one manifest, which names all files that belong together."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, SerializerFunctionWrapHandler, model_serializer

from rayrec.embeddings.base.row_codec import Wire
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import RunState
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.reading.read_plan import ReadPosition

FORMAT_VERSION = 1
SETTINGS = "config.yaml"
"""Of the run, in the bundle of its definition."""


def _is_plain(name: str) -> str:
    """The writer of a store's manifest must not choose where its readers write."""
    if not re.fullmatch(r"[^\s./\\\0][^/\\\0]*", name):
        raise ValueError(
            f"{name!r} is no plain name: it has a separator of paths, or begins with a dot or a blank; do "
            "not use the store, somebody has written to it who should not"
        )
    return name


PlainName = Annotated[str, AfterValidator(_is_plain)]


class BundleFile(Config):
    """One file of a bundle."""

    name: PlainName
    bytes: int
    checksum: str
    """As `checksum_file` computes it."""


class Bundle(Config):
    """Files that were published together and never change; versions that have the same ones share it."""

    name: PlainName
    """Of its folder."""
    files: tuple[BundleFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class Segment(Config):
    """Rows of the tables: all of them, or those that have changed since the segment before."""

    bundle: Bundle
    step: int
    """After which the run had these rows."""
    since: int | None
    """Step of the segment that it builds on; None of one with all rows."""
    snapshot: str
    """Fingerprint of the run's snapshot that it was made of."""
    rows: Wire = "float32"
    """What its rows are rounded to; readers get float32 of them."""

    @model_serializer(mode="wrap")
    def _without_default(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Services of earlier versions refuse a manifest with a key that they do not know: it is there only
        where they could not read the rows."""
        values: dict[str, Any] = values_of(self)
        if self.rows == "float32":
            del values["rows"]
        return values


class EarlierCatalog(Config):
    """What the run was trained on, of a version whose catalog is a later one that has further items."""

    dataset_fingerprint: str
    known_items: str
    """Which items of the version were there, as `packed` writes them."""


class Probe(Config):
    """What a version answers to a user of its data."""

    user: str
    """The user's key."""
    items: tuple[str, ...]
    """Keys of the items, best first; those of the history are among them."""


_RUN_ID = "run_id"
"""In the run's progress: services of earlier versions refuse a key of the manifest that they do not know."""


class ModelVersion(Config):
    """A version of a model: its weights, rows, catalog and semantic IDs, which move together."""

    RENAMED: ClassVar[Mapping[str, str]] = {"catalogue": "catalog"}

    format: int = FORMAT_VERSION
    number: int
    """Of the versions of a store, counted from 1."""
    published_at: float
    """UNIX seconds."""
    run: str
    """Name of the run."""
    device: str
    """That it was trained on."""
    state: dict[str, Any]
    """Of the run at that moment; `run_state` reads it."""
    definition: Bundle
    """The run's settings and the columns of its training rows."""
    weights: Bundle
    """Dense weights."""
    weights_step: int
    """After which the run had these weights: that of the rows, or an earlier one."""
    weights_at: float
    """When they were published first, in UNIX seconds."""
    segments: tuple[Segment, ...]
    """All rows first, then the changes; none of a model without tables."""
    catalog: Bundle
    """What recommending needs of the data set."""
    semantic_ids: Bundle | None = None
    earlier: EarlierCatalog | None = None
    """None of a catalog that the run was trained on, or whose semantic IDs say which items are later ones."""
    probes: tuple[Probe, ...] = ()
    """Answers to a few users as they were at publication; none where they were not asked."""
    overlap: float | None = None
    """Mean share of these items that the version before gave to the same users."""

    @model_serializer(mode="wrap")
    def _without_earlier(self, values_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As of a segment: services of earlier versions are to read all that they can serve."""
        values: dict[str, Any] = values_of(self)
        if self.earlier is None:
            del values["earlier"]
        return values

    def is_of(self, run: RunFolder) -> bool:
        """Whether it was made of this run, wherever that lies now; runs elsewhere may have its name.

        Of versions that earlier versions of RayRec published, the name tells.
        """
        run_id = self.state.get("progress", {}).get(_RUN_ID)
        return self.run == run.name and run_id in (None, run.state.get("id"))

    @property
    def step(self) -> int:
        """Last step of the run whose update is in it."""
        return int(self.state["committed_step"])

    @property
    def bundles(self) -> list[Bundle]:
        """Everything that it is made of."""
        some = [self.definition, self.weights, self.catalog]
        if self.semantic_ids is not None:
            some.append(self.semantic_ids)
        return [*some, *(segment.bundle for segment in self.segments)]

    @property
    def row_bytes(self) -> int:
        """Of the files with rows."""
        return sum(segment.bundle.num_bytes for segment in self.segments)

    @property
    def run_state(self) -> RunState:
        values = dict(self.state)
        return RunState(read_position=ReadPosition(**values.pop("read_position")), **values)

    def to_bytes(self) -> bytes:
        values = self.model_dump(mode="json")
        return (json.dumps(values | {"checksum": _checksum_of(values)}, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> ModelVersion:
        """Read a version's manifest.

        Args:
            where: it was read, for messages.

        Raises:
            InputError: it is damaged, or of another format.
        """
        try:
            values = json.loads(content)
            checksum = values.pop("checksum")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{where}: not the manifest of a version; the file was changed") from error
        if values.get("format") != FORMAT_VERSION:
            raise InputError(
                f"{where}: format {values.get('format')}, this version of RayRec reads {FORMAT_VERSION}"
            )
        if checksum != _checksum_of(values):
            raise InputError(f"{where}: its checksum differs: the file was changed")
        return cls.parse(values, source=where)


def state_values(state: RunState, run_id: str | None) -> dict[str, Any]:
    """As `ModelVersion.state` has it."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(state)))
    if run_id is not None:
        values["progress"][_RUN_ID] = run_id
    return values


def _checksum_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
