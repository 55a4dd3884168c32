"""How many replicas a service has: what load asks for, within what it is allowed."""

import itertools
import json
import logging
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from rayrec.pipelines.cluster.service_limits import ServiceLimits
from rayrec.platform.errors import InputError
from rayrec.serve.config.scaling import ScalingConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.scaling import (
    Bounds,
    Deployed,
    Load,
    ReplicaController,
    Scaled,
    ServeDownError,
    ServeRefusedError,
    Wish,
    controlled,
    within,
)
from rayrec.serve.on_ray.serve_dashboard import ServeDashboard, fetch_text, samples
from rayrec.serve.on_ray.serving import as_left, from_arguments, scaled_deployments
from tests.helpers.runs import make_run

SETTINGS = ScalingConfig(lower_after_s=300, raise_again_s=60, dead_band=0.1, average_s=0)


def wish_of(begin=1, most=8, settings=SETTINGS, least=1):
    return Wish(Bounds(least, most), settings, begin, requests=4.0)


def observe_for(wish, begin_s, seconds, load, every_s=5):
    for at in range(begin_s, begin_s + seconds + 1, every_s):
        wish.observe(at, load, wish.replicas)
    return wish.replicas


def test_worked_numbers_of_a_raise():
    wish = wish_of(begin=2)
    assert wish.observe(0, Load(8.8), 2) == 2  # 2.2 replicas: within the dead band
    assert wish.observe(5, Load(9.0), 2) == 3  # 2.25
    assert wish.observe(10, Load(90.0), 2) == 3  # the third has not come up
    assert wish.observe(65, Load(90.0), 2) == 6  # 22 replicas, but twice the three at most
    assert wish.observe(70, Load(90.0), 6) == 8  # as many as there may be


def test_one_look_at_a_burst_is_no_load():
    wish = wish_of(begin=2, settings=SETTINGS.model_copy(update={"average_s": 15}))
    for at in range(0, 60, 5):
        assert wish.observe(at, Load(8.0), 2) == 2
    assert wish.observe(60, Load(11.0), 2) == 2  # 8.75 in the mean of 15 s
    assert wish.observe(65, Load(80.0), 2) == 4  # 26.75


def test_worked_numbers_of_a_fall():
    wish = wish_of(begin=8)
    wish.observe(0, Load(18.0), 8)
    assert observe_for(wish, 5, 290, Load(4.0)) == 8
    assert wish.observe(300, Load(4.0), 8) == 5  # 4.5 / 0.9, the most of five minutes
    assert observe_for(wish, 305, 300, Load(4.0)) == 3  # 1.1 would do, but at most half are taken away
    assert observe_for(wish, 610, 305, Load(4.0)) == 2
    assert observe_for(wish, 920, 900, Load(4.0)) == 2  # one would be full: 1.0 is above 0.9


def test_it_stays_within_its_bounds():
    wish = wish_of(begin=1, least=3, most=4)
    assert wish.replicas == 3
    assert observe_for(wish, 0, 400, Load(0.0)) == 3
    assert observe_for(wish, 405, 400, Load(1000.0)) == 4


@pytest.mark.parametrize("seed", range(20))
def test_noisy_load_moves_it_to_where_it_belongs_and_then_no_more(seed):
    """An hour of requests in flight as Poisson has them, around what three to four replicas are for."""
    random = np.random.default_rng(seed)
    mean = random.uniform(11.0, 15.0)
    wish = wish_of(begin=1, most=16, settings=ScalingConfig())
    seen = [wish.observe(at, Load(float(random.poisson(mean))), wish.replicas) for at in range(0, 3600, 5)]
    changes = [at for at, (before, after) in enumerate(itertools.pairwise(seen)) if before != after]
    falls = sum(seen[at + 1] < seen[at] for at in changes)
    assert mean / 4 <= seen[-1] <= 3 * mean / 4
    assert falls <= 1
    assert len(changes) <= 4


def test_load_that_comes_every_few_minutes_is_lowered_for_later_and_later():
    """A burst every ten minutes: after five quiet ones the replicas go, and come back at the next burst."""
    wish = wish_of(begin=1)
    falls = []
    for at in range(0, 6 * 3600, 5):
        before = wish.replicas
        after = wish.observe(at, Load(16.0 if at % 600 < 30 else 1.0), before)
        if after < before:
            falls.append(at)
    assert len([at for at in falls if at < 3600]) >= 1
    assert not [at for at in falls if at >= 2 * 3600]


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -1.0])
def test_what_is_not_known_changes_nothing(unknown):
    wish = wish_of(begin=4)
    assert observe_for(wish, 0, 3600, Load(unknown)) == 4


