"""Cleaning of records: rules, exact duplicates, near duplicates, contamination of held-out rows by training.

    records ─► rules ─► exact duplicates ─► near duplicates ─► contamination
                                                    each counts what it leaves out

What is left does not depend on how records lie in files: of duplicates, held-out ones are kept before those
that train, and then the one with the lowest key, which is a hash of its content.

Near duplicates: MinHash (Broder, "On the Resemblance and Containment of Documents", 1997) of shingles of
words finds pairs, banded so that pairs at the threshold are found with near certainty; a pair counts if the
true Jaccard similarity of its shingles reaches the threshold. A record is compared with those that were kept,
so that a chain of small changes does not pull all of its links together.

Axes: W words, S shingles of a text, P permutations, N n-grams.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
import xxhash
from numba import njit
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rayrec.platform.compiled import extend64, kernel_input, mix64
from rayrec.platform.config import Config
from rayrec.samples.text.records import Record

_UInt64Array = NDArray[np.uint64]

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Contamination = Literal["report", "drop_train", "drop_held_out"]

# One ideograph or kana is about a word; other scripts write blanks between words.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|\w+?(?=[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])|\w+"
)


class RulesConfig(Config):
    """Rules that a record keeps or is left out; null asks for nothing."""

    min_characters: int | None = Field(None, ge=1)
    """Fewest characters of a record, all of its fields together."""
    max_characters: int | None = Field(None, ge=1)
    """Most characters of a record, all of its fields together."""
    max_repeated_lines: float | None = Field(None, ge=0, le=1)
    """Largest share of the lines with text that repeat an earlier line."""
    max_repeated_words: float | None = Field(None, ge=0, le=1)
    """Largest share of the runs of three words that repeat an earlier run."""
    max_odd_characters: float | None = Field(None, ge=0, le=1)
    """Largest share of control characters, characters without a meaning and U+FFFD, which stands for
    what could not be decoded."""
    scripts: tuple[str, ...] = ()
    """Scripts that letters may be of, as Unicode's names of characters begin: LATIN, CYRILLIC, GREEK, CJK,
    HANGUL, HIRAGANA, ARABIC ...; none: all."""
    min_in_scripts: float = Field(0.9, ge=0, le=1)
    """Smallest share of the letters that are of `scripts`; a record without letters passes."""

    @model_validator(mode="after")
    def _lengths_leave_room(self) -> Self:
        least, most = self.min_characters, self.max_characters
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"min_characters ({least}) is more than max_characters ({most}): no record is left"
            )
        return self

    @model_validator(mode="after")
    def _scripts_are_known(self) -> Self:
        for script in self.scripts:
            if script not in _scripts():
                raise ValueError(
                    f"scripts: no letter has a name that begins with {script!r}; expected such as LATIN"
                )
        return self


class NearDuplicatesConfig(Config):
    """Which records are nearly the same."""

    threshold: float = Field(0.8, gt=0, le=1)
    """Smallest Jaccard similarity of the shingles of two records."""
    shingle_words: int = Field(3, ge=1)
    """Words of a shingle; of a shorter text all words are one."""
    permutations: int = Field(128, ge=8, le=1024)
    """Hash functions of a signature: more find more pairs near the threshold."""


class CleaningConfig(Config):
    """What is left out of a data set of text, and what is counted."""

    rules: RulesConfig = RulesConfig()
    exact_duplicates: bool = True
    """Keep one of records that differ only in case, blanks and forms of Unicode (NFKC)."""
    near_duplicates: NearDuplicatesConfig | None = None
    """Keep one of records that are nearly the same; null: all."""
    contamination: Contamination = "report"
    """What becomes of records that share n-grams across training and held-out rows: they are only counted,
    or those of training, or those held out, are left out."""
    contamination_words: int = Field(13, ge=1)
    """Words of an n-gram of contamination; of a shorter text all words are one."""
    common_above: int = Field(10, ge=1)
    """An n-gram of more training records than these is a form that many have, no sign of contamination."""


@dataclass
class Cleaned:
    """What is left, and what was counted on the way."""

    records: list[tuple[Record, Split]]
    """In order of their keys."""
    removed: Counter[str] = field(default_factory=Counter)
    """By rule."""
    contaminated: Counter[str] = field(default_factory=Counter)
    """By split, records that share an n-gram with the other side, before any of them was left out."""
    conflicting: int = 0
    """Records left whose question is that of another record with another answer."""


Progress = Callable[[str, int, int | None], None]
"""(what is being done, records done, of how many)."""


def clean(records: Sequence[tuple[Record, Split]], config: CleaningConfig, progress: Progress) -> Cleaned:
    """Leave out what the settings say; the order of `records` does not matter."""
    removed: Counter[str] = Counter()
    rules = RuleSet(config.rules)
    left: list[tuple[Record, Split]] = []
    for done, (record, split) in enumerate(records):
        broken = rules.broken_by(record)
        if broken is None:
            left.append((record, split))
        else:
            removed[broken] += 1
        _now_and_then(progress, "rules", done, len(records))
    # Of equal ones, those held out are kept: training is what may lose some.
    left.sort(key=lambda one: (-SPLITS.index(one[1]), one[0].key))
    if config.exact_duplicates:
        num_before = len(left)
        left = list(_first_of_each(left))
        removed["exact duplicates"] += num_before - len(left)
    if config.near_duplicates is not None:
        num_before = len(left)
        left = _without_near(left, config.near_duplicates, progress)
        removed["near duplicates"] += num_before - len(left)
    contaminated: Counter[str] = Counter()
    if len({split == "train" for _, split in left}) == 2:
        are_it = _contaminated(left, config, progress)
        for (_, split), is_it in zip(left, are_it, strict=True):
            contaminated[split] += is_it
        if config.contamination != "report":
            drops_train = config.contamination == "drop_train"
            kept = [
                one
                for one, is_it in zip(left, are_it, strict=True)
                if not (is_it and (one[1] == "train") == drops_train)
            ]
            removed["contamination"] += len(left) - len(kept)
            left = kept
    left.sort(key=lambda one: one[0].key)
    return Cleaned(left, removed, contaminated, _conflicting(left))


def normalized(text: str) -> str:
    """A text without what makes no difference to a reader: case, runs of blanks, forms of Unicode."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def content_hash(record: Record) -> bytes:
    """16 bytes, equal for exact duplicates."""
    parts = [record.kind, normalized(record.asked), normalized(record.answer)]
    return xxhash.xxh3_128_digest("\0".join(parts).encode())


