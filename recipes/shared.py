"""What recipes have in common: files, the commands of RayRec, a tokenizer, classical baselines and tables."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.console import log, out
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_json

END = "<end>"
Scores = Sequence[float] | NDArray[np.float64]
"""Of each record, how right a model is."""


def rayrec(*arguments: object) -> None:
    """Run a command of RayRec as a user would, and say which.

    Raises:
        InputError: it failed.
    """
    words = [str(argument) for argument in arguments]
    log.print(f"$ rayrec {shlex.join(words)}", highlight=False)
    if subprocess.run([sys.executable, "-m", "rayrec", *words], check=False).returncode:
        raise InputError(f"rayrec {words[0]} failed; its message is above")


def train_on_text(folder: Path, config: Path, kind: str, small: bool) -> None:
    """Prepare `text/train.jsonl`, `valid` and `test` of a folder, and train on them into its `run`.

    Args:
        kind: of the records.
        small: one epoch, and hardly any validation.
    """
    files = [folder / "text" / f"{split}.jsonl" for split in ("train", "valid", "test")]
    rayrec("text", "prepare", *files, "--out", folder / "data", "--kind", kind, "--set", "split=files")
    settings = [f"data.path={folder / 'data'}", f"model.tokenizer={folder / 'tokenizer'}"]
    settings += ["training.epochs=1", "evaluation.answers=4"] if small else []
    options = [word for setting in settings for word in ("--set", setting)]
    rayrec("train", config, "--run", folder / "run", "--local", *options)


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_tokenizer(
    folder: Path, texts: Sequence[str], size: int, phrases: Sequence[str] = (), characters: bool = False
) -> None:
    """Train a tokenizer whose unknown characters are bytes, and write its folder.

    Args:
        size: most tokens, but for `phrases`.
        phrases: that are one token each, such as what stands between the parts of every answer.
        characters: no token has two characters, as suits text without blanks whose parts may end anywhere.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    each = [pre_tokenizers.Split(Regex("."), "isolated")] if characters else []
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not characters)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*each, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass
class Figures:
    """Estimates of several models on several sets, in one run."""

    title: str
    rows: list[tuple[str, dict[str, Estimate]]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def add(self, name: str, figures: Mapping[str, Estimate]) -> None:
        self.rows.append((name, dict(figures)))

    def write(self, path: Path, **more: Any) -> None:
        """Print the table, and write it as JSON."""
        columns = list(dict.fromkeys(name for _, figures in self.rows for name in figures))
        table = Table("", *columns, title=self.title, title_justify="left")
        for name, figures in self.rows:
            cells = [_cell(figures[column]) if column in figures else "" for column in columns]
            table.add_row(name, *cells)
        out.print(table)
        values = {name: {key: one._asdict() for key, one in figures.items()} for name, figures in self.rows}
        write_json(path, {"title": self.title, "figures": values, **more})


def _cell(found: Estimate) -> str:
    if found.low == found.high:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def better(first: Scores, second: Scores, name: str, other: str) -> str:
    """A sentence on whether one model is better than another on the same records.

    Args:
        first, second: of the same records.
    """
    from rayrec.pipelines.metrics.text_metrics import mean

    gain = mean(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64))
    if gain.low > 0:
        verdict = f"{name} beats {other}"
    elif gain.high < 0:
        verdict = f"{name} loses to {other}"
    else:
        verdict = f"{name} and {other} do not differ"
    return f"{verdict}: {gain.value:+.4f} ({gain.low:+.4f} to {gain.high:+.4f}) over the same records"


class Crf:
    """A linear-chain conditional random field over characters (Lafferty et al., 2001)."""

    def __init__(self, texts: Sequence[str], labels: Sequence[Sequence[str]], file: Path) -> None:
        """Train it.

        Args:
            labels: of each character.
            file: where the package keeps the model.
        """
        crfsuite = _package("pycrfsuite", "python-crfsuite")
        trainer = crfsuite.Trainer(verbose=False)
        for text, tags in zip(texts, labels, strict=True):
            trainer.append(_window(text), list(tags))
        trainer.set_params(
            {"c1": 0.05, "c2": 0.05, "max_iterations": 100, "feature.possible_transitions": True}
        )
        trainer.train(str(file))
        self._tagger = crfsuite.Tagger()
        self._tagger.open(str(file))

    def __call__(self, text: str) -> list[str]:
        """The label of each character."""
        tags: list[str] = self._tagger.tag(_window(text))
        return tags


def _window(text: str) -> list[list[str]]:
    """Features of each character: those within three of it, alone, in pairs and in threes."""
    around = f"\x02\x02\x02{text}\x03\x03\x03"
    kinds = "".join("0" if one.isdigit() else "a" if one.isascii() else "x" for one in around)
    found = []
    for place in range(3, len(text) + 3):
        features = [f"{shift}:{around[place + shift]}" for shift in range(-3, 4)]
        features += [f"{shift}:{around[place + shift : place + shift + 2]}" for shift in range(-2, 2)]
        features += [f"{shift}:{around[place + shift : place + shift + 3]}" for shift in range(-2, 1)]
        features.append(f"kinds:{kinds[place - 1 : place + 2]}")
        found.append(features)
    return found


def logistic_regression_of_texts(
    texts: Sequence[str], targets: Sequence[str]
) -> Callable[[Sequence[str]], list[str]]:
    """TF-IDF of words and pairs of words, and logistic regression over them."""
    _package("sklearn", "scikit-learn")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = make_pipeline(words, LogisticRegression(C=30.0, max_iter=2000))
    model.fit(list(texts), list(targets))
    return lambda asked: [str(one) for one in model.predict(list(asked))]


Tags = frozenset[str]


def logistic_regressions_of_tags(
    texts: Sequence[str], vectors_ID: np.ndarray, tags: Sequence[Sequence[str]]
) -> Callable[[Sequence[str], np.ndarray], list[Tags]]:
    """One for each tag, over TF-IDF of words and pairs of words and a vector of each item."""
    _package("sklearn", "scikit-learn")
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import MultiLabelBinarizer

    words, names = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), MultiLabelBinarizer()
    columns = hstack([words.fit_transform(texts), csr_matrix(vectors_ID)])
    model = OneVsRestClassifier(LogisticRegression(C=3.0, max_iter=300))
    model.fit(columns, names.fit_transform(tags))

    def predict(asked: Sequence[str], asked_ID: np.ndarray) -> list[Tags]:
        found = model.predict(hstack([words.transform(asked), csr_matrix(asked_ID)]))
        return [frozenset(map(str, one)) for one in names.inverse_transform(found)]

    return predict


def _package(name: str, distribution: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(
            f"the baseline needs the package {distribution}, which cannot be imported; install the extra "
            "with: pip install 'rayrec[recipes]'"
        ) from None