def test_what_some_replicas_have_not_said_does_not_count_as_idle():
    wish = wish_of(begin=4)
    assert observe_for(wish, 0, 3600, Load(1.0, is_complete=False)) == 4
    assert wish.observe(3605, Load(30.0, is_complete=False), 4) == 8  # at least so many


def test_a_gap_in_what_is_seen_is_no_time_of_low_load():
    wish = wish_of(begin=4)
    observe_for(wish, 0, 200, Load(1.0))
    assert observe_for(wish, 3600, 295, Load(1.0)) == 4
    assert wish.observe(3900, Load(1.0), 4) < 4


def test_by_value_a_replica_is_added_while_a_second_earns_more_than_it_has_to():
    wish = wish_of(begin=2, settings=SETTINGS.model_copy(update={"worth_of_replica_s": 10.0}))
    assert wish.observe(0, Load(100.0, price=10.5), 2) == 2  # within the dead band, whatever is in flight
    assert wish.observe(5, Load(100.0, price=12.0), 2) == 3
    assert wish.observe(10, Load(100.0, price=12.0), 2) == 3  # it has not come up
    assert wish.observe(15, Load(100.0, price=12.0), 3) == 4
    assert observe_for(wish, 20, 400, Load(100.0, price=6.0)) == 4
    assert observe_for(wish, 425, 400, Load(100.0, price=4.9)) == 3
    assert observe_for(wish, 830, 1200, Load(100.0, price=math.nan)) == 3
    assert observe_for(wish, 2035, 1200, Load(0.0, price=0.0)) == 1


def test_the_maximum_in_force_is_the_lower_one_and_no_lower_than_the_minimum():
    assert within(Bounds(2, 8), 5, None) == (5, 8)
    assert within(Bounds(2, 8), 5, 3) == (3, 3)
    assert within(Bounds(2, 8), 5, 1) == (2, 2)
    assert within(Bounds(2, 8), 5, 100) == (5, 8)


class Serve:
    """Ray Serve, whose replicas come and go at once."""

    def __init__(self, **targets):
        self.targets, self.in_flight, self.is_down, self.asked = dict(targets), 0.0, False, []
        self.metrics_are_down = False
        self.scaled = threading.Event()

    def deployments(self, application):
        assert application == "rayrec"
        if self.is_down:
            raise ServeDownError("http://127.0.0.1:8265: refused")
        return {
            name: Deployed(count, ("10.0.0.1",) * count, tuple(map(str, range(count))))
            for name, count in self.targets.items()
        }

    def loads(self, application, deployments):
        if self.metrics_are_down:
            raise ServeDownError("no metrics")
        return {name: Load(self.in_flight) for name in deployments}

    def scale(self, application, deployment, replicas):
        self.asked.append((deployment, replicas))
        self.targets[deployment] = replicas
        self.scaled.set()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def limits(tmp_path, clock):
    return ServiceLimits(tmp_path, clock)


@pytest.fixture
def start(limits, clock):
    published = {}

    def start(serve, begin=4, least=1, most=8):
        scaled = {name: Scaled(Bounds(least, most), begin, 4.0, SETTINGS) for name in serve.targets}
        controller = ReplicaController(
            "rayrec", scaled, serve, limits, published.__setitem__, clock, wall_clock=clock
        )
        controller.published = published
        return controller

    return start


def tick_for(controller, clock, seconds):
    for _ in range(seconds):
        clock.now += 1
        controller.tick()


def test_a_maximum_that_is_lowered_holds_at_once_and_the_load_does_not_raise_it(start, clock, limits):
    serve = Serve(recommend=4)
    controller = start(serve)
    serve.in_flight = 14.0
    tick_for(controller, clock, 10)
    assert serve.asked == []
    limits.allow(2, "job a needs the room")
    serve.metrics_are_down = True
    tick_for(controller, clock, 1)
    assert serve.asked == [("recommend", 2)]
    serve.metrics_are_down, serve.in_flight = False, 100.0
    tick_for(controller, clock, 600)
    assert serve.targets == {"recommend": 2}
    assert limits.allow(2, "job a needs the room")
    limits.allow(None)
    tick_for(controller, clock, 1)
    assert serve.targets["recommend"] == limits.state().wish > 4  # what the load has asked for meanwhile


def test_what_is_wished_for_and_in_force_is_told_to_the_queue_and_in_metrics(start, clock, limits):
    serve = Serve(recommend=4)
    controller = start(serve)
    limits.allow(2)
    tick_for(controller, clock, 12)
    state = limits.state()
    assert (state.num_replicas, state.target, state.wish, state.maximum) == (2, 2, 4, 2)
    assert state.at >= clock.now - 5
    assert controller.published["recommend"] == {
        "service_replicas": 2,
        "service_replicas_target": 2,
        "service_replicas_wish": 4,
        "service_replicas_maximum": 2,
        "service_replicas_needed": 0,
    }