def words_of(text: str) -> list[str]:
    """Words of a text that is normalized; an ideograph is one."""
    return _WORD.findall(text)


class RuleSet:
    """Rules of single records."""

    def __init__(self, config: RulesConfig) -> None:
        self._config = config

    def broken_by(self, record: Record) -> str | None:
        """The first rule that a record breaks."""
        config = self._config
        text = f"{record.asked}\n{record.answer}" if record.kind != "spans" else record.text
        length = len(text.strip())
        if config.min_characters is not None and length < config.min_characters:
            return "too short"
        if config.max_characters is not None and length > config.max_characters:
            return "too long"
        if config.max_repeated_lines is not None:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if _repeated(lines) > config.max_repeated_lines:
                return "repeated lines"
        if config.max_repeated_words is not None:
            words = words_of(normalized(text))
            runs = list(zip(words, words[1:], words[2:], strict=False))
            if _repeated(runs) > config.max_repeated_words:
                return "repeated words"
        if config.max_odd_characters is not None and _odd_share(text) > config.max_odd_characters:
            return "odd characters"
        if config.scripts and _share_in(text, frozenset(config.scripts)) < config.min_in_scripts:
            return "other scripts"
        return None


def _repeated(values: Sequence[Any]) -> float:
    return 1 - len(set(values)) / len(values) if values else 0.0


def _odd_share(text: str) -> float:
    counts = Counter(text)
    return sum(count for character, count in counts.items() if _is_odd(character)) / len(text)


@lru_cache(maxsize=65_536)
def _is_odd(character: str) -> bool:
    # Cf has what joins letters and emoji; lines and tabs are Cc as well.
    return character == "\ufffd" or (
        unicodedata.category(character) in ("Cc", "Cn", "Co", "Cs") and character not in "\n\r\t"
    )


def _share_in(text: str, scripts: frozenset[str]) -> float:
    letters = {one: count for one, count in Counter(text).items() if one.isalpha()}
    if not letters:
        return 1.0
    return sum(count for one, count in letters.items() if _script_of(one) in scripts) / sum(letters.values())


@lru_cache(maxsize=65_536)
def _script_of(letter: str) -> str:
    # NFKC: full-width and mathematical letters are Latin ones.
    return unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "?").split()[0].split("-")[0]


@lru_cache(maxsize=1)
def _scripts() -> frozenset[str]:
    return frozenset(_script_of(chr(code)) for code in range(0x20000) if chr(code).isalpha()) - {"?"}


def _first_of_each(records: Sequence[tuple[Record, Split]]) -> Iterator[tuple[Record, Split]]:
    seen: set[bytes] = set()
    for record, split in records:
        content = content_hash(record)
        if content not in seen:
            seen.add(content)
            yield record, split


