"""A regular expression in a form in which a text can be read in one way only.

A package reads `(a*)*b` in as many ways as a text can be divided, and takes the cube of its length. The
automaton of an expression becomes a deterministic one by the subset construction, and that a grammar again,
with a rule for each of its states. Expressions whose automaton is large stay as they are.

Source: M. O. Rabin and D. Scott, Finite Automata and Their Decision Problems, IBM Journal 3 (1959).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from rayrec.models.generation.bnf import LAST_CHARACTER, Automaton, Range

MOST_STATES = 64
"""Packages make masks for each of them."""
MOST_PLACES = 512
"""In one state."""

Place = tuple[int, tuple[int, ...]]
"""(a state, those behind the calls around it)."""


class _TooLargeError(Exception):
    pass


def unambiguous(automaton: Automaton) -> tuple[str, Automaton] | None:
    """The same expression in xgrammar's notation, and as one rule of an automaton.

    None: texts are read in one way as it is, or this would be large, or another language.
    """
    if not automaton.is_exact:
        return None
    try:
        states, has_choice = _deterministic(automaton)
    except _TooLargeError:
        return None
    if not has_choice:
        return None
    flat = Automaton(["root"], [0])
    lines = ["root ::= state0"]
    for _ in states:
        flat.new_state(0)
    for number, state in enumerate(states):
        flat.is_final[number] = state.is_final
        flat.characters[number] = [(tuple(ranges), target) for target, ranges in state.moves.items()]
        parts = ['""'] if state.is_final else []
        parts += [f"{_written(ranges)} state{target}" for target, ranges in state.moves.items()]
        lines.append(f"state{number} ::= {' | '.join(parts)}")
    return "\n".join([*lines, ""]), flat


@dataclass
class _State:
    is_final: bool
    moves: dict[int, list[Range]] = field(default_factory=dict)
    """By number of the state that is reached."""


def _deterministic(automaton: Automaton) -> tuple[list[_State], bool]:
    """(states, the first one first; whether a text could be read in several ways before)."""
    start, has_choice = _closed(automaton, [(automaton.starts[automaton.root], ())])
    numbers, waiting, states = {start: 0}, [start], []
    for places in waiting:
        state = _State(any(_is_end(automaton, place) for place in places))
        states.append(state)
        for first, last in _pieces(automaton, places):
            reached = [
                (following, behind)
                for place, behind in places
                for ranges, following in automaton.characters[place]
                if any(low <= first <= high for low, high in ranges)
            ]
            if not reached:
                continue
            target, has_ways = _closed(automaton, reached)
            has_choice = has_choice or has_ways or len(reached) > 1
            if target not in numbers:
                if len(numbers) == MOST_STATES:
                    raise _TooLargeError
                numbers[target] = len(numbers)
                waiting.append(target)
            state.moves.setdefault(numbers[target], []).append((first, last))
    return states, has_choice


def _closed(automaton: Automaton, places: Iterable[Place]) -> tuple[frozenset[Place], bool]:
    """(with all places that are reached without a character, whether one of them is in several ways)."""
    waiting = list(places)
    seen, has_ways = set(waiting), False
    while waiting:
        state, behind = waiting.pop()
        found = [(other, behind) for other in automaton.jumps[state]]
        found += [
            (automaton.starts[rule], (following, *behind)) for rule, following in automaton.calls[state]
        ]
        if automaton.is_final[state] and behind:
            found.append((behind[0], behind[1:]))
        fresh = [place for place in found if place not in seen]
        has_ways = has_ways or len(fresh) < len(found)
        seen.update(fresh)
        waiting += fresh
        if len(seen) > MOST_PLACES:
            raise _TooLargeError
    # A state that says nothing differs in nothing.
    told = frozenset(place for place in seen if automaton.characters[place[0]] or _is_end(automaton, place))
    return told, has_ways


def _is_end(automaton: Automaton, place: Place) -> bool:
    return automaton.is_final[place[0]] and not place[1]


def _pieces(automaton: Automaton, places: Iterable[Place]) -> list[Range]:
    """Ranges of characters that the places do not tell apart."""
    edges = {0, LAST_CHARACTER + 1}
    for state, _ in places:
        for ranges, _following in automaton.characters[state]:
            for first, last in ranges:
                edges |= {first, last + 1}
    ordered = sorted(edges)
    return [(first, after - 1) for first, after in itertools.pairwise(ordered)]


def _written(ranges: Iterable[Range]) -> str:
    joined: list[Range] = []
    for first, last in sorted(ranges):
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return "[" + "".join(f"{_escaped(first)}-{_escaped(last)}" for first, last in joined) + "]"


def _escaped(point: int) -> str:
    return f"\\U{point:08x}"