def test_a_maximum_below_the_minimum_is_said_and_the_minimum_stays(start, clock, limits, caplog):
    serve = Serve(recommend=4)
    controller = start(serve, least=3)
    limits.allow(1)
    tick_for(controller, clock, 30)
    assert serve.targets == {"recommend": 3}
    (said,) = [record.getMessage() for record in caplog.records if "min_replicas" in record.getMessage()]
    assert said == "recommend: it is left 1 replicas, and has at least its min_replicas, 3"


def test_while_the_dashboard_is_down_all_stays_and_it_is_said_once_a_minute(start, clock, limits, caplog):
    serve = Serve(recommend=4)
    controller = start(serve)
    tick_for(controller, clock, 5)
    serve.is_down = True
    limits.allow(2)
    with caplog.at_level(logging.WARNING):
        tick_for(controller, clock, 150)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["replicas stay as they are: http://127.0.0.1:8265: refused"] * 3
    assert serve.targets == {"recommend": 4}
    serve.is_down = False
    tick_for(controller, clock, 1)
    assert serve.targets == {"recommend": 2}


def test_what_somebody_else_has_set_is_set_back(start, clock):
    serve = Serve(recommend=4)
    controller = start(serve)
    serve.in_flight = 14.0
    serve.targets["recommend"] = 7
    tick_for(controller, clock, 1)
    assert serve.targets == {"recommend": 4}


def test_a_thread_scales_until_the_service_ends_and_leaves_no_limit(start, limits):
    serve = Serve(recommend=4)
    controller = start(serve)
    limits.allow(2)
    with controlled(controller):
        serve.scaled.wait(10)
    assert serve.targets == {"recommend": 2}
    assert limits.limit() is None
    with controlled(None):
        pass


def test_an_application_that_is_not_there_yet_is_waited_for(start, clock):
    serve = Serve(recommend=4)
    controller = start(serve)
    serve.targets = {}
    tick_for(controller, clock, 10)
    assert serve.asked == []


APPLICATIONS = {
    "applications": {
        "rayrec": {
            "deployments": {
                "recommend": {
                    "target_num_replicas": 2,
                    "replicas": [
                        {"replica_id": "a", "state": "RUNNING", "node_ip": "10.0.0.1"},
                        {"replica_id": "b", "state": "RUNNING", "node_ip": "10.0.0.2"},
                        {"replica_id": "c", "state": "STOPPING", "node_ip": "10.0.0.2"},
                    ],
                }
            }
        }
    }
}
NODES = [{"labels": {"job": "ray"}, "targets": ["10.0.0.1:9001", "10.0.0.2:9002", "10.0.0.3:9003"]}]
LABELS = 'application="rayrec",deployment="recommend",replica='


def dashboard(pages, sent=None):
    def fetch(method, url, values):
        if method == "POST":
            sent.append((url, values))
            return "{}"
        if url.endswith("/api/serve/applications/"):
            return json.dumps(APPLICATIONS)
        if url.endswith("/api/prometheus/sd"):
            return json.dumps(NODES)
        if url not in pages:
            raise ServeDownError(url)
        return pages[url]

    return ServeDashboard(lambda: "http://head:8265", fetch)


def test_load_is_read_from_the_nodes_that_have_replicas():
    pages = {
        "http://10.0.0.1:9001/metrics": "\n".join(
            [
                "# TYPE ray_serve_replica_processing_queries gauge",
                f'ray_serve_replica_processing_queries{{{LABELS}"a"}} 3.0',
                f'ray_serve_replica_processing_queries{{{LABELS}"gone"}} 50.0',
                f'ray_serve_replica_processing_queries{{{LABELS.replace("rayrec", "other")}"b"}} 9',
                'ray_rayrec_allocation_price{run="r",WorkerId="1"} 2.0',
                'ray_rayrec_allocation_price{run="r",WorkerId="2"} NaN',
            ]
        ),
        "http://10.0.0.2:9002/metrics": "\n".join(
            [
                f'ray_serve_replica_processing_queries{{{LABELS}"b"}} 4.0',
                'ray_rayrec_allocation_price{run="r"} 4.0',
            ]
        ),
    }
    client = dashboard(pages)
    deployments = client.deployments("rayrec")
    assert deployments["recommend"] == Deployed(2, ("10.0.0.1", "10.0.0.2", "10.0.0.2"), ("a", "b"))
    assert client.loads("rayrec", deployments) == {"recommend": Load(7.0, True, 3.0, num_running=2)}
    del pages["http://10.0.0.2:9002/metrics"]
    assert client.loads("rayrec", deployments) == {"recommend": Load(3.0, False, 2.0, num_running=2)}
    pages.clear()
    assert client.loads("rayrec", deployments) == {"recommend": Load(None, False, None, num_running=2)}
    assert client.deployments("other") == {}


