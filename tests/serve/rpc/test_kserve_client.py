"""The Open Inference Protocol, spoken by KServe's own clients over HTTP and gRPC.

Their package wants other versions of what Ray takes, and is no requirement of the tests. To run these, put it
in a folder of its own, which RAYREC_KSERVE names:

    pip install --no-deps --target FOLDER kserve orjson 'cloudevents<2' kubernetes grpc-interceptor \\
        timing-asgi tabulate asgiref deprecation requests-oauthlib oauthlib durationpy websocket-client
    RAYREC_KSERVE=FOLDER pytest tests/serve/rpc/test_kserve_client.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.serve.engine.service import RecommendationService
from tests.serve.fake_recommender import FakeRecommender, api_of
from tests.serve.rpc.answering import answering

FOLDER = os.environ.get("RAYREC_KSERVE")
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(FOLDER is None, reason="RAYREC_KSERVE names no folder of KServe's clients")


@pytest.fixture(scope="module")
def said():
    assert FOLDER is not None, "else these are skipped"
    with answering(api_of(RecommendationService(FakeRecommender(), max_k=50))) as addresses:
        calls = subprocess.run(
            [sys.executable, "-m", "tests.serve.rpc.kserve_calls", addresses.http, addresses.grpc],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([FOLDER, str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert calls.returncode == 0, calls.stderr
    return json.loads(calls.stdout)


@pytest.mark.parametrize(
    ("protocol", "health", "refused"),
    [("http", [True, True, True], 404), ("grpc", [True, True, True, False], "NOT_FOUND")],
)
def test_kserves_client_finds_what_it_asks_for(said, protocol, health, refused):
    expected = {"model": "recommend", "id": "r1", "items": [["m0", "m1"]] * 2, "scores": [[-0.5, -1.5]] * 2}

    assert said[protocol]["health"] == health
    assert said[protocol]["answers"] == {
        f"{name} {is_binary}": expected for name in ("user_id", "history") for is_binary in (False, True)
    }
    assert said[protocol]["refused"] == refused
