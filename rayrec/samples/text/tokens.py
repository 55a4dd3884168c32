"""The tokenizer of a base model, with a token for each code of semantic IDs: `<a_12>` is code 12 of level 0.

New tokens come behind those of the base, so rows of its embeddings keep their meaning. The size is padded to
a multiple, which tensor parallelism needs; numbers that only pad stand for nothing and are never encoded.

A saved tokenizer is the base's folder with another `tokenizer.json`, which any program of Hugging Face reads,
and `rayrec_tokenizer.json`, which says what was added and has the checksums.

Axes: T tokens of a text, L code levels, I items.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.text.chat import read_json, special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
INFO_FILE = "rayrec_tokenizer.json"
_TOKENIZER = "tokenizer.json"
_COPIED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_MOST_LEVELS = 26
_CODE = re.compile(r"<[a-z]_\d+>")


class TokenizerInfo(Config):
    """`rayrec_tokenizer.json`."""

    format: int
    code_sizes: tuple[int, ...]
    """Codes of each level; none where there are no semantic IDs."""
    semantic_ids_version: str | None = None
    """Whose codes they are."""
    first_new: int
    num_tokens: int
    pad: int
    ends: tuple[int, ...]
    sha256: str
    """Of `tokenizer.json`."""

    @property
    def version(self) -> str:
        """Another one has other tokens."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class MarkedTokens(NamedTuple):
    """The tokens of a text, and which of them are to be learned."""

    ids_T: Int64Array
    is_completion_T: BoolArray
    num_across: int
    """Tokens that begin before a completion and end in it, which are not learned."""


