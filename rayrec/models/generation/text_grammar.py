"""Texts that satisfy a JSON schema or a regular expression, by xgrammar or llguidance.

    schema ─► check_schema ─► the package's grammar ─► TextGrammar, one per sequence: masks, and endings
                  └► xgrammar's notation ─► bnf ─► ShortestWays ──────────────────┘   that both agree on

The package says which tokens are allowed. What it cannot say is how many tokens an ending takes: that is
found by `endings`, and used only when the package has allowed each of its tokens and is complete behind the
last one. So whatever the two think of a grammar, a sequence always knows an ending that is allowed.

JSON is written without blanks but those behind ',' and ':', so that a weak model cannot spend its tokens on
them; characters that a string of JSON must escape do not come.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from rayrec.models.generation.bnf import EscapedCharacterError, UnknownNotationError, read_grammar
from rayrec.models.generation.deterministic import unambiguous
from rayrec.models.generation.endings import Chart, ShortestWays
from rayrec.models.generation.json_schema import (
    bounded,
    check_expression,
    check_schema,
    patterns,
    with_patterns,
    with_plain_characters,
)
from rayrec.models.generation.token_bytes import TokenBytes
from rayrec.platform.arrays import BoolArray
from rayrec.platform.errors import InputError

Backend = Literal["xgrammar", "llguidance"]
Kind = Literal["json_schema", "regex"]
ANY_OBJECT = {"type": "object"}
"""Schema of what OpenAI's API calls `json_object`."""

MOST_BYTES = 64 * 1024
"""Of a schema or an expression."""
MOST_KEPT = 64
"""Compiled grammars that are kept, the last ones used."""
_ITEM, _KEY = ", ", ": "
_ESCAPE_IN_NAME = re.compile(
    r'^(\S+_addl_key_\d+ ::= .*) \| \("\\\\" basic_escape basic_string_sub\)', re.MULTILINE
)
"""In xgrammar's notation: of a rule for what may follow letters that known names begin with."""
_FIRST_CONTINUATIONS = {0xE0: 0xA0, 0xF0: 0x90}
"""Least second byte of UTF-8 behind a first one; others have 0x80."""


class Matcher(Protocol):
    """One sequence, as a package follows it."""

    def fill(self, bits: np.ndarray) -> None:
        """[ceil(V / 32)] int32: bit t of them is whether token t may come."""

    def accept(self, token: int) -> bool: ...
    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether these may come next and complete the text; changes nothing."""

    @property
    def is_complete(self) -> bool: ...


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar, ready to begin sequences of."""

    start: Callable[[], Matcher]
    ways: ShortestWays
    tokens: TokenBytes
    is_json: bool
    least_tokens: int
    """Of its shortest text that is known."""

    def begin(self) -> TextGrammar:
        return TextGrammar(self)


