"""Value curves by replay: what the probability mass of an action is, and what a log has to have."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.inference.answers import Budget, Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.serve.app.curve_replay import CurveReplay, LoggedRequests, read_requests
from rayrec.serve.engine.value_curves import FULL_EFFORT, ActionKey, ValueCurves
from rayrec.serve.events.request_log import SCHEMA
from tests.cli.commands import answer, refused
from tests.helpers.runs import make_run

FEW_BEAMS, FEW_EVENTS = ActionKey(max_beams=3), ActionKey(max_events=1)
NEAR_LINE = ActionKey(near_line=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "lazy")


@pytest.fixture(scope="module")
def recommender(run) -> Recommender:
    return Recommender.load(run)


def requests_of(recommender: Recommender, k: int = 3) -> LoggedRequests:
    queries = [recommender.query_of_user(f"u{user}") for user in range(12)]
    queries.sort(key=lambda query: len(query.history_ids))
    return LoggedRequests(queries, [k] * len(queries), num_skipped=0)


def write_log(folder, requests: LoggedRequests, **further):
    rows = [
        {
            "request_id": str(row),
            "user_id": query.user_id,
            "item_ids": query.history_ids.tolist(),
            "timestamps": None,
            "k": k,
            **further,
        }
        for row, (query, k) in enumerate(zip(requests.queries, requests.ks, strict=True))
    ]
    day = folder / "date=2026-11-25"
    day.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), day / "part-0.parquet")
    return folder


def test_probabilities_of_items_are_those_that_a_search_finds_them_with(recommender):
    queries = [*requests_of(recommender).queries[:3], Query(np.zeros(0, dtype=np.int64))]
    answers = recommender.answer(queries, 4)
    keys = recommender.dataset.items.keys.to_pylist()
    items_BW = np.array([[keys.index(item.item_key) for item in each.items] or [0] * 4 for each in answers])
    items_BW[0, 3] = -1

    log_probs_BW = recommender.item_log_probs(queries, items_BW)

    scores = [[item.score for item in each.items] for each in answers[:3]]
    scores[0][3] = -np.inf
    assert log_probs_BW[:3] == pytest.approx(np.array(scores), abs=1e-4)
    assert np.isneginf(log_probs_BW[3]).all()


def test_probabilities_of_all_items_sum_to_one(recommender):
    queries = requests_of(recommender).queries[:2]
    everything_BW = np.tile(np.arange(len(recommender.dataset.items)), (2, 1))

    assert np.exp(recommender.item_log_probs(queries, everything_BW)).sum(axis=1) == pytest.approx([1, 1])


def test_full_effort_finds_all_of_itself_and_no_action_finds_more(recommender):
    requests = requests_of(recommender)

    found = CurveReplay(recommender, [FEW_BEAMS, FEW_EVENTS, FULL_EFFORT]).replay(requests, batch_size=5)

    assert found.masses_NA[:, 2].tolist() == pytest.approx(found.full_N.tolist(), rel=1e-5)
    assert (found.masses_NA <= found.full_N[:, None] + 1e-6).all()  # 40 beams of 30 items miss none
    assert (found.full_N <= 1).all()
    assert found.num_events_N.tolist() == [len(query.history_ids) for query in requests.queries]


def test_an_action_that_reads_less_is_judged_by_what_is_known_of_the_whole_history(recommender):
    requests = requests_of(recommender)

    found = CurveReplay(recommender, [FEW_EVENTS]).replay(requests, batch_size=4)

    keys = recommender.dataset.items.keys.to_pylist()
    for query, mass in zip(requests.queries, found.masses_NA[:, 0], strict=True):
        (of_newest,) = recommender.answer([query], 3, budget=Budget(max_events=1))
        items = np.array([[keys.index(item.item_key) for item in of_newest.items]])
        assert mass == pytest.approx(np.exp(recommender.item_log_probs([query], items)).sum(), rel=1e-4)


def test_a_near_line_answer_is_of_the_events_before_and_has_nothing_that_was_seen_since(recommender):
    requests = requests_of(recommender)

    found = CurveReplay(recommender, [NEAR_LINE], near_line_lag=2).replay(requests, batch_size=4)

    assert (found.seconds_NA == 0).all()
    keys = recommender.dataset.items.keys.to_pylist()
    for query, mass in zip(requests.queries, found.masses_NA[:, 0], strict=True):
        before = replace(query, history_ids=query.history_ids[:-2], times=None)
        (earlier,) = recommender.answer([before], 5)
        seen = set(recommender.dataset.item_positions(query.history_ids).tolist())
        items = [each for each in (keys.index(item.item_key) for item in earlier.items) if each not in seen]
        assert mass == pytest.approx(
            np.exp(recommender.item_log_probs([query], np.array([items[:3]]))).sum() if items else 0, rel=1e-4
        )


def test_a_request_costs_its_part_of_the_shorter_time_of_its_batch(recommender):
    ticks = itertools.accumulate(itertools.chain([0.0], itertools.cycle([8.0, 100.0, 9.0, 100.0])))
    replay = CurveReplay(recommender, [FULL_EFFORT], clock=lambda: next(ticks))

    found = replay.replay(requests_of(recommender), batch_size=4)

    assert (found.seconds_NA == 2.0).all()


def test_curves_of_a_replay_are_of_the_model(recommender, run):
    replay = CurveReplay(recommender, [FEW_BEAMS, FULL_EFFORT])
    curves = replay.replay(requests_of(recommender), batch_size=4).fit(
        replay.version, [FEW_BEAMS, FULL_EFFORT]
    )

    assert curves.version == f"{run.name}@{recommender.committed_step + 1}"
    assert curves.of(3, FULL_EFFORT) == 1.0
    assert 0 < curves.of(3, FEW_BEAMS) <= 1


def test_what_the_mass_says_nothing_of_has_to_be_said(recommender, tmp_path):
    both = [FULL_EFFORT, ActionKey(rank=False)]
    with pytest.raises(InputError, match="no ranking stage here"):
        CurveReplay(recommender, both)
    scoring = Recommender.load(make_run(tmp_path, "sasrec"))
    with pytest.raises(InputError, match="scores every item at once"):
        CurveReplay(scoring, [FULL_EFFORT])
    with pytest.raises(InputError, match="its scores are no probabilities"):
        scoring.item_log_probs([scoring.query_of_user("u0")], np.zeros((1, 1), dtype=np.int64))


class Stage:
    """Ranks nothing, and is asked all the same."""

    def __init__(self, recommender: Recommender) -> None:
        self._recommender = recommender
        self.asked = 0

    def answer_each(self, queries, wanted):
        self.asked += 1
        return self._recommender.answer_each(queries, wanted)


def test_what_a_ranked_answer_is_worth_more_is_given(recommender):
    both, requests = [FULL_EFFORT, ActionKey(rank=False)], requests_of(recommender)
    with pytest.raises(InputError, match="say with --ranking-gain"):
        CurveReplay(recommender, both, Stage(recommender))
    stage = Stage(recommender)

    found = CurveReplay(recommender, both, stage, ranking_gain=1.25).replay(requests, batch_size=12)

    assert found.shares_A.tolist() == pytest.approx([1.0, 0.8], rel=1e-5)
    assert stage.asked == 4  # twice to begin with, and twice for the time


def test_requests_are_read_by_number_of_events_without_such_that_have_none(recommender, tmp_path):
    requests = requests_of(recommender)
    nobody = Query(np.zeros(0, dtype=np.int64))
    shuffled = [requests.queries[place] for place in np.random.default_rng(0).permutation(12)]
    logged = LoggedRequests([nobody, *shuffled], [9, *range(1, 13)], num_skipped=0)

    read = read_requests(str(write_log(tmp_path / "log", logged)), most=100)

    lengths = [len(query.history_ids) for query in read.queries]
    assert lengths == sorted(len(query.history_ids) for query in requests.queries)
    assert read.num_skipped == 1
    k_of = {query.user_id: k for query, k in zip(shuffled, range(1, 13), strict=True)}
    assert read.ks == [k_of[query.user_id] for query in read.queries]
    assert len(read_requests(str(tmp_path / "log"), most=5).queries) == 5


def test_a_log_that_cannot_be_replayed_is_refused(recommender, tmp_path):
    with pytest.raises(InputError, match="no request log can be read there"):
        read_requests(str(tmp_path / "nothing"), 10)
    pq.write_table(pa.table({"item_id": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="no column user_id, item_ids, timestamps, k"):
        read_requests(str(tmp_path / "other.parquet"), 10)
    nobody = LoggedRequests([Query(np.zeros(0, dtype=np.int64))], [3], num_skipped=0)
    with pytest.raises(InputError, match="1 requests, none of which has a history"):
        read_requests(str(write_log(tmp_path / "log", nobody)), 10)


ACTIONS = """\
actions:
  - {name: full}
  - {name: few, max_beams: 3}
