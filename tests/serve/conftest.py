"""What tests of services share."""

import pytest

from tests.helpers import http


@pytest.fixture
def free_port() -> int:
    return http.free_port()
