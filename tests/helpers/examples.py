"""How many examples Hypothesis makes for a test: all of them in `make test-all`, a quarter in `make test`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

PROFILES = {"repeatable": 100, "quick": 25}
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