class TextGrammar:
    """A `TokenGrammar` of texts."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._tokens = compiled.tokens
        self._matcher = compiled.start()
        self._chart = Chart(compiled.ways)
        self._pending = b""
        """Bytes of a character that is not whole."""
        found = self._ending_here(b"", [])
        if found is None:
            raise InputError("no output satisfies it")
        self._ending: list[int] = found
        self._tried: tuple[int, list[int], bytes] | None = None
        """(token, ending behind it, pending bytes): the chart has read it already."""
        self._length = len(self._chart)
        self._bits = np.zeros((len(self._tokens) + 31) // 32, dtype=np.int32)
        self._allowed_V: BoolArray | None = None

    @property
    def is_complete(self) -> bool:
        # Where the package says so and the chart does not, there is more in the known ending.
        return not self._pending and not self._ending and self._matcher.is_complete

    @property
    def is_over(self) -> bool:
        return self.is_complete and not bool(self.allowed_V().any())

    @property
    def ending(self) -> Sequence[int]:
        return self._ending

    def allowed_V(self) -> BoolArray:
        if self._allowed_V is None:
            self._matcher.fill(self._bits)
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: len(self._tokens)]
            allowed_V: BoolArray = bits.astype(bool)
            allowed_V[self._tokens.ends] = False
            if self._compiled.is_json:
                allowed_V[self._tokens.has_control_V] = False
            self._allowed_V = allowed_V
        return self._allowed_V

    def fits(self, token: int, left: int) -> bool:
        ending = self._ending_behind(token)
        return ending is not None and len(ending) <= left

    def advance(self, token: int) -> None:
        ending = self._ending_behind(token)
        if ending is None:
            raise ValueError(f"token {token} is not allowed, or no ending behind it is known")
        if not self._matcher.accept(token):
            raise ValueError(f"token {token} is not allowed")
        assert self._tried is not None
        self._ending, self._pending = ending, self._tried[2]
        self._length = len(self._chart)
        self._tried = self._allowed_V = None

    def _ending_behind(self, token: int) -> list[int] | None:
        """The shortest known ending behind a token; None: there is none."""
        if self._tried is not None and self._tried[0] == token:
            return self._tried[1]
        self._chart.back_to(self._length)
        self._tried = None
        written = self._tokens.bytes_V[token]
        if not written:
            return None
        points, pending = _characters(self._pending + written)
        if points is None or not self._chart.read(points):
            return None
        ending = self._ending_here(pending, [token])
        is_next = bool(self._ending) and self._ending[0] == token
        if is_next and (ending is None or len(ending) >= len(self._ending)):
            ending = self._ending[1:]  # which is allowed already
        if ending is None:
            self._chart.back_to(self._length)
            return None
        self._tried = (token, ending, pending)
        return ending

    def _ending_here(self, pending: bytes, behind: list[int]) -> list[int] | None:
        """Tokens of an ending from where the chart is, if the package allows it behind some tokens."""
        length = len(self._chart)
        rest = b""
        if pending:
            rest = _completed(pending)
            if not self._tokens.single.issuperset(rest) or not self._chart.read(
                [ord((pending + rest).decode())]
            ):
                return None
        points = self._chart.ending()
        self._chart.back_to(length)
        if points is None:
            return None
        ending = self._tokens.tokens_of(rest + "".join(map(chr, points)).encode())
        return ending if self._matcher.allows([*behind, *ending]) else None


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps them; thread-safe."""

    def __init__(
        self, tokenizer: Any, ends: Sequence[int], num_tokens: int, backend: Backend = "xgrammar"
    ) -> None:
        """
        Args:
            tokenizer: a fast one of transformers.
            ends: tokens that end texts.
            num_tokens: of the model, whose vocabulary may be larger than the tokenizer's.

        Raises:
            InputError: a package is missing.
        """
        self.backend = backend
        xgrammar = _package("xgrammar")
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=num_tokens, stop_token_ids=list(ends)
        )
        special = set(info.special_token_ids) | set(ends)
        texts = [None if token in special else text for token, text in enumerate(info.decoded_vocab)]
        self.tokens = TokenBytes(texts, list(ends))
        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._guidance: Any = None
        if backend == "llguidance":
            _package("llguidance")
            import llguidance.hf

            self._guidance = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(ends))
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self.num_compiled = 0

    def compile(self, kind: Kind, source: Any) -> CompiledGrammar:
        """Compile a schema, given as an object, or a regular expression; takes milliseconds to seconds.

        Raises:
            InputError: it does not compile, is not held, or no output satisfies it.
        """
        written = json.dumps(source, sort_keys=False)
        if len(written) > MOST_BYTES:
            raise InputError(f"the {_name(kind)} is larger than {MOST_BYTES:,} bytes; give a smaller one")
        key = hashlib.sha256(f"{kind} {written}".encode()).hexdigest()
        with self._lock:  # compiled one after the other: they would take each other's time
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            compiled = self._compile(kind, source, written)
            self.num_compiled += 1
            self._kept[key] = compiled
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return compiled

    def _compile(self, kind: Kind, source: Any, written: str) -> CompiledGrammar:
        if kind == "json_schema":
            check_schema(source)
            for where, pattern in patterns(source):
                self._check_pattern(where, pattern)
            for where, number in bounded(source):
                self._check_number(where, number)
            source = with_patterns(source)
            written = json.dumps(source)
        else:
            check_expression(source, "the regular expression")
        try:
            grammar = self._grammar(kind, source, written)
            automaton = read_grammar(_with_plain_names(str(grammar)), self._regex_notation)
            if kind == "regex" and (better := unambiguous(automaton)) is not None:
                notation, automaton = better
                grammar = self._xgrammar.Grammar.from_ebnf(notation)
            ways = ShortestWays(automaton, self.tokens.single)
            start = self._start(kind, source, grammar)
            trial = CompiledGrammar(start, ways, self.tokens, kind == "json_schema", 0)
            least = len(trial.begin().ending)
        except InputError as error:
            raise InputError(f"the {_name(kind)}: {error}, which this tokenizer could write") from error
        except UnknownNotationError as error:
            raise InputError(f"the {_name(kind)} cannot be held: {error}") from error
        except (RuntimeError, ValueError) as error:  # both packages raise these alone
            raise InputError(f"the {_name(kind)} does not compile: {_clause(error)}") from error
        return CompiledGrammar(start, ways, self.tokens, kind == "json_schema", least)

    def _grammar(self, kind: Kind, source: Any, written: str) -> Any:
        if kind == "regex":
            return self._xgrammar.Grammar.from_regex(with_plain_characters(source))
        return self._xgrammar.Grammar.from_json_schema(
            written, any_whitespace=False, separators=(_ITEM, _KEY)
        )

    def _check_pattern(self, where: str, pattern: str) -> None:
        """Check an expression by itself: of a whole schema, the package does not say which one it was,
        and it writes the letters of some into strings as they are.

        Raises:
            InputError: it does not compile, or can say what JSON escapes alone.
        """
        try:
            read_grammar(self._regex_notation(pattern), self._regex_notation, in_string=True)
        except EscapedCharacterError as error:
            raise InputError(f"{where}: {pattern!r}: {error}; leave it out of patterns") from error
        except UnknownNotationError:
            return  # which is said of the whole
        except RuntimeError as error:
            raise InputError(f"{where}: {pattern!r} does not compile: {_clause(error)}") from error

    def _check_number(self, where: str, number: dict[str, Any]) -> None:
        """Check that a number within bounds can be written: the package knows six decimals, and writes
        nothing at all where these have none.

        Raises:
            InputError: it cannot.
        """
        try:
            grammar = self._grammar("json_schema", number, json.dumps(number))
            automaton = read_grammar(str(grammar), self._regex_notation)
        except (RuntimeError, ValueError):
            return  # which is said of the whole
        if not ShortestWays(automaton, self.tokens.single).of_rule(automaton.root):
            raise InputError(
                f"{where}: no number of six decimals is within its bounds; set them farther apart"
            )

    def _regex_notation(self, pattern: str) -> str:
        return str(self._xgrammar.Grammar.from_regex(with_plain_characters(pattern)))

    def _start(self, kind: Kind, source: Any, grammar: Any) -> Callable[[], Matcher]:
        if self._guidance is None:
            compiled = self._compiler.compile_grammar(grammar)
            return lambda: _XgrammarMatcher(self._xgrammar, self._xgrammar.GrammarMatcher(compiled))
        from llguidance import LLMatcher

        if kind == "regex":
            written = LLMatcher.grammar_from_regex(source)
        else:
            style: Any = {"whitespace_flexible": False, "item_separator": _ITEM, "key_separator": _KEY}
            written = LLMatcher.grammar_from_json_schema(json.dumps(source), defaults=style)
        guidance = self._guidance
        if said := LLMatcher(guidance, written).get_error():
            raise ValueError(said)
        return lambda: _LlguidanceMatcher(LLMatcher(guidance, written), len(self.tokens), self.tokens.ends)


