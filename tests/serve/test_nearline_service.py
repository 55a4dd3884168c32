"""Events come to a service, a worker follows them, and the service answers with what the worker computed."""

import time

from fastapi.testclient import TestClient

from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.serve.app.loading import load_api
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.nearline import NearlineJob, NearlineLoop
from rayrec.serve.web.metrics import PrometheusMeter
from tests.helpers.runs import make_run


def test_a_worker_and_a_service_mean_the_same_history(tmp_path):
    """Of a user of the data set with new events, and of one that only the store knows."""
    run, events, products = make_run(tmp_path), str(tmp_path / "events"), str(tmp_path / "products")
    always = {"do": "cached_answer", "enter": 0.001, "leave": 0.0}
    no_cache = {"max_age_s": 1e-9}
    config = ServeConfig(
        page=False,
        events=EventsConfig(store=events, by_item=True),
        nearline=NearlineReadConfig(store=products, products=("candidates",)),
        admission=AdmissionConfig.parse({"degrade": {"steps": [always], "cache": no_cache}}),
    )
    with TestClient(load_api(run, config, PrometheusMeter())) as client:

        def ask(user):
            return client.post("/v1/recommend", json={"user_id": user, "k": 3}).json()

        def happens(user, item, ago_s=0):
            event = {"user_id": user, "item_id": item, "timestamp": int(time.time()) - ago_s}
            assert client.post("/v1/events", json=event).status_code == 200

        happens("u1", "i3", ago_s=100)
        happens("stranger", "i4")
        before = {user: ask(user) for user in ("u1", "stranger")}
        assert [each["source"] for each in before.values()] == ["model", "model"]
        loop = NearlineLoop(NearlineJob(str(run), products, events, NearlineConfig(debounce_s=0)))
        loop.finish()
        happens("u1", "i5")
        stale = ask("u1")
        assert (stale["source"], stale["degraded"]) == ("nearline", ["cached_answer", "earlier_history"])
        while loop.step():
            pass
        loop.close()

        after = {user: ask(user) for user in ("u1", "stranger")}
        for answer in after.values():
            assert (answer["source"], answer["degraded"]) == ("nearline", ["cached_answer"])
        found = [item["item_id"] for item in after["stranger"]["items"]]
        assert found == [item["item_id"] for item in before["stranger"]["items"]]
        assert "rayrec_serving_answers_nearline_total 3.0" in client.get("/metrics").text
