"""What a row of docs/benchmarks/quality.md is trained on: its settings, its data set, its semantic IDs.

They are made from the published files where they are missing, and kept below .cache/quality.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.quality_page import RECORDS
from benchmarks.quality_rows import DATASETS, METHODS, NEIGHBORS, TIES, DataSet, Method
from benchmarks.word_tokenizer import learn_tokenizer
from rayrec.models.tokenizers.item_tokenizer import TOKENIZERS
from rayrec.models.tokenizers.registry import FILES as REGISTRY_FILES
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.export import ITEM_VECTORS, export_run
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, import_published, tokenize
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.config import Config
from rayrec.platform.console import log, progress_bar
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare

KEPT = CHECKOUT / ".cache" / "quality"


@dataclass(frozen=True)
class Row:
    """One training and its evaluation."""

    dataset: str
    ties: str
    method: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.dataset}/{self.ties.replace(' ', '-')}/{self.method}"

    @property
    def record(self) -> Path:
        ties = self.ties.replace(" ", "-")
        if self.method == NEIGHBORS:
            return RECORDS / NEIGHBORS / f"{self.dataset}-{ties}.json"
        return RECORDS / f"{self.dataset}-{ties}-{self.method}-{self.seed}.json"

    @staticmethod
    def named(name: str, seed: int) -> Row:
        if name.count("/") != 2:
            raise SystemExit(f"{name!r} is no row: a row is DATASET/TIES/METHOD, as beauty/shuffled/sasrec")
        dataset, ties, method = name.split("/")
        ties = ties.replace("-", " ")
        for what, known in ((dataset, DATASETS), (ties, TIES), (method, (*METHODS, NEIGHBORS))):
            if what not in known:
                raise SystemExit(f"{name}: {what!r} is none of {', '.join(known)}")
        return Row(dataset, ties, method, seed)


def row_config(row: Row, data: Sequence[str] = ()) -> RunConfig:
    return RunConfig.load(
        CHECKOUT / "configs" / f"{METHODS[row.method].config}.yaml",
        [
            f"seed={row.seed}",
            "cluster.dashboard=false",
            *METHODS[row.method].settings,
            *DATASETS[row.dataset].settings,
            *data,
        ],
    )


def config_of(row: Row, sources: Path) -> RunConfig:
    """The run of a row; its data set is prepared and tokenized where it was not yet."""
    return row_config(row, data_settings(row, METHODS[row.method], sources))


def recipe(row: Row) -> dict[str, Any]:
    """What is recorded of it: settings as they are now, defaults included."""
    return recorded(row_config(row))


def made_of(row: Row) -> dict[str, Any]:
    """What is recorded of a row's settings, semantic IDs and words; two rows are of one recipe where
    `quality_pairs.are_of_one_recipe` takes both for equal."""
    method = METHODS[row.method]
    return {
        "settings": recipe(row),
        "max_codebook_size": method.max_codebook_size,
        "vectors": method.vectors,
        "tokenizer": method.tokenizer,
        "words": method.words,
        "teacher": made_of(replace(row, method=method.vectors)) if method.vectors in METHODS else None,
    }


def recorded(config: RunConfig) -> dict[str, Any]:
    """Settings that results depend on."""
    parts = {
        "model": True,
        "training": True,
        "evaluation": True,
        "data": {"redraw_ties"},
        "sparse": {"optimizer", "tables", "init_scale"},
    }
    return config.model_dump(mode="json", include=parts)


def data_settings(row: Row, method: Method, sources: Path) -> list[str]:
    """Settings of the prepared data set and of the semantic IDs, made where they are missing."""
    dataset, folder = DATASETS[row.dataset], prepared(row, sources)
    if method.vectors is None:
        return [f"data.path={folder}"]
    if method.vectors == "published":
        return [f"data.path={folder}", f"data.semantic_ids={_published_ids(dataset, folder, sources)}"]
    if method.vectors in METHODS:
        vectors, file = method.vectors, _vectors_of(replace(row, method=method.vectors, seed=0), sources)
        beside, files = file.parent.parent, {vectors: str(file)}
    else:
        vectors, beside, files = method.vectors if dataset.has_text else "interactions", folder, {}
    tokenized = TokenizeConfig(
        vectors=vectors,
        vector_files=files,
        tokenizer=method.tokenizer,
        max_codebook_size=method.max_codebook_size,
    )
    settings = _hash(tokenized.model_copy(update={"vector_files": {}}))  # wherever the files are
    ids = beside / f"semantic_ids-{vectors}-{settings}{_defaults_of(method.tokenizer)}"
    if not (ids / REGISTRY_FILES.manifest).is_file():  # which is written last
        with progress_bar("tokenize") as progress:
            tokenize(folder, ids, tokenized, progress=progress)
    words = [] if method.words is None else [f"model.tokenizer={_title_tokenizer(folder, method.words)}"]
    return [f"data.path={folder}", f"data.semantic_ids={ids}", *words]


def _vectors_of(row: Row, sources: Path) -> Path:
    """File of the vectors that the model of a row scores items by; it is trained where it was not yet."""
    settings = json.dumps(made_of(row), sort_keys=True)
    folder = prepared(row, sources) / f"{row.method}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    exported = folder / "vectors"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # rows of one teacher may be measured at once
        if not exported.is_dir():  # it gets its name when it is whole
            log.print(f"{row.name}, whose vectors the semantic IDs are made of")
            with progress_bar("train") as progress:
                train(
                    config_of(row, sources),
                    folder / "run",
                    "if_begun",
                    on_step=lambda done, total, _: progress(done, total),
                    cluster=in_process,
                )
            export_run(folder / "run", exported)
    return exported / ITEM_VECTORS


def _title_tokenizer(data: Path, size: int) -> Path:
    """Folder of a tokenizer that was learned from the titles of a data set."""
    folder = data / f"title_tokenizer-{size}"
    if not (folder / "tokenizer_config.json").is_file():  # which is written last
        titles = Dataset.open(data).items.titles
        learn_tokenizer((title for title in titles.to_pylist() if title), size, folder)
    return folder


def _defaults_of(tokenizer: str) -> str:
    """For names of folders: of the settings that a tokenizer has besides, where it has some."""
    settings = getattr(TOKENIZERS[tokenizer], "settings_class", None)
    return "" if settings is None else f"-{hashlib.sha256(repr(settings()).encode()).hexdigest()[:12]}"


def _published_ids(dataset: DataSet, folder: Path, sources: Path) -> Path:
    """Folder of the registry of IDs that somebody else made."""
    published = dataset.published_ids
    if published is None:
        raise InputError(f"{dataset.title}: nobody's semantic IDs are there; take a method with IDs of ours")
    ids = folder / "semantic_ids-published"
    if not (ids / REGISTRY_FILES.manifest).is_file():
        import_published(
            folder, sources / dataset.source / published.file, ids, key_offset=published.key_offset
        )
    return ids


def prepared(row: Row, sources: Path) -> Path:
    """Folder of the prepared data set, which is made where it is missing."""
    dataset = DATASETS[row.dataset]
    ties = {"shuffled": "shuffle", "file order": "file"}[row.ties]
    settings = PrepareConfig.parse({"ties": ties, **dataset.prepare}, source="reproduction")
    folder = KEPT / f"{row.dataset}-{row.ties.replace(' ', '-')}-{_hash(settings)}"
    if not folder.is_dir():  # it gets its name when it is whole
        with progress_bar("prepare") as progress, _source(dataset, sources) as source:
            prepare(
                source,
                folder,
                settings,
                progress=lambda phase, done, total: progress(done, total),
            )
    return folder


@contextmanager
def _source(dataset: DataSet, sources: Path) -> Iterator[Path]:
    """What `rayrec prepare` reads of a published data set, while the block lasts."""
    source = sources / dataset.source
    if not source.exists():
        raise InputError(f"{source}: no such folder; SOURCES has to hold {dataset.source}, {dataset.title}")
    if dataset.rewritten is None:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="rayrec-quality-") as folder:
        written = Path(folder) / dataset.source
        written.mkdir()
        dataset.rewritten(source, written)
        yield written


def _hash(settings: Config) -> str:
    """Of all settings, defaults included: what was made by others is not taken for it."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