@dataclass(frozen=True)
class TextTokenizer:
    """Texts to numbers and back; made by `extended` or `load`."""

    tokenizer: Tokenizer
    info: TokenizerInfo
    folder: Path
    """Of the base, or where it was saved."""

    @classmethod
    def extended(
        cls,
        folder: str | Path,
        code_sizes: Sequence[int] = (),
        multiple: int = 1,
        semantic_ids_version: str | None = None,
    ) -> TextTokenizer:
        """The tokenizer of a base model's folder, and a token for each code.

        Args:
            multiple: the size is padded to one of these.

        Raises:
            InputError: the folder has no tokenizer, or one that would not keep a code in one piece.
        """
        root = Path(folder)
        if len(code_sizes) > _MOST_LEVELS or any(size < 1 for size in code_sizes):
            raise InputError(
                f"code sizes {tuple(code_sizes)}: expected at most {_MOST_LEVELS} levels of one code or more"
            )
        if multiple < 1:
            raise InputError(f"multiple is {multiple}, expected 1 or more")
        tokenizer = _read(root)
        from tokenizers import AddedToken

        first_new = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        codes = [text for level in range(len(code_sizes)) for text in _code_texts(level, code_sizes[level])]
        for text in codes:
            if tokenizer.token_to_id(text) is not None:
                raise InputError(
                    f"{root / _TOKENIZER}: has a token {text} already, which would be a code of items; "
                    "take the tokenizer of the base itself"
                )
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in codes])
        pad, ends = _special_ids(root, tokenizer)
        size = first_new + len(codes)
        info = TokenizerInfo(
            format=FORMAT,
            code_sizes=tuple(code_sizes),
            semantic_ids_version=semantic_ids_version,
            first_new=first_new,
            num_tokens=-(-size // multiple) * multiple,
            pad=pad,
            ends=ends,
            sha256=_sha256(tokenizer),
        )
        made = cls(tokenizer, info, root)
        made._check_codes()
        return made

    @classmethod
    def load(cls, folder: str | Path) -> TextTokenizer:
        """A tokenizer that was saved.

        Raises:
            InputError: it is missing, of another format, or not as it was saved.
        """
        root = Path(folder)
        values = read_json(root / INFO_FILE)
        if values.get("format") != FORMAT:
            raise InputError(
                f"{root / INFO_FILE}: format {values.get('format')!r}, "
                f"this version reads {FORMAT}; make it again"
            )
        info = TokenizerInfo.parse(values, source=str(root / INFO_FILE))
        tokenizer = _read(root)
        if _sha256(tokenizer) != info.sha256:
            raise InputError(f"{root / _TOKENIZER}: is not the tokenizer that was saved; make it again")
        made = cls(tokenizer, info, root)
        made._check_codes()
        return made

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer, with what else the base's folder says of texts, into a folder."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        for name in _COPIED:
            if (self.folder / name).is_file() and self.folder.resolve() != root.resolve():
                shutil.copyfile(self.folder / name, root / name)
        (root / _TOKENIZER).write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        (root / INFO_FILE).write_text(json.dumps(self.info.model_dump(mode="json"), indent=2) + "\n")

    @property
    def version(self) -> str:
        """Another one has other tokens."""
        return self.info.version

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without any that a model's own format would add."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of several texts, each as `encode` has them."""
        return [list(one.ids) for one in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def plain(self, text: str) -> str:
        """A text from elsewhere, such as a title: blanks for what would be codes or special tokens."""
        return self._marks.sub(" ", text)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        added = self.tokenizer.get_added_tokens_decoder().values()
        special = sorted({one.content for one in added if one.special and not _CODE.fullmatch(one.content)})
        return re.compile("|".join([_CODE.pattern, *map(re.escape, reversed(special))]))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; of numbers that only pad, nothing."""
        return str(self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))

    def keeps(self, text: str) -> bool:
        """Whether a text comes back as it was. With a base that changes texts, such as their case, not."""
        return self.decode(self.encode(text)) == text

    def marked(self, text: str, completions: Sequence[tuple[int, int]]) -> MarkedTokens:
        """Tokens of a text, with those of its completions marked.

        All of the text is encoded at once: parts by themselves would have other tokens. A token across the
        beginning of a completion is none that a model could say there.

        Args:
            completions: [start, stop) in characters.
        """
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        offsets_T2 = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        is_completion_T = np.zeros(len(offsets_T2), dtype=bool)
        num_across = 0
        for start, stop in completions:
            begins_T, ends_T = offsets_T2[:, 0], offsets_T2[:, 1]
            is_completion_T |= (begins_T >= start) & (begins_T < stop)
            num_across += int(((begins_T < start) & (ends_T > start)).sum())
            if start and text[start - 1].isspace() and not ((begins_T < start) & (ends_T >= start)).any():
                # The tokenizer counts the blank to the token behind it, and says so of none.
                first_T = begins_T == start
                is_completion_T &= ~first_T
                num_across += int(first_T.sum())
        return MarkedTokens(np.array(encoded.ids, dtype=np.int64), is_completion_T, num_across)

    def code_text(self, codes: Sequence[int]) -> str:
        """The codes of an item, or the first of them, as a text."""
        self._check_range(np.array([codes], dtype=np.int64))
        return "".join(f"<{_letter(level)}_{code}>" for level, code in enumerate(codes))

    def code_ids(self, codes_IL: NDArray[np.integer]) -> Int64Array:
        """[I, L] tokens of codes, or of their first levels."""
        codes = np.asarray(codes_IL, dtype=np.int64)
        self._check_range(codes)
        starts_L: Int64Array = self.info.first_new + self._starts_L[: codes.shape[1]]
        return codes + starts_L

    @cached_property
    def _starts_L(self) -> Int64Array:
        return np.cumsum([0, *self.info.code_sizes], dtype=np.int64)[:-1]

    def _check_range(self, codes_IL: Int64Array) -> None:
        sizes = self.info.code_sizes
        num_levels = codes_IL.shape[1]
        if num_levels > len(sizes):
            raise InputError(f"an item has {num_levels} codes, and the tokenizer knows {len(sizes)} levels")
        wrong = (codes_IL < 0) | (codes_IL >= np.array(sizes[:num_levels], dtype=np.int64))
        if wrong.any():
            item, level = (int(one) for one in np.argwhere(wrong)[0])
            raise InputError(
                f"code {codes_IL[item, level]} of level {level}: the tokenizer knows {sizes[level]} "
                "codes there"
            )

    def _check_codes(self) -> None:
        """Check that every code is one token, wherever it stands.

        Raises:
            InputError: one is not.
        """
        number = self.info.first_new
        # What comes before a code may end as a code begins, and would be read first.
        added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
        for token in added:
            inside = _CODE.search(token)
            if (
                inside is not None
                and inside[0] != token
                and self.tokenizer.token_to_id(inside[0]) is not None
            ):
                raise InputError(
                    f"{self.folder / _TOKENIZER}: splits the code {inside[0]}, which its token {token!r} "
                    "contains; take a tokenizer without that token"
                )
        for level, size in enumerate(self.info.code_sizes):
            before = {"", "x", "x ", "\n", _code(0, 0)} | {
                token[:-length]
                for token in added
                for length in range(1, len(token))
                if _code(level, 0)[:3].startswith(token[-length:]) and not _CODE.fullmatch(token)
            }
            for code, text in enumerate(_code_texts(level, size)):
                # The first of a level stands for all of it in texts.
                for start in sorted(before) if code == 0 else ("",):
                    ids = self.tokenizer.encode(f"{start}{text}y", add_special_tokens=False).ids
                    if ids.count(number) != (start + text).count(text):
                        raise InputError(
                            f"{self.folder / _TOKENIZER}: splits the code {text} in {start + text + 'y'!r}; "
                            "take a tokenizer that keeps added tokens in one piece"
                        )
                number += 1


def write_tokenizer_of_gguf(path: str | Path, folder: str | Path) -> None:
    """Write the tokenizer and the chat template that a GGUF file holds as the folder of a tokenizer.

    Raises:
        InputError: the file or a package that reads it is missing, it holds no tokenizer, or the folder has
            files already.
    """
    source, root = Path(path), Path(folder)
    if not source.is_file():
        raise InputError(f"{source}: no such file; give a model in GGUF format")
    if root.exists() and any(root.iterdir()):
        raise InputError(f"{root}: has files already; give another folder")
    if missing := [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]:
        raise InputError(
            f"{source}: needs the package {missing[0]}, which cannot be imported; install the extra with: "
            "pip install 'rayrec[language]'"
        )
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the code of an architecture raises
        raise InputError(f"{source}: holds no tokenizer that can be read: {error}") from error
    tokenizer.save_pretrained(str(root))


def _read(root: Path) -> Tokenizer:
    if find_spec("tokenizers") is None:
        raise InputError(
            "tokens of a text need the package tokenizers; install it (pip install rayrec[language])"
        )
    from tokenizers import Tokenizer

    path = root / _TOKENIZER
    if not path.is_file():
        raise InputError(f"{path}: no such file; give a folder with the tokenizer of a base model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has one type for all
        raise InputError(f"{path}: is no tokenizer ({error})") from error
    # Of what the base was trained with; rows have limits of their own.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _sha256(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def _special_ids(root: Path, tokenizer: Tokenizer) -> tuple[int, tuple[int, ...]]:
    """(what rows are padded with, behind what nothing is generated).

    Raises:
        InputError: the folder names no end of a text.
    """
    values = read_json(root / "tokenizer_config.json")
    named = special_tokens(values)
    ids = {name: tokenizer.token_to_id(text) for name, text in named.items()}
    end = ids.get("eos_token")
    ends: list[int] = [] if end is None else [end]
    generation = root / "generation_config.json"
    if generation.is_file():
        more: Any = read_json(generation).get("eos_token_id")
        ends += [one for one in (more if isinstance(more, list) else [more]) if isinstance(one, int)]
    if not ends:
        raise InputError(
            f"{root / 'tokenizer_config.json'}: names no eos_token that the tokenizer knows, so no text "
            "would ever end; name one"
        )
    pad = ids.get("pad_token")
    return (ends[0] if pad is None else pad), tuple(dict.fromkeys(ends))


def _letter(level: int) -> str:
    return chr(ord("a") + level)


def _code(level: int, code: int) -> str:
    return f"<{_letter(level)}_{code}>"


def _code_texts(level: int, size: int) -> list[str]:
    return [_code(level, code) for code in range(size)]
