"""From a posted event to the next recommendation of its user, and to a row that training reads."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.operations.join_history import JoinHistoryConfig
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.prepare.times import parse_times
from rayrec.serve.config.events import EventsConfig, LogConfig, RequestLogConfig
from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.events.request_log import RequestLog
from rayrec.serve.web.api import build_api
from tests.helpers.runs import make_run

NOW = 1_700_000_000


@pytest.fixture(scope="module")
def recommender(tmp_path_factory):
    return Recommender.load(make_run(tmp_path_factory.mktemp("events")))


@pytest.mark.parametrize("in_store", [True, False])
def test_a_click_is_in_the_next_recommendation_and_in_the_rows_of_training(recommender, tmp_path, in_store):
    log = LogConfig(folder=str(tmp_path / "log"))
    store = str(tmp_path / "store") if in_store else None
    service = RecommendationService(recommender, max_k=50)
    intake = EventIntake.open(EventsConfig(log=log, store=store), lambda: recommender.dataset)
    service.user_state = intake.state
    requests = RequestLog(RequestLogConfig(folder=str(tmp_path / "requests"), share=1.0), "new")
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6, 8: 1e-6}), 8)
    api = build_api(service, batcher, 20.0, intake=intake, request_log=requests)
    items = recommender.dataset.items
    keys = [items.keys[place].as_py() for place in range(2)]
    events = [{"user_id": "new", "item_id": key, "timestamp": NOW + n} for n, key in enumerate(keys)]
    with TestClient(api) as client:
        before = client.post("/v1/recommend", json={"user_id": "new", "k": 5}).json()
        assert before["source"] == "popular"
        told = client.post("/v1/events", json=events).json()
        assert told == {"taken": 2, "repeated": 0, "unknown_items": 0}
        told = client.post("/v1/events", json=events[0]).json()
        assert told == {"taken": 1, "repeated": 1, "unknown_items": 0}
        after = client.post("/v1/recommend", json={"user_id": "new", "k": 5}, headers={"X-Request-Id": "r"})
        assert after.headers["X-Request-Id"] == "r"
        same = client.post(
            "/v1/recommend", json={"history": keys, "timestamps": [NOW, NOW + 1], "k": 5}
        ).json()
        assert after.json()["items"] == same["items"]
        assert after.json()["source"] == "model"
        users = {"name": "user_id", "datatype": "BYTES", "shape": [2], "data": ["new", "nobody"]}
        rows = client.post(
            "/v2/models/recommend/infer", json={"inputs": [users]}, headers={"X-Request-Id": "v2"}
        )
        assert rows.headers["X-Request-Id"] == "v2"
        told = client.post("/v1/events", json={"user_id": "new", "item_id": "nosuch", "timestamp": NOW + 2})
        assert told.json()["unknown_items"] == 1
        wrong = client.post("/v1/events", json=[events[0], {"user_id": "new"}])
        assert (wrong.status_code, wrong.json()) == (422, {"error": "1.item_id: field required"})
        late = client.post("/v1/events", json={"user_id": "a", "item_id": "b", "timestamp": 9e10})
        assert late.status_code == 422

    (file,) = (tmp_path / "log").rglob("*.parquet")
    rows = pq.ParquetFile(file).read()
    assert rows["timestamp"].cast("int64").to_pylist() == [(NOW + n) * 1_000_000 for n in range(3)]
    (asked,) = (tmp_path / "requests").rglob("*.parquet")
    logged = {row["request_id"]: row for row in pq.ParquetFile(asked).read().to_pylist() if not row["row"]}
    of_rows = [row for row in pq.ParquetFile(asked).read().to_pylist() if row["request_id"] == "v2"]
    assert [(row["row"], row["user_key"]) for row in sorted(of_rows, key=lambda row: row["row"])] == [
        (0, "new"),
        (1, "nobody"),
    ]
    assert {row["target"] for row in logged.values()} == {"new"}
    assert logged["r"]["item_ids"] == items.ids_I[:2].tolist()
    assert logged["r"]["recommended"] == [item["item_id"] for item in after.json()["items"]]
    if store is not None:
        program = FeatureProgram.compile([JoinHistoryConfig(store=store)], rows.schema)
        batch = rows.combine_chunks().to_batches()[0].select(program.input_schema.names)
        made = program(batch, RowContext(np.arange(3), 0, 0))
        ids = items.ids_I[:2].tolist()
        assert made.column("item_ids").to_pylist() == [[], ids[:1], ids]


def test_times_of_posted_events_are_those_that_preparation_reads(recommender, tmp_path):
    times = [NOW + 0.0000007, NOW + 0.000001, NOW + 0.7]  # the first: between two microseconds
    log = LogConfig(folder=str(tmp_path / "log"))
    intake = EventIntake.open(EventsConfig(log=log), lambda: recommender.dataset)
    service = RecommendationService(recommender, max_k=50)
    api = build_api(service, Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 8), 20.0, intake=intake)
    with TestClient(api) as client:
        events = [{"user_id": "new", "item_id": "a", "timestamp": time} for time in times]
        assert client.post("/v1/events", json=events).json()["taken"] == 3
    (file,) = (tmp_path / "log").rglob("*.parquet")
    logged = pq.ParquetFile(file).read()["timestamp"].cast("int64").to_pylist()

    table = pa.table({"timestamp": pa.array(times, pa.float64())})
    assert logged == parse_times(RawTable(table, "log.parquet", str), "s").tolist()
    assert logged == [NOW * 1_000_000, NOW * 1_000_000 + 1, NOW * 1_000_000 + 700_000]


def test_a_service_without_events_says_so(recommender):
    service = RecommendationService(recommender, max_k=50)
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 8)
    answer = TestClient(build_api(service, batcher, 20.0)).post("/v1/events", json=[])
    assert answer.status_code == 404
    assert "--events FILE" in answer.json()["error"]
