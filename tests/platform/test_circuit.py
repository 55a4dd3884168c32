"""Who does not answer is left alone for a moment."""

import traceback

import pytest

from rayrec.platform.circuit import Circuit
from rayrec.platform.errors import UnavailableError


def fail():
    raise UnavailableError("the features part", 1, "gone")


def test_nobody_is_asked_in_the_pause_and_somebody_after_it():
    now = [0.0]
    circuit = Circuit(2.0, clock=lambda: now[0])
    with pytest.raises(UnavailableError):
        circuit(fail)

    with pytest.raises(UnavailableError, match="gone"):
        circuit(lambda: "answer")
    now[0] = 2.0
    assert circuit(lambda: "answer") == "answer"


def test_refusals_do_not_grow():
    circuit, depths = Circuit(2.0, clock=lambda: 0.0), []
    for _ in range(5):
        with pytest.raises(UnavailableError) as found:
            circuit(fail)
        depths.append(len(traceback.extract_tb(found.value.__traceback__)))

    assert depths[1:] == depths[1:2] * 4
