"""A calibration of costs that are known."""

import pytest

from rayrec.pipelines.capacity.calibration import Calibration, calibrated
from tests.pipelines.capacity.plans import CORES, made_of_costs, variants


@pytest.fixture(scope="session")
def calibration() -> Calibration:
    return calibrated([made_of_costs(work) for work in variants()], CORES, "a machine", "2026-11-26")
