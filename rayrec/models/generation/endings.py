"""The shortest way to end a text that a grammar allows, wherever it stands.

A chart parser (Earley's) reads the text character by character. Beside each call of a rule it keeps how many
bytes all that follows the call takes at least, so that the shortest ending is found without a search:

    bytes of an ending = those to the end of the rule that is being read + those behind each call around it

An ending is a candidate: the caller checks it against the grammar before it is used.

Source: J. Earley, An Efficient Context-Free Parsing Algorithm, CACM 13 (1970).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rayrec.models.generation.bnf import Automaton, Range

NEVER = float("inf")
MOST_STEPS = 600
"""For one character. Grammars that people write take tens; one that reads a text in more and more ways takes
more with every character, of this parser and of the packages."""


class TooAmbiguousError(RuntimeError):
    """A text can be read in so many ways that to go on would hold up all other answers."""


class Step(NamedTuple):
    """The first part of the shortest way to the end of a rule."""

    character: int | None
    """None: a rule is called."""
    rule: int
    next: int


class ShortestWays:
    """Of every state of an automaton: bytes to the end of its rule, and the way there."""

    def __init__(self, automaton: Automaton, bytes_there: frozenset[int]) -> None:
        """
        Args:
            bytes_there: that are tokens by themselves; endings are made of these.
        """
        self.automaton = automaton
        self._bytes_there = bytes_there
        count = len(automaton.rule_of)
        self.closures: list[tuple[int, ...]] = [self._closure(state) for state in range(count)]
        self._characters: dict[tuple[Range, ...], int | None] = {}
        self.bytes_left: list[float] = [NEVER] * count
        self.steps: list[Step | None] = [None] * count
        self._find()

    def of_rule(self, rule: int) -> float:
        """Fewest bytes of a rule."""
        return self.bytes_left[self.automaton.starts[rule]]

    def text(self, state: int) -> list[int]:
        """Characters to the end of the state's rule."""
        points: list[int] = []
        waiting = [state]
        while waiting:
            step = self.steps[waiting.pop()]
            if step is None:
                continue
            waiting.append(step.next)
            if step.character is not None:
                points.append(step.character)
            else:
                waiting.append(self.automaton.starts[step.rule])
        return points

    def _closure(self, state: int) -> tuple[int, ...]:
        """States that are reached without a character, and say something."""
        automaton, seen, waiting = self.automaton, {state}, [state]
        while waiting:
            for other in automaton.jumps[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        return tuple(
            each
            for each in sorted(seen)
            if automaton.characters[each] or automaton.calls[each] or automaton.is_final[each]
        )

    def _cheapest(self, ranges: tuple[Range, ...]) -> int | None:
        """A character of a set that takes the fewest bytes."""
        if ranges not in self._characters:
            found = [
                (len(written), point)
                for first, last in ranges
                for point in (first, max(first, 0x20), max(first, 0x61), max(first, 0x30))
                if point <= last and not 0xD800 <= point <= 0xDFFF
                for written in (chr(point).encode(),)
                if self._bytes_there.issuperset(written)
            ]
            # A visible one, if there is any.
            self._characters[ranges] = (
                min(found, key=lambda one: (one[0], one[1] < 0x20, one[1]))[1] if found else None
            )
        return self._characters[ranges]

    def _find(self) -> None:
        """Dijkstra's algorithm from the ends of rules backward; a call waits for the length of its rule."""
        automaton, left, steps = self.automaton, self.bytes_left, self.steps
        count = len(left)
        before: list[list[tuple[float, int, Step]]] = [[] for _ in range(count)]
        callers: dict[int, list[tuple[int, int]]] = {}
        jumped: list[list[int]] = [[] for _ in range(count)]
        for state in range(count):
            for other in automaton.jumps[state]:
                jumped[other].append(state)
            for ranges, following in automaton.characters[state]:
                if (point := self._cheapest(ranges)) is not None:
                    size = len(chr(point).encode())
                    before[following].append((size, state, Step(point, -1, following)))
            for rule, following in automaton.calls[state]:
                callers.setdefault(rule, []).append((state, following))
        rule_of_start = {start: rule for rule, start in enumerate(automaton.starts)}
        called_before: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for rule, pairs in callers.items():
            for state, following in pairs:
                called_before[following].append((state, rule))
        queue: list[tuple[float, int]] = []

        def offer(state: int, cost: float, step: Step | None) -> None:
            if cost < left[state]:
                left[state], steps[state] = cost, step
                heapq.heappush(queue, (cost, state))

        for state in range(count):
            if automaton.is_final[state]:
                offer(state, 0, None)
        while queue:
            cost, state = heapq.heappop(queue)
            if cost > left[state]:
                continue
            for other in jumped[state]:
                offer(other, cost, steps[state])
            for num_bytes, other, step in before[state]:
                offer(other, cost + num_bytes, step)
            for other, rule in called_before[state]:
                inner = left[automaton.starts[rule]]
                if inner < NEVER:
                    offer(other, cost + inner, Step(None, rule, state))
            rule = rule_of_start.get(state, -1)
            for other, following in callers.get(rule, ()):
                if left[following] < NEVER:
                    offer(other, cost + left[following], Step(None, rule, following))


class Parent(NamedTuple):
    """A call that waits for the end of a rule."""

    following: int
    """State behind the call."""
    origin: int
    """Of the rule around it."""


@dataclass
class _Set:
    """What may be the case behind some characters."""

    items: set[tuple[int, int]] = field(default_factory=set)
    """(state, origin), with the states that are reached without a character."""
    waiting: dict[int, list[Parent]] = field(default_factory=dict)
    """By rule that is called here."""
    behind: dict[int, tuple[float, Parent | None]] = field(default_factory=dict)
    """By rule that begins here: fewest bytes of all behind it, and whose call it is."""
    is_done: set[tuple[int, int]] = field(default_factory=set)
    """(rule, origin) of what ends here."""
    is_whole: bool = False


class Chart:
    """A text as it is read; not thread-safe."""

    def __init__(self, ways: ShortestWays) -> None:
        self._ways = ways
        self._automaton = ways.automaton
        self._nullable = {rule for rule in range(len(self._automaton.starts)) if ways.of_rule(rule) == 0}
        self._sets: list[_Set] = []
        begin = _Set()
        begin.behind[self._automaton.root] = (0, None)
        self._sets.append(begin)
        start = self._automaton.starts[self._automaton.root]
        self._complete(begin, 0, [(state, 0) for state in ways.closures[start]])

    def __len__(self) -> int:
        """Characters that were read."""
        return len(self._sets) - 1

    def back_to(self, length: int) -> None:
        """Forget characters behind the first ones."""
        del self._sets[length + 1 :]

    def read(self, points: Sequence[int]) -> bool:
        """Read on, unless the grammar does not allow it: then nothing has changed.

        Raises:
            TooAmbiguousError: there are too many ways to read it.
        """
        length = len(self)
        for point in points:
            if not self._read_one(point):
                self.back_to(length)
                return False
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the text may end here."""
        return self._sets[-1].is_whole

    def ending(self) -> list[int] | None:
        """Characters of the shortest ending; None: there is none."""
        last = self._sets[-1]
        if last.is_whole:
            return []
        best: tuple[float, int, int] = (NEVER, -1, -1)
        for state, origin in last.items:
            rule = self._automaton.rule_of[state]
            # A state whose rule began here is on the way from a call, whose own state is cheaper or the same.
            cost = self._ways.bytes_left[state] + self._behind(origin, rule)[0]
            if self._automaton.characters[state] or self._automaton.calls[state]:
                best = min(best, (cost, state, origin))
        cost, state, origin = best
        if cost == NEVER:
            return None
        points = self._ways.text(state)
        parent = self._behind(origin, self._automaton.rule_of[state])[1]
        while parent is not None:
            points += self._ways.text(parent.following)
            parent = self._behind(parent.origin, self._automaton.rule_of[parent.following])[1]
        return points

    def _behind(self, origin: int, rule: int) -> tuple[float, Parent | None]:
        return self._sets[origin].behind.get(rule, (NEVER, None))

    def _read_one(self, point: int) -> bool:
        automaton, closures = self._automaton, self._ways.closures
        last = self._sets[-1]
        scanned = [
            (reached, origin)
            for state, origin in last.items
            for ranges, following in automaton.characters[state]
            if any(first <= point <= end for first, end in ranges)
            for reached in closures[following]
        ]
        if not scanned:
            return False
        following_set = _Set()
        self._sets.append(following_set)
        # Once each: a parser that met them again and again would count them, too.
        self._complete(following_set, len(self), list(dict.fromkeys(scanned)))
        return True

    def _complete(self, here: _Set, position: int, waiting: list[tuple[int, int]]) -> None:
        """Take in items, and all that follow of them without a character."""
        automaton, closures = self._automaton, self._ways.closures
        items, steps = here.items, 0
        while waiting:
            item = waiting.pop()
            steps += 1
            if item in items:
                continue
            if steps > MOST_STEPS:
                raise TooAmbiguousError(
                    "the form lets a text be read in too many ways, as a repetition within a repetition "
                    "does; write it without"
                )
            items.add(item)
            state, origin = item
            for rule, following in automaton.calls[state]:
                callers = here.waiting.get(rule)
                if callers is None:
                    callers = here.waiting[rule] = []
                    waiting += [(each, position) for each in closures[automaton.starts[rule]]]
                callers.append(Parent(following, origin))
                if rule in self._nullable:
                    waiting += [(each, origin) for each in closures[following]]
            if automaton.is_final[state]:
                rule = automaton.rule_of[state]
                if rule == automaton.root and origin == 0:
                    here.is_whole = True
                # A rule without characters is done with where it is called.
                if origin != position and (rule, origin) not in here.is_done:
                    here.is_done.add((rule, origin))
                    for parent in self._sets[origin].waiting.get(rule, ()):
                        waiting += [(each, parent.origin) for each in closures[parent.following]]
        self._price(here, position)

    def _price(self, here: _Set, position: int) -> None:
        """What is behind each rule that begins here."""
        left, rule_of = self._ways.bytes_left, self._automaton.rule_of
        within: list[tuple[int, Parent]] = []
        for rule, parents in here.waiting.items():
            best = here.behind.get(rule, (NEVER, None))
            for parent in parents:
                if parent.origin == position:
                    within.append((rule, parent))
                    continue
                known = self._sets[parent.origin].behind.get(rule_of[parent.following], (NEVER, None))
                cost = left[parent.following] + known[0]
                if cost < best[0]:
                    best = (cost, parent)
            here.behind[rule] = best
        # Those that begin here may go through each other, so until nothing changes.
        changed = True
        while changed:
            changed = False
            for rule, parent in within:
                known = here.behind.get(rule_of[parent.following], (NEVER, None))
                cost = left[parent.following] + known[0]
                if cost < here.behind[rule][0]:
                    here.behind[rule], changed = (cost, parent), True