def bands_of(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands, rows of each) that find pairs at the threshold: the most rows with a chance of 0.99 at least.

    Two signatures agree in a band of r rows with a chance of J**r, so in one of b bands with
    1 - (1 - J**r)**b.
    """
    best = (permutations, 1)
    for rows in range(1, permutations + 1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= 0.99:
            best = (bands, rows)
    return best


def _without_near(
    records: list[tuple[Record, Split]], config: NearDuplicatesConfig, progress: Progress
) -> list[tuple[Record, Split]]:
    """The records that are not nearly one before them that is kept."""
    bands, rows = bands_of(config.threshold, config.permutations)
    hashes = _WordHashes()
    shingles: dict[int, _UInt64Array] = {}
    buckets: dict[tuple[tuple[str, str], int, int], list[int]] = {}
    kept = []
    for index, (record, split) in enumerate(records):
        grams_S = np.unique(hashes.grams(record.compared, config.shingle_words))
        # Of a choice, another option is another record, however like the texts are.
        other = (record.kind, record.answer if record.kind == "choice" else "")
        keys = [(other, number, int(one)) for number, one in enumerate(_band_hashes(grams_S, bands, rows))]
        near = sorted({earlier for key in keys for earlier in buckets.get(key, ())})
        if not any(_jaccard(grams_S, shingles[earlier]) >= config.threshold for earlier in near):
            kept.append((record, split))
            shingles[index] = grams_S
            for key in keys:
                buckets.setdefault(key, []).append(index)
        _now_and_then(progress, "near duplicates", index, len(records))
    return kept


def _contaminated(
    records: Sequence[tuple[Record, Split]], config: CleaningConfig, progress: Progress
) -> list[bool]:
    """Of each record, whether it shares an n-gram that is not common with one of the other side."""
    hashes = _WordHashes()
    grams = []
    for done, (record, _) in enumerate(records):
        grams.append(np.unique(hashes.grams(record.compared, config.contamination_words)))
        _now_and_then(progress, "contamination", done, len(records))
    nothing = np.zeros(0, dtype=np.uint64)
    held_out = [one for one, (_, split) in zip(grams, records, strict=True) if split != "train"]
    training = [one for one, (_, split) in zip(grams, records, strict=True) if split == "train"]
    held_out_N = np.unique(np.concatenate([nothing, *held_out]))
    in_train_N, counts_N = np.unique(
        np.concatenate([nothing, *(one[np.isin(one, held_out_N)] for one in training)]), return_counts=True
    )
    shared_N = in_train_N[counts_N <= config.common_above]
    return [bool(np.isin(one, shared_N).any()) for one in grams]


def _conflicting(records: Sequence[tuple[Record, Split]]) -> int:
    """Records whose question has several answers; a text asks nothing."""
    answers: dict[str, Counter[str]] = {}
    for record, _ in records:
        if record.kind != "text":
            question = f"{record.kind}\0{normalized(record.asked)}"
            answers.setdefault(question, Counter())[record.answer] += 1
    return sum(sum(found.values()) for found in answers.values() if len(found) > 1)


class _WordHashes:
    """Hashes of n-grams of words; each distinct word is hashed once."""

    def __init__(self) -> None:
        self._of_word: dict[str, int] = {}

    def grams(self, text: str, size: int) -> _UInt64Array:
        """[N] of every n-gram; of a text with fewer words, one of all."""
        known = self._of_word
        words = words_of(normalized(text))
        for word in words:
            if word not in known:
                known[word] = xxhash.xxh3_64_intdigest(word.encode())
        words_W = np.array([known[word] for word in words], dtype=np.uint64)
        if not len(words_W):  # signs alone: they are the one word
            words_W = np.array([xxhash.xxh3_64_intdigest(normalized(text).encode())], dtype=np.uint64)
        return _grams(kernel_input(words_W, np.uint64), min(size, len(words_W)))


def _band_hashes(grams_S: _UInt64Array, bands: int, rows: int) -> _UInt64Array:
    return _bands(kernel_input(grams_S, np.uint64), bands, rows)


def _jaccard(first_S: _UInt64Array, second_S: _UInt64Array) -> float:
    num_common = _num_common(kernel_input(first_S, np.uint64), kernel_input(second_S, np.uint64))
    return num_common / (len(first_S) + len(second_S) - num_common)


@njit(nogil=True, cache=True)
def _grams(words_W: _UInt64Array, size: int) -> _UInt64Array:
    grams_N = np.empty(len(words_W) - size + 1, dtype=np.uint64)
    for n in range(len(grams_N)):
        hashed = np.uint64(size)
        for w in range(size):
            hashed = extend64(hashed, words_W[n + w])
        grams_N[n] = hashed
    return grams_N


@njit(nogil=True, cache=True)
def _bands(grams_S: _UInt64Array, bands: int, rows: int) -> _UInt64Array:
    """A hash of each band of the signature: the least hash of any shingle, by each permutation."""
    hashes_B = np.empty(bands, dtype=np.uint64)
    for band in range(bands):
        hashed = np.uint64(band)
        for row in range(rows):
            seed = mix64(np.uint64(band * rows + row))
            least = np.uint64(2**64 - 1)
            for s in range(len(grams_S)):
                least = min(least, mix64(grams_S[s] ^ seed))
            hashed = extend64(hashed, least)
        hashes_B[band] = hashed
    return hashes_B


@njit(nogil=True, cache=True)
def _num_common(first_S: _UInt64Array, second_S: _UInt64Array) -> int:
    """Values of both, each ascending without repetition."""
    num_common, j = 0, 0
    for i in range(len(first_S)):
        while j < len(second_S) and second_S[j] < first_S[i]:
            j += 1
        if j < len(second_S) and second_S[j] == first_S[i]:
            num_common += 1
    return num_common


def _now_and_then(progress: Progress, phase: str, done: int, total: int) -> None:
    if done % 1024 == 0:
        progress(phase, done, total)