"""


def test_the_command_writes_curves_and_prints_what_they_say(recommender, run, tmp_path):
    log = write_log(tmp_path / "log", requests_of(recommender))
    (tmp_path / "actions.yaml").write_text(ACTIONS)
    out = tmp_path / "curves.json"

    said = answer(
        "value-curves", run, "--request-log", log, "--actions", tmp_path / "actions.yaml", "--out", out
    )

    curves = ValueCurves.load(out)
    assert curves.actions == (FULL_EFFORT, FEW_BEAMS)
    assert said["actions"]["full"]["shares"] == [1.0] * (len(curves.edges) + 1)
    assert said["actions"]["few"]["shares"] == curves.shares_BA[:, 1].tolist()
    assert said["requests"] == 12
    assert all(action["ms_per_request"] > 0 for action in said["actions"].values())


def test_the_command_takes_the_actions_of_an_admission_file(recommender, run, tmp_path):
    log = write_log(tmp_path / "log", requests_of(recommender))
    settings = {"allocate": {"actions": [{"name": "few", "max_beams": 3}], "explore": 0.01}}
    (tmp_path / "admission.yaml").write_text(json.dumps(settings))

    said = answer(
        "value-curves",
        run,
        "--request-log",
        log,
        "--actions",
        tmp_path / "admission.yaml",
        "--out",
        tmp_path / "curves.json",
    )

    assert list(said["actions"]) == ["few"]


def test_curves_of_a_published_version_are_those_of_its_run(recommender, run, tmp_path):
    folder, store = RunFolder.open(run), VersionStore(tmp_path / "store")
    Publisher(folder, store).publish(read_snapshot(folder.chosen_snapshot("best")))
    log = write_log(tmp_path / "log", requests_of(recommender))
    (tmp_path / "actions.yaml").write_text(ACTIONS)
    out = tmp_path / "curves.json"
    options = ("--request-log", log, "--actions", tmp_path / "actions.yaml", "--out", out)

    of_run, of_version = (answer("value-curves", model, *options) for model in (run, tmp_path / "store"))

    assert of_version["version"] == of_run["version"] == ValueCurves.load(out).version
    # As measured: what is made concave depends on the time, too.
    measured = [[action["measured"] for action in said["actions"].values()] for said in (of_run, of_version)]
    assert measured[0] == pytest.approx(measured[1])


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        ("actions: []", "at least 1"),
        ("steps: []", "there are no actions in it"),
        ("actions: [{name: a}, {name: a, max_beams: 2}]", "two actions are called 'a'"),
        ("actions: [{name: a, beams: 2}]", "beams"),
        ("actions: [", "not valid YAML"),
    ],
)
def test_actions_that_cannot_be_used_are_refused(tmp_path, actions, says):
    (tmp_path / "actions.yaml").write_text(actions)
    line = refused(
        "value-curves",
        "runs/none",
        "--request-log",
        tmp_path,
        "--actions",
        tmp_path / "actions.yaml",
        "--out",
        tmp_path / "curves.json",
    )
    assert says in line
