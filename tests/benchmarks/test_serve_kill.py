"""A replica is killed while clients ask: nobody gets a wrong answer, and who tries once more gets one."""

from __future__ import annotations

import pytest

from benchmarks.serve_kill import measured
from tests.helpers.runs import make_run


@pytest.mark.ray
@pytest.mark.slow
def test_a_replica_that_is_killed_costs_no_answer_that_is_asked_for_again(tmp_path):
    """On a cluster of its own, behind HAProxy where there is one, with every answer held to the model's."""
    checked, kills = measured(make_run(tmp_path), seconds=30.0, environment={}, most=1)

    assert len(kills.pids) == 1
    assert checked.wrong == []
    # On a busy machine one replica may be too few for a moment: that is a rejection, not a lost answer.
    assert checked.failed == checked.failures["503, again"]
    assert sum(checked.versions.values()) == checked.requests > 100
