"""An event that is posted to one process is in the answers of another one."""

from __future__ import annotations

import pytest

from benchmarks.graph_fresh import delays
from tests.helpers.redis_server import RedisServer
from tests.helpers.runs import make_run

NUM_POSTS = 5


@pytest.fixture(params=["lmdb", "redis"])
def store(request, tmp_path):
    """Address of none yet."""
    if request.param == "lmdb":
        yield str(tmp_path / "events")
        return
    server = RedisServer(tmp_path)
    yield server.url
    server.stop()


@pytest.mark.slow
def test_two_processes_know_what_was_posted_to_one_of_them(store, tmp_path):
    run = make_run(tmp_path)

    assert len(delays(run, tmp_path / "data", store, NUM_POSTS)) == NUM_POSTS
