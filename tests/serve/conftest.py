"""What tests of services share."""

import gc
from types import SimpleNamespace

import pytest

from rayrec.serve.app import loading
from tests.helpers import http


@pytest.fixture(autouse=True)
def no_search_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service begins with one, which takes a second in a process that has made all that tests make."""
    monkeypatch.setattr(
        loading, "gc", SimpleNamespace(collect=lambda: 0, freeze=gc.freeze, unfreeze=gc.unfreeze)
    )


@pytest.fixture
def free_port() -> int:
    return http.free_port()