class _XgrammarMatcher:
    def __init__(self, package: Any, matcher: Any) -> None:
        self._package, self._matcher = package, matcher

    def fill(self, bits: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(torch.from_numpy(bits)[None])

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def allows(self, tokens: Sequence[int]) -> bool:
        accepted = 0
        try:
            for token in tokens:
                if not self._matcher.accept_token(token):
                    return False
                accepted += 1
            return bool(self._matcher.is_completed())
        finally:
            self._matcher.rollback(accepted)

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())


class _LlguidanceMatcher:
    def __init__(self, matcher: Any, num_tokens: int, ends: Sequence[int]) -> None:
        self._matcher, self._num_tokens, self._ends = matcher, num_tokens, ends

    def fill(self, bits: np.ndarray) -> None:
        bits.view(np.uint8)[:] = 0
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        count = min(len(found), bits.nbytes)
        bits.view(np.uint8)[:count] = found[:count]

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def allows(self, tokens: Sequence[int]) -> bool:
        trial = self._matcher.deep_copy()
        return (not tokens or bool(trial.consume_tokens(list(tokens)))) and bool(trial.is_accepting())

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())


def _characters(written: bytes) -> tuple[list[int] | None, bytes]:
    """(code points, bytes of one that is not whole); None: it is no UTF-8."""
    for cut in range(min(4, len(written) + 1)):
        try:
            whole = written[: len(written) - cut].decode()
        except UnicodeDecodeError:
            continue
        pending = written[len(written) - cut :]
        return (list(map(ord, whole)), pending) if not pending or _can_be_completed(pending) else (None, b"")
    return None, b""


def _can_be_completed(pending: bytes) -> bool:
    try:
        (pending + _completed(pending)).decode()
    except UnicodeDecodeError:
        return False
    return True


def _completed(pending: bytes) -> bytes:
    """The first continuation of a character of UTF-8 that is not whole."""
    first = pending[0]
    length = 2 if 0xC2 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4 if 0xF0 <= first < 0xF5 else 0
    missing = max(length - len(pending), 0)
    rest = bytes([0x80] * missing)
    if missing and len(pending) == 1:
        rest = bytes([_FIRST_CONTINUATIONS.get(first, 0x80)]) + rest[1:]
    return rest


def _with_plain_names(notation: str) -> str:
    """A grammar without escapes in names of additional properties, as long as these may be known names.

    Packages keep known names out of additional ones letter by letter, and `\\u0061` is an `a`, too. What the
    chart does not read does not come, so it need not be taken out of the package's own grammar.
    """
    return _ESCAPE_IN_NAME.sub(r"\1", notation)


def _name(kind: Kind) -> str:
    return {"json_schema": "JSON schema", "regex": "regular expression"}[kind]


def _clause(error: Exception) -> str:
    """Of a package's message, which begins with the time and the line of its source."""
    said = " ".join(str(error).split())
    if ".cc:" in said:
        said = said.split(".cc:", 1)[1].split(": ", 1)[-1]
    return said.rstrip(".")[:300]


def _package(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise InputError(
            f"answers by a schema need the package {name}, which cannot be imported; install the extra "
            "with: pip "
            "install 'rayrec[language]'"
        )
    return importlib.import_module(name)
