"""A peer's process: its own environment, and windows that it measures when it is told to."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from benchmarks.peer_process import PeerProcess, steps_per_second


def answers_of(name: str) -> Callable[[int], float]:
    """In the process: what the environment says of `name`, times the number of steps."""
    value = float(os.environ[name])
    return lambda num_steps: num_steps * value


def test_a_peer_has_an_environment_of_its_own_and_ours_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYREC_TEST_PEER", "1")
    monkeypatch.delenv("RAYREC_TEST_NEW", raising=False)

    peer = PeerProcess(answers_of, ("RAYREC_TEST_PEER",), {"RAYREC_TEST_PEER": "3", "RAYREC_TEST_NEW": "4"})

    try:
        assert (os.environ["RAYREC_TEST_PEER"], "RAYREC_TEST_NEW" in os.environ) == ("1", False)
        assert [peer.rate(2), peer.rate(5)] == [6.0, 15.0]
    finally:
        peer.stop()


def test_a_window_trains_as_many_steps_as_it_is_told():
    losses = iter(range(100))
    measure = steps_per_second(losses)

    assert measure(7) > 0
    assert next(losses) == 7