def test_scaling_asks_for_a_number():
    sent = []
    dashboard({}, sent).scale("rayrec", "dense.new", 3)
    assert sent == [
        (
            "http://head:8265/api/v1/applications/rayrec/deployments/dense.new/scale",
            {"target_num_replicas": 3},
        )
    ]


def test_names_that_only_begin_alike_are_other_metrics():
    assert samples("rayrec_a 1\nrayrec_ab 2\nrayrec_a_total 3\n", "rayrec_a") == [({}, 1.0)]


def test_a_head_that_is_gone_or_talks_nonsense_is_down(free_port):
    with pytest.raises(ServeDownError, match=f"127.0.0.1:{free_port}"):
        fetch_text("GET", f"http://127.0.0.1:{free_port}/api/serve/applications/")
    with pytest.raises(ServeRefusedError, match="no URL"):
        fetch_text("GET", "/api/serve/applications/")
    with pytest.raises(ServeDownError, match="no JSON"):
        ServeDashboard(lambda: "http://head", lambda *_: "<html>").deployments("rayrec")


def test_a_cluster_that_wants_its_token_says_how_to_give_it():
    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(401, "Unauthorized")

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ServeRefusedError, match="set RAY_AUTH_MODE=token"):
            fetch_text("GET", f"http://127.0.0.1:{server.server_port}/api/serve/applications/")
        thread.join()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_replicas": 3, "max_replicas": 2}, "begins with 3 and has 1 to 2"),
        ({"num_replicas": 1, "min_replicas": 2}, "begins with 1 and has 2 to 1"),
        ({"max_replicas": 2, "single_process": True}, "leave out --single-process"),
        ({"max_replicas": 2, "services": {}}, "its file says it of each deployment"),
        ({"max_replicas": 2, "cluster": {"dashboard": False}}, "through Ray's dashboard"),
        ({"scaling": {"worth_of_replica_s": 2}}, "no second has a price"),
        (
            {"scaling": {"batcher": {}, "requests_per_replica": 2}},
            "batcher and requests_per_replica would each ask for other numbers",
        ),
        ({"scaling": {"batcher": {"work": 1.5}}}, "work: .*less than or equal to 1"),
        ({"scaling": {"batcher": {}}, "services": {}}, "scaling.batcher: of services, a batch waits"),
        ({"services": {"dense": {"min_replicas": 2}}}, "2 are more than the 1 to begin with"),
        ({"max_replicas": 2, "events": {"log": None}}, "events.store is missing: 2 replicas"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        ServeConfig.parse(settings)


def test_what_is_scaled_follows_from_the_settings():
    assert scaled_deployments(ServeConfig(num_replicas=3)) == {}
    one = scaled_deployments(ServeConfig(num_replicas=3, max_replicas=4))["recommend"]
    assert (one.bounds, one.begin) == (Bounds(1, 4), 3)
    lowered = scaled_deployments(ServeConfig(num_replicas=3, min_replicas=2))["recommend"]
    assert (lowered.bounds, lowered.begin) == (Bounds(2, 3), 3)
    services = {
        "dense": {"replicas": 2, "max_replicas": 4, "requests_per_replica": 9},
        "targets": {"new": {"run": "x"}},
        "routing": {"experiment": "e", "weights": {"main": 1, "new": 1}},
    }
    split = scaled_deployments(ServeConfig.parse({"services": services}))
    assert {name: (each.bounds, each.requests_per_replica) for name, each in split.items()} == {
        "dense": (Bounds(2, 4), 9),
        "dense.new": (Bounds(2, 4), 9),
    }


def test_a_service_begins_with_no_more_than_it_is_left(limits, caplog):
    config = ServeConfig(num_replicas=3, max_replicas=4)
    assert as_left(config, limits) == config
    limits.allow(2)
    assert as_left(config, limits).num_replicas == 2
    assert "the queue leaves the service 2 of 4 replicas" in caplog.text
    fixed = ServeConfig(num_replicas=3)
    assert as_left(fixed, limits) == fixed


@pytest.mark.slow
def test_ray_serve_builds_the_application_from_arguments_as_a_ray_service_has_them(tmp_path):
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    run = make_run(tmp_path)
    arguments = {"run": str(run), "num_replicas": 3, "admission": {"service": {"concurrency": 5}}}
    built = call_user_app_builder_with_args_if_necessary(from_arguments, arguments)
    (deployment,) = [built._bound_deployment]
    assert (deployment.name, deployment.num_replicas) == ("recommend", 3)
    for wrong, sentence in (({}, "args.run: expected the folder"), ({**arguments, "x": 1}, "args: .*'x'")):
        with pytest.raises(InputError, match=sentence):
            from_arguments(wrong)
