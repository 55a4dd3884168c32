"""The gateway: who answers whom, and what nobody computes."""

import asyncio
import gzip
import json
import pickle
from collections import Counter

import pytest
from fastapi.testclient import TestClient

from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import keeps_lists
from rayrec.serve.config.admission import OPEN, AdmissionConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.services import ServicesConfig
from rayrec.serve.on_ray import http_messages
from rayrec.serve.on_ray.deployments import settings_of_sparse, targets_of
from rayrec.serve.on_ray.gateway import Gateway, build_gateway
from rayrec.serve.on_ray.http_messages import HttpAnswer, HttpRequest
from rayrec.serve.protocols.tensor_codec import HEADER_LENGTH
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.wire.deadlines import NO_TIME_HEADER
from tests.serve.slow_bodies import posted, under_way

SPLIT = {
    "targets": {"new": {"run": "other"}},
    "routing": {"experiment": "e1", "weights": {"main": 0.5, "new": 0.5}},
}


class Target:
    """Answers with what it was asked."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, []
        self.headers = ((b"content-type", b"application/json"),)
        self.errors = []
        self.let = None

    async def __call__(self, request: HttpRequest) -> HttpAnswer:
        self.asked.append(request)
        if self.errors:
            raise self.errors.pop(0)
        if self.let is not None:
            await self.let.wait()
        body = json.dumps({"by": self.name, "path": request.path}).encode()
        return HttpAnswer(200, self.headers, body)


def client_of(settings=None, admission=OPEN, timeout_s=5.0, with_events=True, meters=()):
    targets = {name: Target(name) for name in ("main", *(settings or {}).get("targets", {}))}
    events = Target("features") if with_events else None
    gateway = Gateway(ServicesConfig.parse(settings or {}), admission, targets, events, timeout_s)
    return TestClient(build_gateway(gateway, meters)), targets, events


def test_all_goes_to_main_but_events_and_the_probe_of_life():
    client, targets, events = client_of()

    for path in ("/v1/recommend", "/v1/completions", "/v2/models/recommend/infer"):
        answer = client.post(path, json={"user_id": "u1"})
        assert (answer.json(), answer.headers["x-target"]) == ({"by": "main", "path": path}, "main")
    assert client.get("/").json()["by"] == "main"
    assert client.get("/openapi.json?pretty=1").json() == {"by": "main", "path": "/openapi.json"}
    assert client.post("/v1/events", json=[]).json()["by"] == "features"
    assert client.get("/health/live").json() == {"status": "live"}

    assert targets["main"].asked[-1].query == b"pretty=1"
    assert json.loads(targets["main"].asked[0].body) == {"user_id": "u1"}
    assert len(events.asked) == 1


def test_lists_are_put_to_main_and_kept_by_one_process_only_where_there_is_one():
    client, targets, _ = client_of()
    put = client.put("/v1/lists/stock", json={"items": ["i1"]})
    assert put.json() == {"by": "main", "path": "/v1/lists/stock"}
    assert (targets["main"].asked[-1].method, targets["main"].asked[-1].body) == ("PUT", b'{"items":["i1"]}')
    assert client.delete("/v1/lists/stock").json()["by"] == "main"

    def keeps(settings, **more):
        return keeps_lists(settings_of_sparse(ServeConfig.parse({"services": settings, **more})))

    assert keeps({})
    assert not keeps({"sparse": {"replicas": 2}})
    assert not keeps(SPLIT)
    assert keeps({"sparse": {"replicas": 2}}, lists="/folder")


@pytest.mark.parametrize(("settings", "is_told"), [(None, True), (SPLIT, False)], ids=["one", "two"])
def test_haproxy_is_told_of_a_target_without_time_where_it_is_the_only_one(settings, is_told):
    client, targets, _ = client_of(settings)
    for target in targets.values():
        target.headers += ((b"x-no-time", b"1"),)
    answer = client.post("/v1/recommend", json={"user_id": "u1"})
    assert (NO_TIME_HEADER in answer.headers) == is_told


def test_without_features_main_says_that_nobody_takes_events():
    client, _, _ = client_of(with_events=False)

    assert client.post("/v1/events", json=[]).json()["by"] == "main"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        lambda user: {"json": {"user_id": user}},
        lambda user: {"json": {"user": user, "prompt": ""}},
        lambda user: {"content": b"tensors", "headers": {"X-User-Id": user}},
    ],
    ids=["user_id", "user", "header"],
)
def test_a_user_stays_with_a_target_and_users_are_divided_by_weight(asked):
    client, _, _ = client_of(SPLIT)

    by_user = [
        {client.post("/v1/recommend", **asked(f"u{user}")).headers["x-target"] for _ in range(2)}
        for user in range(100)
    ]

    assert all(len(targets) == 1 for targets in by_user)
    counts = Counter(next(iter(targets)) for targets in by_user)
    assert 35 < counts["new"] < 65
    # The same everywhere: also where the id is a number, or is said in another way.
    again = client.post("/v1/recommend", headers={"X-User-Id": "u7"}, json={"user_id": "u8"})
    assert again.headers["x-target"] in by_user[7]


def test_nobody_is_divided_at_random_and_odd_bodies_go_somewhere():
    client, _, _ = client_of(SPLIT)

    bodies = [b"", b"{", b"[1]", b'{"user_id": true}', b'{"user_id": "\\ud800"}', b"[" * 100_000]
    for body in bodies:
        assert client.post("/v1/recommend", content=body).status_code == 200
    found = {client.post("/v1/recommend", json={}).headers["x-target"] for _ in range(60)}
    assert found == {"main", "new"}


def test_a_shadow_gets_the_same_and_nobody_waits_for_it():
    settings = {
        "targets": {"new": {"run": "other"}},
        "shadow": {"target": "new", "share": 1.0, "max_in_flight": 1},
    }
    meter = PrometheusMeter()
    client, targets, _ = client_of(settings, meters=[meter])
    targets["new"].let = asyncio.Event()  # never set

    with client:
        for _ in range(3):
            assert client.post("/v1/recommend", json={"user_id": "u1"}).json()["by"] == "main"

    assert len(targets["main"].asked) == 3
    assert targets["new"].asked == targets["main"].asked[:1]
    shown = meter.page().decode()
    assert "rayrec_gateway_shadow_sent_total 1.0" in shown
    assert "rayrec_gateway_shadow_dropped_total 2.0" in shown
    assert 'rayrec_requests_total{route="/v1/recommend",status="200"} 3.0' in shown


def test_a_shadow_that_fails_is_counted_as_failed_and_one_that_refuses_as_answered():
    """Otherwise, counts show no failures of a version that answers nobody."""
    settings = {"targets": {"new": {"run": "other"}}, "shadow": {"target": "new", "share": 1.0}}
    targets, answered = {"main": Target("main")}, []

    async def new(request: HttpRequest) -> HttpAnswer:
        status = json.loads(request.body)["k"]
        answered.append(status)
        if status == 1:
            raise ConnectionError("the replica is gone")
        return HttpAnswer(status, (), b"{}")

    gateway = Gateway(ServicesConfig.parse(settings), OPEN, targets | {"new": new}, None, 5.0)

    async def asked() -> None:
        for status in (200, 422, 500, 503, 1):
            body = json.dumps({"k": status}).encode()
            request = HttpRequest("POST", "/v1/recommend", b"", (), body, None)
            assert (await gateway._answer(request)).status == 200
        while gateway.shadow.in_flight:
            await asyncio.sleep(0)

    asyncio.run(asked())
    counts = gateway.shadow.counts
    assert answered == [200, 422, 500, 503, 1, 1]  # a replica that is gone is asked for a second time
    assert (counts.sent, counts.answered, counts.failed) == (5, 2, 3)


def test_limits_hold_for_all_targets_together_and_leave_the_rest_alone():
    admission = AdmissionConfig.parse({"callers": {"rate": 0.001, "burst": 2}})
    client, targets, _ = client_of(SPLIT, admission)

    statuses = [client.post("/v1/recommend", json={"user_id": f"u{user}"}) for user in range(4)]
    other = client.post("/v1/recommend", json={}, headers={"X-Caller-Key": "other"})

    assert [answer.status_code for answer in statuses] == [200, 200, 429, 429]
    assert int(statuses[-1].headers["retry-after"]) > 0
    assert other.status_code == 200
    assert sum(len(target.asked) for target in targets.values()) == 3
    assert client.get("/health/ready").status_code == 200
    assert client.post("/v1/events", json=[]).status_code == 429


def infer_message(num_rows):
    users = {"name": "user_id", "datatype": "BYTES", "shape": [num_rows], "data": ["u"] * num_rows}
    return {"inputs": [users]}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v2/models/recommend/infer", infer_message),
        ("/v2/models/recommend/versions/1/infer", infer_message),
        ("/v1/completions", lambda count: {"model": "recommend", "prompt": ["i1"] * count}),
    ],
)
def test_every_row_of_a_message_counts_as_in_one_process(path, message):
    admission = AdmissionConfig.parse({"callers": {"rate": 0.001, "burst": 5, "concurrency": 8}})
    client, targets, _ = client_of(admission=admission)

    answers = [client.post(path, json=message(count)) for count in (6, 3, 3, 2, 1)]

    assert [answer.status_code for answer in answers] == [400, 200, 429, 200, 429]
    error = answers[0].json()["error"]
    sentence = "6 rows or prompts in one request; send from 1 to 5"
    assert sentence == (error if isinstance(error, str) else error["message"])
    assert len(targets["main"].asked) == 2


@pytest.mark.parametrize("packs", [False, True])
def test_rows_are_counted_whatever_a_message_looks_like(packs):
    def message(path, body, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if packs:
            body, headers["content-encoding"] = gzip.compress(body), "gzip"
        pairs = tuple((name.encode(), value.encode()) for name, value in headers.items())
        return HttpRequest("POST", path, b"", pairs, body, None)

    infer = "/v2/models/recommend/infer"
    head = json.dumps(infer_message(7)).encode()
    length = str(len(head))
    assert message(infer, head + b"\0\1", **{HEADER_LENGTH.lower(): length}).contents.num_rows == 7
    assert message("/v1/completions", {"prompt": "i1"}).contents.num_rows == 1
    assert message("/v1/recommend", {"user_id": 7}).contents.num_rows == 1
    assert message("/v1/recommend", {"user_id": 7}).user == "7"
    for odd in (
        b"",
        b"{",
        b"[]",
        {"inputs": [1, {"shape": [None]}, {"shape": 3}]},
        {"prompt": []},
        b"[" * 10**5,
    ):
        assert message(infer, odd).contents.num_rows == 1
        assert message(infer, odd).user is None


def test_the_body_of_a_message_is_read_once_for_its_rows_and_its_user(monkeypatch):
    read = []
    parsed_json = http_messages.parsed_json
    monkeypatch.setattr(http_messages, "parsed_json", lambda body: read.append(body) or parsed_json(body))
    admission = AdmissionConfig.parse({"callers": {"rate": 100}})
    client, targets, _ = client_of(SPLIT, admission)

    answer = client.post("/v1/recommend", json={"user_id": "u7"})

    assert (answer.status_code, len(read)) == (200, 1)
    (asked,) = [each for target in targets.values() for each in target.asked]
    there = pickle.loads(pickle.dumps(asked))
    assert (there, there.user, len(read)) == (asked, "u7", 1)


def test_who_sends_a_body_slowly_has_no_place_meanwhile():
    admission = AdmissionConfig.parse({"service": {"concurrency": 1}})
    target, events = Target("main"), Target("features")
    api = build_gateway(Gateway(ServicesConfig(), admission, {"main": target}, events, 5.0))

    async def scenario():
        slow = [await under_way(api, path) for path in ("/v1/recommend", "/v1/events")]
        answered = await posted(api, "/v1/recommend", b"{}")
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return answered

    assert asyncio.run(scenario()) == 200
    assert len(target.asked) == 1


def test_who_goes_away_is_asked_again_once_but_events_are_not_sent_twice():
    client, targets, events = client_of()
    targets["main"].errors = [RuntimeError("the replica died")]
    events.errors = [RuntimeError("the replica died")]

    assert client.post("/v1/recommend", json={}).status_code == 200
    assert len(targets["main"].asked) == 2
    lost = client.post("/v1/events", json=[])
    assert (lost.status_code, lost.json()) == (503, {"error": "features does not answer now; try again"})
    assert lost.headers["retry-after"] == "1"
    assert len(events.asked) == 1


def test_a_target_that_does_not_answer_is_a_503_in_the_form_of_the_protocol():
    client, targets, _ = client_of(timeout_s=0.05)
    targets["main"].errors = [RuntimeError("gone"), RuntimeError("gone")]
    assert client.post("/v2/models/recommend/infer", json={}).status_code == 503
    targets["main"].let = asyncio.Event()

    late = client.post("/v1/completions", json={})

    assert late.status_code == 503
    assert late.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"targets": {"main": {"run": "x"}}}, "'main' is what the service is started with"),
        ({"targets": {"new": {"run": "x"}}}, "nobody would ask 'new'"),
        ({"routing": {"experiment": "e", "weights": {"other": 1}}}, "there is no target 'other'"),
        ({"shadow": {"target": "other", "share": 0.1}}, "there is no target 'other'"),
        ({"dense": {"replicas": 2, "max_replicas": 1}}, "1 are fewer than the 2"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        ServicesConfig.parse(settings)


def test_replicas_in_front_have_room_for_what_those_behind_hold():
    services = {**SPLIT, "gateway": {"replicas": 3}, "sparse": {"replicas": 2, "max_replicas": 4}}
    held = 64 * 4 * 2

    assert ServeConfig.parse({"services": services}).max_in_flight == -(-held // 3)
    assert ServeConfig.parse({"max_waiting": 7}).max_in_flight == 7
    limited = {"services": services, "admission": {"service": {"concurrency": 20}}}
    assert ServeConfig.parse(limited).max_in_flight == 20


def test_what_a_shadow_answers_is_not_logged_and_rows_name_their_target():
    services = {
        "targets": {"new": {"run": "other"}, "next": {"run": "third"}},
        "routing": {"experiment": "e1", "weights": {"main": 0.5, "new": 0.5}},
        "shadow": {"target": "next", "share": 0.5},
    }
    config = ServeConfig.parse({"services": services, "request_log": {"folder": "log"}})
    settings = {name: each for name, (_, each) in targets_of("/run", config, config.services).items()}

    assert {name: each.target for name, each in settings.items()} == {name: name for name in settings}
    assert [name for name, each in settings.items() if each.request_log is None] == ["next"]


def test_a_shadow_that_also_answers_cannot_be_logged():
    services = {**SPLIT, "shadow": {"target": "new", "share": 0.1}}
    ServeConfig.parse({"services": services})

    with pytest.raises(InputError, match="'new' has a weight too"):
        ServeConfig.parse({"services": services, "request_log": {"folder": "log"}})


def test_the_example_is_one():
    settings = ServicesConfig.load(CHECKOUT / "configs" / "services.yaml")

    assert settings.routing.weights == {"main": 0.9, "candidate": 0.1}
    assert settings.shadow.target == "next"
