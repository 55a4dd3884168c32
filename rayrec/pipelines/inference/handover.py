"""A data set of text and a run's model as a folder that other trainers read.

    FOLDER/model/              the layout of Hugging Face: weights, tokenizer, chat template
    FOLDER/train.jsonl, ...    a file for each split; records of kind `text` in `train-text.jsonl`, ...
    FOLDER/dataset_info.json   what LLaMA-Factory asks for beside files of data
    FOLDER/probes.safetensors  logits of the model on eight prompts
    FOLDER/handover.json       what was written: fingerprints, template, what is learned, counts

What a trainer makes of it is taken back by `taken_back`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.models.language.networks import Wanted, network_from_folder
from rayrec.pipelines.inference.probes import NUM_PROMPTS, Probes
from rayrec.pipelines.inference.writer import TextWriter
from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.keys import row_keys
from rayrec.samples.dataset.dataset_folder import FileEntry
from rayrec.samples.dataset.manifest import EVALUATION_FILES
from rayrec.samples.features.text_features import TextFeatures
from rayrec.samples.features.trainer_rows import Form, Row, TrainerRows
from rayrec.samples.prepare.writer import whole_folder
from rayrec.samples.text.cleaning import SPLITS, Split
from rayrec.samples.text.dataset import TextDataset
from rayrec.samples.text.records import SCHEMA, Record

FileKind = Literal["jsonl", "parquet"]

MANIFEST = "handover.json"
MODEL = "model"
PROBES = "probes.safetensors"
FORMAT = 1
_AT_ONCE = 512
"""Records that are turned into rows together."""

_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
_TYPES: dict[str, pa.DataType] = {
    "messages": _MESSAGES,
    "text": pa.string(),
    "input_ids": pa.list_(pa.int32()),
    "labels": pa.list_(pa.int32()),
}


class HandedModel(Config):
    """The model that was written."""

    run: str
    step: int
    """Steps that it was trained for."""
    model_type: str
    num_tokens: int
    """That the network knows."""
    tokenizer_version: str
    code_sizes: tuple[int, ...]
    """Codes of each level of semantic IDs among the tokens; none where there are none."""
    semantic_ids_version: str | None
    max_length: int
    weights: dict[str, tuple[int, ...]]
    """Shapes by name."""


class HandoverManifest(Config):
    """`handover.json`."""

    FILE: ClassVar[str] = MANIFEST

    format: int
    dataset: str
    dataset_fingerprint: str
    form: Form
    """Of the rows, but for those of records of kind `text`."""
    template: Literal["chat", "plain"]
    template_sha256: str | None = None
    """Of the chat template's text."""
    learned: str
    """What a trainer has to learn of a row, in words."""
    records: dict[Split, int]
    """Of the data set."""
    left_out: dict[str, int]
    """Records of which no row was written, by why."""
    files: dict[str, FileEntry]
    model: HandedModel | None = None

    @classmethod
    def read(cls, folder: Path) -> HandoverManifest:
        """What was written into a folder.

        Raises:
            InputError: it is none of these folders, or one of another format.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{folder}: has no {MANIFEST}; give a folder that `rayrec text export` wrote")
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InputError(f"{path}: is not of format {FORMAT}, which this version reads; write it again")
        return cls.parse(values, source=str(path))


_LEARNED = {
    "messages": "what the assistant says; TRL learns all of a row unless assistant_only_loss is set",
    "prompt": "the completion",
    "text": "all of the text",
    "tokens": "the tokens that have a label other than -100; the label of a token is the token itself",
}


@dataclass(frozen=True)
class _Source:
    """Records, and how they are written."""

    dataset: TextDataset
    rows: TrainerRows
    features: TextFeatures | None
    """Of a run, whose operations records go through."""

    def records(self, split: Split) -> Iterator[Record]:
        names = self.dataset.train_files if split == "train" else (EVALUATION_FILES[split],)
        first = 0 if split == "train" else len(self.dataset.train_files) + list(EVALUATION_FILES).index(split)
        read = [name for name in SCHEMA.names if name != "record_id"]
        for file_number, name in enumerate(names, first):
            place = 0
            for batch in self.dataset.read(name, read).to_batches(max_chunksize=_AT_ONCE):
                if self.features is None:
                    yield from map(Record.of_row, batch.to_pylist())
                else:
                    keys_B = row_keys(np.full(len(batch), file_number), np.arange(place, place + len(batch)))
                    yield from self.features.records(0, RowBatch(keys_B, batch))
                place += len(batch)


def write_handover(
    data: str | Path,
    folder: Path,
    *,
    run: str | Path | None = None,
    which: str = "best",
    form: Form | None = None,
    files: FileKind = "jsonl",
    on_records: Callable[[int, int], None] | None = None,
) -> HandoverManifest:
    """Write rows of a data set of text, and a run's model where one is named, for another trainer.

    Args:
        data: of text; need not be the one that the run was trained on.
        folder: made here.
        run: of language; its template, operations and window shape the rows.
        which: the run's snapshot, `best` or `last`.
        form: None: `messages`, or `prompt` where the run writes no chat template.
        on_records: called with (records written, all).

    Raises:
        InputError: the folder is there already, the data set or the run is missing or of another kind, or the
            form cannot be written.
    """
    if folder.exists():
        raise InputError(f"{folder}: is there already; give another folder, or remove it")
    dataset = TextDataset.open(data)
    writer = None if run is None else TextWriter.load(run, which)
    template = None if writer is None else writer.features.template
    is_chat = writer is None or template is not None
    rows = TrainerRows(
        form or ("messages" if is_chat else "prompt"),
        template if writer is not None else None,
        is_chat,
        "all" if writer is None else writer.task.model.learn,
        None if writer is None else writer.features.tokens,
    )
    source = _Source(dataset, rows, None if writer is None else writer.features)
    with whole_folder(folder) as draft:
        left_out: Counter[str] = Counter()
        entries: dict[str, FileEntry] = {}
        for split in SPLITS:
            entries |= _write_split(draft, source, split, files, left_out, on_records)
        (draft / "dataset_info.json").write_text(_json(_dataset_info(entries, rows.form, is_chat)))
        model = None if writer is None else _write_model(draft, writer, source)
        manifest = HandoverManifest(
            format=FORMAT,
            dataset=dataset.manifest.name,
            dataset_fingerprint=dataset.fingerprint,
            form=rows.form,
            template="chat" if is_chat else "plain",
            template_sha256=None
            if template is None
            else hashlib.sha256(template.template.encode()).hexdigest(),
            learned=_LEARNED[rows.form],
            records=dataset.manifest.rows,
            left_out=dict(sorted(left_out.items())),
            files=entries,
            model=model,
        )
        (draft / MANIFEST).write_text(_json(manifest.model_dump(mode="json")))
    return manifest


def _write_split(
    folder: Path,
    source: _Source,
    split: Split,
    files: FileKind,
    left_out: Counter[str],
    on_records: Callable[[int, int], None] | None,
) -> dict[str, FileEntry]:
    """The files of a split; none where it has no rows."""
    done, count = 0, source.dataset.manifest.rows[split]
    written: dict[str, _RowFile] = {}
    try:
        found_records = source.records(split)
        while records := list(islice(found_records, _AT_ONCE)):
            for record, found in zip(records, source.rows.of(records), strict=True):
                if isinstance(found, str):
                    left_out[found] += 1
                    continue
                apart = record.kind == "text" and source.rows.form in ("messages", "prompt")
                name = f"{split}-text.{files}" if apart else f"{split}.{files}"
                if name not in written:
                    written[name] = _RowFile(folder / name)
                written[name].add(found)
            done += len(records)
            if on_records is not None:
                on_records(done, count)
    finally:
        for file in written.values():
            file.close()
    return {name: FileEntry.of(folder / name, file.num_rows) for name, file in written.items()}


class _RowFile:
    """Writes rows as JSON lines or Parquet, by the name of the file."""

    def __init__(self, path: Path) -> None:
        self.num_rows = 0
        self._path = path
        self._parquet: pq.ParquetWriter | None = None
        self._lines = path.open("w", encoding="utf-8") if path.suffix == ".jsonl" else None
        self._rows: list[Row] = []

    def add(self, rows: Sequence[Row]) -> None:
        self.num_rows += len(rows)
        if self._lines is not None:
            self._lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            return
        self._rows += rows
        if len(self._rows) >= _AT_ONCE:
            self._flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            return
        self._flush()
        if self._parquet is not None:
            self._parquet.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows, _schema(self._rows[0]))
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._path, table.schema)
        self._parquet.write_table(table)
        self._rows = []


def _schema(row: Row) -> pa.Schema:
    return pa.schema(
        {
            name: _TYPES.get(name, _MESSAGES if isinstance(value, list) else pa.string())
            for name, value in row.items()
        }
    )


def _dataset_info(files: Iterable[str], form: Form, is_chat: bool) -> dict[str, Any]:
    """Of each file, what LLaMA-Factory has to know; none of a form that it does not read."""
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
        "observation_tag": "tool",
    }
    text = {"columns": {"prompt": "text"}}
    known: Mapping[str, Mapping[str, Any]] = {
        "messages": {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags},
        "text": text,
        **({} if is_chat else {"prompt": {"columns": {"prompt": "prompt", "response": "completion"}}}),
    }
    found = {}
    for name in files:
        described = text if "-text." in name else known.get(form)
        if described is not None:
            found[name.split(".")[0]] = {"file_name": name, **described}
    return found


def _write_model(folder: Path, writer: TextWriter, source: _Source) -> HandedModel:
    task = writer.task
    prompts = _prompts(writer, source)
    writer.export(folder / MODEL)
    # Of what was written, not of what is in memory: it is what comes back that is compared.
    network: Any = network_from_folder(
        folder / MODEL, Wanted(task.model.max_length, "model", packed=False, otherwise="")
    )
    Probes.of(network, prompts).save(folder / PROBES)
    info = task.tokenizer.info
    return HandedModel(
        run=writer.run,
        step=writer.committed_step + 1,
        model_type=network.config.model_type,
        num_tokens=network.get_input_embeddings().num_embeddings,
        tokenizer_version=info.version,
        code_sizes=info.code_sizes,
        semantic_ids_version=info.semantic_ids_version,
        max_length=task.model.max_length,
        weights={name: tuple(weight.shape) for name, weight in network.named_parameters()},
    )


def _prompts(writer: TextWriter, source: _Source) -> list[Int64Array]:
    """What is asked in the first records; of one without a question, its text is."""
    splits: tuple[Split, ...] = ("valid", "test", "train")
    records = list(islice((record for split in splits for record in source.records(split)), NUM_PROMPTS))
    return [row.ids_L for row in writer.features.asked(records)]


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
