"""Calls of other deployments: what is not answered is told apart from what fails."""

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from rayrec.platform.errors import UnavailableError
from rayrec.serve.on_ray.handle_calls import unanswered_by


@pytest.mark.parametrize(
    "error", [TimeoutError(), ActorDiedError(), DeploymentUnavailableError(DeploymentID(name="dense"))]
)
def test_who_did_not_answer_is_named(error):
    with pytest.raises(UnavailableError, match="the dense part") as found, unanswered_by("the dense part"):
        raise error
    assert found.value.reason


def test_what_a_replica_raises_stays_as_it_is():
    with pytest.raises(ValueError, match="as it is"), unanswered_by("the dense part"):
        raise ValueError("as it is")
