"""How much of a test is in `make test`: a seventh of Hypothesis' examples, some cases of a wide matrix.

All of them are in `make test-all`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

PROFILES = {"repeatable": 100, "quick": 15}
"""Examples of a test that says no number, by the profile's name (`--hypothesis-profile`)."""


def register_profiles() -> None:
    """The same examples every time, and no deadline: a busy machine is no failure."""
    for name, max_examples in PROFILES.items():
        settings.register_profile(name, derandomize=True, deadline=None, max_examples=max_examples)


def examples(count: int, **more: Any) -> settings:
    """Settings of a test that takes so many examples in the profile "repeatable", fewer in others.

    Args:
        more: of `hypothesis.settings`.
    """
    return settings(max_examples=share_of(count), **more)


def share_of(count: int) -> int:
    """The part of a number of examples that is made in the profile that is loaded."""
    return max(1, count * settings.default.max_examples // PROFILES["repeatable"])


def cases(every: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Cases for `parametrize`, of which all but the fast ones are marked as slow.

    Args:
        every: values, or tuples of several.
        fast: one for each mechanism, and those that differ most.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in fast else pytest.mark.slow
        )
        for case in every
    ]
