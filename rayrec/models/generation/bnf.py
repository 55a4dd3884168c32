"""A grammar in xgrammar's notation as an automaton over characters, by which endings are found.

    root ::= (("{" "\"a\"" ": " number "}") | ("[" [0-9]* "]"))      one rule a line

Each rule is a small automaton: from a state lead characters, and calls of other rules. What follows a rule in
`(=...)` is a hint for the package that wrote it, and has no effect.

Not all of the notation is kept: a repetition of more than `MOST_REPEATED` is one without an end, and the
escapes of a pattern within a string of JSON are left out. What is found by this is checked by the grammar
itself before it is used, see `endings`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_REPEATED = 256
"""Of an element; more of them are taken for any number."""
MOST_STATES = 200_000
"""Of all rules together."""
LAST_CHARACTER = 0x10FFFF

Range = tuple[int, int]
"""First and last code point."""


class UnknownNotationError(ValueError):
    """A grammar has something that is not read here; the message is a clause."""


class EscapedCharacterError(UnknownNotationError):
    """What is to stand inside a string of JSON has a character that JSON writes with an escape."""

    def __init__(self) -> None:
        super().__init__("it names a character that JSON writes with an escape")


@dataclass
class Automaton:
    """All rules; states are numbered across them, and rules by their order."""

    names: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """First state of each rule."""
    characters: list[list[tuple[tuple[Range, ...], int]]] = field(default_factory=list)
    """By state: ranges, and the state behind them."""
    calls: list[list[tuple[int, int]]] = field(default_factory=list)
    """By state: a rule, and the state behind it."""
    jumps: list[list[int]] = field(default_factory=list)
    """By state: states that are reached without a character."""
    is_final: list[bool] = field(default_factory=list)
    rule_of: list[int] = field(default_factory=list)
    root: int = 0
    is_exact: bool = True
    """Whether it is the whole grammar: no long repetition was taken for one without an end."""

    def new_state(self, rule: int) -> int:
        if len(self.rule_of) >= MOST_STATES:
            raise UnknownNotationError("it has too many repetitions")
        self.characters.append([])
        self.calls.append([])
        self.jumps.append([])
        self.is_final.append(False)
        self.rule_of.append(rule)
        return len(self.rule_of) - 1


def read_grammar(text: str, read_regex: Callable[[str], str], in_string: bool = False) -> Automaton:
    """Read a grammar.

    Args:
        read_regex: the grammar of a regular expression, in the same notation.
        in_string: whether it writes the inside of a string of JSON.

    Raises:
        EscapedCharacterError: it can write there what JSON escapes, and nothing else in its place.
        UnknownNotationError: there is something else in it.
    """
    automaton = Automaton()
    _Reader(automaton, read_regex).read(text, "", in_string)
    if "root" not in automaton.names:
        raise UnknownNotationError("it has no rule root")
    automaton.root = automaton.names.index("root")
    _loop_tail_calls(automaton)
    return automaton


def _loop_tail_calls(automaton: Automaton) -> None:
    """Make a rule that ends with a call of itself go back to its start, which is the same language.

    That is how xgrammar writes every repetition. As a call, each round of it would wait for the next one, and
    a chart would keep all of them at every character.
    """
    for state, calls in enumerate(automaton.calls):
        rule = automaton.rule_of[state]
        kept = [
            (called, behind) for called, behind in calls if called != rule or not _ends(automaton, behind)
        ]
        if len(kept) < len(calls):
            automaton.jumps[state].append(automaton.starts[rule])
            automaton.calls[state] = kept


def _ends(automaton: Automaton, state: int) -> bool:
    """Whether the rule is at its end there, and nowhere else."""
    seen, waiting, is_final = {state}, [state], False
    while waiting:
        each = waiting.pop()
        if automaton.characters[each] or automaton.calls[each]:
            return False
        is_final = is_final or automaton.is_final[each]
        fresh = [other for other in automaton.jumps[each] if other not in seen]
        seen.update(fresh)
        waiting += fresh
    return is_final


_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])(?P<star>[*+?]?)'
    r'|(?P<regex>Regex\("(?P<pattern>(?:[^"\\]|\\.)*)"(?:, json_string=(?P<quoted>true|false))?\))'
    r"|(?P<repeat>\{(?P<least>\d+), ?(?P<most>-?\d+)\})|(?P<name>[A-Za-z_][\w.\-]*)|(?P<mark>[()|]))"
)
_ESCAPES = {"n": 10, "r": 13, "t": 9, "0": 0, "b": 8, "f": 12, "v": 11, "a": 7, "e": 27}
_DIGITS = {"x": 2, "u": 4, "U": 8}

Fragment = tuple[int, int]
"""First and last state of a part of a rule."""


class _Reader:
    def __init__(self, automaton: Automaton, read_regex: Callable[[str], str]) -> None:
        self._automaton, self._read_regex = automaton, read_regex
        self._numbers: dict[str, int] = {}

    def read(self, text: str, prefix: str, in_string: bool) -> None:
        """Take in all rules.

        Args:
            prefix: of the names of rules, so that those of several grammars differ.
            in_string: whether they write the inside of a string of JSON.
        """
        for line in text.splitlines():
            if not line.strip():
                continue
            name, found, body = line.partition(" ::= ")
            if not found:
                raise UnknownNotationError(f"it has the line {line[:40]!r}")
            rule = self._rule(prefix + name.strip())
            self._body(rule, body, prefix, in_string)

    def _rule(self, name: str) -> int:
        if name not in self._numbers:
            automaton, rule = self._automaton, len(self._numbers)
            self._numbers[name] = rule
            automaton.names.append(name)
            automaton.starts.append(automaton.new_state(rule))
        return self._numbers[name]

    def _body(self, rule: int, body: str, prefix: str, in_string: bool) -> None:
        self._rest = body
        self._prefix, self._in_string, self._current = prefix, in_string, rule
        first, last = self._choice()
        if not self._is_at_end:
            raise UnknownNotationError(f"it has {self._rest.strip()[:40]!r}")
        self._automaton.jumps[self._automaton.starts[rule]].append(first)
        self._automaton.is_final[last] = True

    @property
    def _is_at_end(self) -> bool:
        rest = self._rest.lstrip()
        return not rest or rest.startswith("(=(")  # what follows a rule is no part of it

    def _new(self) -> int:
        return self._automaton.new_state(self._current)

    def _choice(self) -> Fragment:
        first, last = self._new(), self._new()
        while True:
            begin, end = self._sequence()
            self._automaton.jumps[first].append(begin)
            self._automaton.jumps[end].append(last)
            match = _TOKEN.match(self._rest)
            if match is None or match["mark"] != "|":
                return first, last
            self._rest = self._rest[match.end() :]

    def _sequence(self) -> Fragment:
        first = last = self._new()
        while not self._is_at_end:
            match = _TOKEN.match(self._rest)
            if match is None:
                raise UnknownNotationError(f"it has {self._rest.strip()[:40]!r}")
            if match["mark"] in ("|", ")"):
                break
            self._rest = self._rest[match.end() :]
            make = self._element(match)
            least, most = self._repetition(match["star"] or "")
            last = self._repeated(last, make, least, most)
        return first, last

    def _repetition(self, star: str) -> tuple[int, int]:
        if star:
            return {"*": (0, -1), "+": (1, -1), "?": (0, 1)}[star]
        match = _TOKEN.match(self._rest)
        if match is None or match["repeat"] is None:
            return 1, 1
        self._rest = self._rest[match.end() :]
        return int(match["least"]), int(match["most"])

    def _element(self, match: re.Match[str]) -> Callable[[], Fragment]:
        """What makes a fragment of an element, as often as it is repeated."""
        if match["text"] is not None:
            points = _points(match["text"][1:-1])
            if self._in_string and any(map(_is_escaped, points)):
                raise EscapedCharacterError
            return lambda: self._chain([((point, point),) for point in points])
        if match["set"] is not None:
            ranges = _ranges(match["set"][1:-1])
            if self._in_string:
                ranges = _without_escaped(ranges)
            return lambda: self._chain([ranges])
        if match["regex"] is not None:
            return self._regex(match)
        if match["name"] is not None:
            rule = self._rule(self._prefix + match["name"])
            return lambda: self._called(rule)
        inner = self._choice()
        close = _TOKEN.match(self._rest)
        if close is None or close["mark"] != ")":
            raise UnknownNotationError("a bracket is not closed")
        self._rest = self._rest[close.end() :]
        following = _TOKEN.match(self._rest)
        if following is not None and following["repeat"] is not None:
            raise UnknownNotationError("a group is repeated")
        return lambda: inner

    def _regex(self, match: re.Match[str]) -> Callable[[], Fragment]:
        pattern = "".join(map(chr, _points(match["pattern"])))
        prefix = f"{self._prefix}regex {len(self._numbers)} "
        saved = (self._rest, self._prefix, self._in_string, self._current)
        self.read(self._read_regex(pattern), prefix, self._in_string or match["quoted"] == "true")
        self._rest, self._prefix, self._in_string, self._current = saved
        rule = self._rule(prefix + "root")
        return lambda: self._called(rule)

    def _chain(self, sets: list[tuple[Range, ...]]) -> Fragment:
        first = last = self._new()
        for ranges in sets:
            following = self._new()
            self._automaton.characters[last].append((ranges, following))
            last = following
        return first, last

    def _called(self, rule: int) -> Fragment:
        first, last = self._new(), self._new()
        self._automaton.calls[first].append((rule, last))
        return first, last

    def _repeated(self, last: int, make: Callable[[], Fragment], least: int, most: int) -> int:
        jumps = self._automaton.jumps
        for _ in range(least):
            begin, end = make()
            jumps[last].append(begin)
            last = end
        if most == least:
            return last
        if most < 0 or most > MOST_REPEATED:
            self._automaton.is_exact &= most < 0
            loop = self._new()
            jumps[last].append(loop)
            begin, end = make()
            jumps[loop].append(begin)
            jumps[end].append(loop)
            return loop
        behind = self._new()
        jumps[last].append(behind)
        for _ in range(most - least):
            begin, end = make()
            jumps[last].append(begin)
            jumps[end].append(behind)
            last = end
        return behind


def _points(text: str) -> list[int]:
    """Code points of a text with escapes."""
    points, position = [], 0
    while position < len(text):
        point, position = _point(text, position)
        points.append(point)
    return points


def _point(text: str, position: int) -> tuple[int, int]:
    """(a code point, where it ends)."""
    if text[position] != "\\":
        return ord(text[position]), position + 1
    kind = text[position + 1]
    if kind in _DIGITS:
        end = position + 2 + _DIGITS[kind]
        return int(text[position + 2 : end], 16), end
    return _ESCAPES.get(kind, ord(kind)), position + 2


def _ranges(text: str) -> tuple[Range, ...]:
    """Of what stands in square brackets."""
    is_negated = text.startswith("^")
    position, ranges = int(is_negated), []
    while position < len(text):
        first, position = _point(text, position)
        last = first
        if text[position : position + 1] == "-" and position + 1 < len(text):
            last, position = _point(text, position + 1)
        ranges.append((first, last))
    return _all_but(ranges) if is_negated else tuple(ranges)


def _all_but(ranges: list[Range]) -> tuple[Range, ...]:
    found, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    if begin <= LAST_CHARACTER:
        found.append((begin, LAST_CHARACTER))
    return tuple(found)


_ESCAPED: tuple[Range, ...] = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""Characters that a string of JSON writes in another way."""


def _without_escaped(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    return _all_but([*_all_but(list(ranges)), *_ESCAPED])


def _is_escaped(point: int) -> bool:
    return any(first <= point <= last for first, last in _ESCAPED)
