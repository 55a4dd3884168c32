"""`rayrec agree`: runs and services on the same requests."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving
from tests.cli.commands import answer, refused
from tests.helpers.runs import make_run

USERS = tuple(f"u{number}" for number in range(6))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two of different models."""
    folder = tmp_path_factory.mktemp("agree")
    return make_run(folder / "one"), make_run(folder / "other", "hstu")


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_agrees_with_itself_and_with_its_service(runs, tmp_path):
    requests = lines(tmp_path / "requests.jsonl", [{"user_id": user, "k": 3} for user in USERS])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    with serving(runs[0], ServeConfig(port=port, single_process=True)) as url:
        found = answer("agree", runs[0], url, "--requests", requests)

    assert found["requests"] == len(USERS)
    assert found["figures"]["equal"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_differences_and_accuracy_of_two_runs(runs, tmp_path):
    plain = [{"user_id": user, "k": 2} for user in USERS]
    requests = lines(tmp_path / "requests.jsonl", plain)
    other = tmp_path / "differences.jsonl"
    answer("agree", *runs, "--requests", requests, "--differences", other)
    differing = [json.loads(line) for line in other.read_text().splitlines()]
    assert differing  # of two models
    assert differing[0]["a"] != differing[0]["b"]

    place = int(differing[0]["request"].rsplit(":", 1)[1]) - 1
    known = [row | ({"expected": differing[0]["a"]} if at == place else {}) for at, row in enumerate(plain)]
    found = answer("agree", *runs, "--requests", lines(requests, known))

    assert found["known"] == 1
    assert found["figures"]["accuracy A"]["value"] == 1.0
    assert found["figures"]["equal"]["value"] == pytest.approx(1 - len(differing) / len(USERS))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "requests.jsonl:2: is not JSON"),
        ("[1]", "requests.jsonl:2: expected an object"),
        ('{"user": "u1"}', "requests.jsonl:2: user: unknown field; known are user_id"),
        ('{"user_id": "u1", "k": 0}', "requests.jsonl:2: k: input should be greater"),
        ('{"user_id": "u1", "expected": 7}', "requests.jsonl:2: expected: must be the id of an item"),
    ],
)
def test_a_line_that_is_no_request_is_named(runs, tmp_path, line, message):
    path = tmp_path / "requests.jsonl"
    path.write_text('{"user_id": "u1"}\n' + line + "\n")

    assert message in refused("agree", *runs, "--requests", path)


def test_what_cannot_answer_is_named(runs, tmp_path):
    path = lines(tmp_path / "requests.jsonl", [{"user_id": "u1"}])
    unreachable = "http://127.0.0.1:9"

    assert "does not answer" in refused("agree", runs[0], unreachable, "--requests", path, code=1)
    assert "leave out its device" in refused(
        "agree", runs[0], unreachable, "--requests", path, "--device-b", "cpu"
    )
    token = ("--token-file-b", path)
    assert "is no service and asks for no token" in refused("agree", *runs, "--requests", path, *token)
    assert "there is no request" in refused("agree", *runs, "--requests", lines(path, []))


@pytest.mark.slow
def test_a_request_that_fails_is_counted_and_named(runs, tmp_path):
    """A request that is refused counts as different and wrong, on either side, and is not dropped."""
    rows = [{"user_id": user, "k": 1, "expected": "no item"} for user in USERS]
    rows[2]["k"] = 100_000  # more than a service gives
    requests, differences = lines(tmp_path / "requests.jsonl", rows), tmp_path / "differences.jsonl"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    with serving(runs[0], ServeConfig(port=port, single_process=True)) as url:
        found = answer("agree", runs[0], url, "--requests", requests, "--differences", differences)

    assert found["failed"] == {"a": 1, "b": 1}
    assert found["requests"] == found["known"] == len(USERS)
    assert found["figures"]["equal"]["value"] == pytest.approx(5 / 6)
    assert (
        found["figures"]["failed A"]["value"] == found["figures"]["failed B"]["value"] == pytest.approx(1 / 6)
    )
    (line,) = map(json.loads, differences.read_text().splitlines())
    assert line["request"].endswith("requests.jsonl:3")
    assert line["a"] is line["b"] is None
    assert "status 4" in line["b_failed"]


def test_two_precisions_of_a_run(runs, tmp_path):
    requests = lines(tmp_path / "requests.jsonl", [{"user_id": user, "k": 3} for user in USERS])

    found = answer("agree", runs[0], runs[0], "--requests", requests, "--precision-b", "bfloat16")

    assert found["figures"]["overlap"]["value"] > 0.5
    assert "leave out its precision" in refused(
        "agree", runs[0], "http://127.0.0.1:9", "--requests", requests, "--precision-b", "bfloat16"
    )


def test_a_token_goes_to_its_service_alone(runs, tmp_path):
    seen = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/other")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_):
            pass

    path = lines(tmp_path / "requests.jsonl", [{"user_id": "u1"}])
    token = tmp_path / "token"
    token.write_text("a-secret-of-16-letters")
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        said = refused("agree", runs[0], url, "--requests", path, "--token-file-b", token)
        server.shutdown()

    assert "status 302" in said
    assert seen == [("/v1/recommend", "Bearer a-secret-of-16-letters")]
