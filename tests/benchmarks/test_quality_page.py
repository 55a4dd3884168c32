"""The table of qualities is made of its records alone."""

import json

import numpy as np
import pytest

from benchmarks.quality_data import Row, recipe
from benchmarks.quality_page import METRICS, README, RL_METRICS, page, table_of_all, with_best_rows
from benchmarks.quality_page import RECORDS as REAL_RECORDS
from benchmarks.quality_rows import (
    DATASETS,
    ELSEWHERE,
    ELSEWHERE_WITH_TEXT,
    IN_FILE_ORDER,
    METHODS,
    NEIGHBORS,
)
from benchmarks.reproduction import all_rows, is_measured
from rayrec.pipelines.evaluation.lists import (
    CO_VISITATION,
    CO_VISITATION_UNMASKED,
    MODEL,
    MODEL_UNMASKED,
    POPULARITY,
    POPULARITY_UNMASKED,
    SWING,
    SWING_UNMASKED,
)
from rayrec.pipelines.metrics.positions import ListInfo, Positions, PositionsHeader


@pytest.fixture(autouse=True)
def records_folder(tmp_path, monkeypatch):
    """No neighbors were measured but those of a test."""
    monkeypatch.setattr("benchmarks.quality_page.RECORDS", tmp_path)
    return tmp_path


def estimates(value: float) -> dict:
    estimate = {"value": value, "low": value - 0.01, "high": value + 0.01}
    return dict.fromkeys(METRICS, estimate)


def record(method: str, seed: int, value: float) -> dict:
    ranked = (MODEL, MODEL_UNMASKED, POPULARITY, POPULARITY_UNMASKED)
    return {
        "dataset": "beauty",
        "ties": "shuffled",
        "method": method,
        "seed": seed,
        "results": {name: estimates(value) for name in ranked},
        "num_parameters": 1_500_000,
        "training_minutes": 3.0,
        "made_of": {"settings": recipe(Row("beauty", "shuffled", method))},
        "date": f"2026-11-2{seed}",
    }


def test_seeds_are_averaged_and_what_is_missing_is_said():
    text = page([record("tiger", 0, 0.06), record("hstu", 0, 0.08), record("hstu", 1, 0.09)])

    (tiger,) = [line for line in text.splitlines() if line.startswith(f"| {METHODS['tiger'].title} ")]
    assert "| 0.0600 ± 0.0100 |" in tiger
    assert "0.0648 (TIGER, arXiv:2305.05065, table 1)" in tiger
    (hstu,) = [line for line in text.splitlines() if line.startswith(f"| {METHODS['hstu'].title} (2 seeds)")]
    assert "| 0.0850 ± 0.0100 [0.0800, 0.0900] |" in hstu
    # Each of the other methods of this table, and a sentence in place of every other table.
    measured = [name for name in METHODS if DATASETS["beauty"].measures(name, "shuffled")]
    assert text.count("| not measured yet |") == len(measured) - 2
    assert text.count("Not measured yet.") == sum(len(each.ties) for each in DATASETS.values()) - 1


def test_a_row_of_a_recipe_that_left_ties_as_stored_says_so():
    before = record("tiger", 0, 0.06) | {"made_of": {"settings": {}}}

    lines = page([before, record("hstu", 0, 0.08)]).splitlines()

    assert [line for line in lines if line.startswith(f"| {METHODS['tiger'].title}, ties as stored |")]
    assert [line for line in lines if line.startswith(f"| {METHODS['hstu'].title} |")]


def test_a_row_that_was_trained_over_all_codes_says_so():
    before, after = record("tiger", 0, 0.06), record("lazy", 0, 0.07)
    del before["made_of"]["settings"]["model"]["softmax"]  # there was none
    lines = page([before, after]).splitlines()

    assert [line for line in lines if line.startswith(f"| {METHODS['tiger'].title}, all codes of a level |")]
    assert [line for line in lines if line.startswith(f"| {METHODS['lazy'].title} |")]


def test_seeds_of_before_are_left_out_of_a_row_once_one_redrew_ties():
    before = record("hstu", 0, 0.06) | {"made_of": {"settings": {}}}

    lines = page([before, record("hstu", 1, 0.08)]).splitlines()

    (hstu,) = [line for line in lines if line.startswith(f"| {METHODS['hstu'].title}")]
    assert hstu.startswith(f"| {METHODS['hstu'].title} | 0.0800 ")


def test_seeds_of_an_earlier_recipe_are_left_out_of_a_row():
    before, newer = record("hstu", 0, 0.06), record("hstu", 1, 0.08)
    training = before["made_of"]["settings"]["training"] | {"epochs": 1}
    before["made_of"] = {"settings": before["made_of"]["settings"] | {"training": training}}

    lines = page([before, newer]).splitlines()

    assert [line for line in lines if line.startswith(f"| {METHODS['hstu'].title} | 0.0800 ")]


def test_in_file_order_there_are_the_methods_that_show_the_leak():
    methods = {row.method for row in all_rows() if (row.dataset, row.ties) == ("beauty", "file order")}

    assert methods == {NEIGHBORS, *IN_FILE_ORDER}


def test_what_was_measured_stays_on_the_page_where_it_is_no_longer_asked_for():
    lines = page([record("hstu", 0, 0.08) | {"dataset": "sports"}]).splitlines()

    assert [line for line in lines if line.startswith(f"| {METHODS['hstu'].title} | 0.0800")]
    assert "hstu" not in {row.method for row in all_rows() if row.dataset == "sports"}


def test_the_time_of_training_is_the_median_of_the_seeds():
    """A machine that was busy once is no mean; records of before have no time of processors."""
    seeds = [
        record("hstu", seed, 0.08) | {"training_minutes": minutes}
        for seed, minutes in enumerate((3.0, 4.0, 30.0))
    ]
    seeds[1]["processor_minutes"] = 6.0

    lines = page([*seeds, record("tiger", 0, 0.06)]).splitlines()

    (hstu,) = [line for line in lines if line.startswith(f"| {METHODS['hstu'].title} (3 seeds)")]
    assert "| 4.0 min (6.0 CPU min) |" in hstu
    (tiger,) = [line for line in lines if line.startswith(f"| {METHODS['tiger'].title} ")]
    assert "| 3.0 min |" in tiger


def test_a_record_counts_while_the_recipe_is_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.quality_data.RECORDS", tmp_path)
    row = Row("beauty", "shuffled", "tiger")
    assert not is_measured(row)

    settings = recipe(row)
    earlier = settings | {"training": {k: v for k, v in settings["training"].items() if k != "compile"}}
    other = settings | {"training": settings["training"] | {"epochs": 1}}
    unknown = settings | {"model": {"name": "gru"}}
    for made_of, counts in ((settings, True), (earlier, True), (other, False), (unknown, False), ({}, False)):
        row.record.write_text(json.dumps(record("tiger", 0, 0.06) | {"made_of": {"settings": made_of}}))
        assert is_measured(row) is counts
    for redraws, most, counts in ((True, 256, True), (False, 256, False), (True, 512, False)):
        made_of = {"settings": settings | {"data": {"redraw_ties": redraws}}, "max_codebook_size": most}
        row.record.write_text(json.dumps(record("tiger", 0, 0.06) | {"made_of": made_of}))
        assert is_measured(row) is counts


def test_where_seen_items_are_kept_the_page_shows_what_keeps_them(tmp_path):
    (tmp_path / "neighbors").mkdir()
    values = {CO_VISITATION: 0.01, CO_VISITATION_UNMASKED: 0.02, SWING: 0.03, SWING_UNMASKED: 0.04}
    neighbors = {"results": {name: estimates(value) for name, value in values.items()}}
    (tmp_path / "neighbors" / "yelp-shuffled.json").write_text(json.dumps(neighbors))
    found = record("sasrec", 0, 0.05) | {"dataset": "yelp"}
    found["results"][MODEL_UNMASKED] = estimates(0.06)
    found["results"][POPULARITY_UNMASKED] = estimates(0.07)

    lines = page([found]).splitlines()

    start = next(at for at, line in enumerate(lines) if line.startswith("## Yelp"))
    assert "items of the history are kept" in lines[start + 2]
    shown = [line.split(" | ")[1][:6] for line in lines[start + 6 :] if line.startswith("| ")][:4]
    assert shown == ["0.0700", "0.0200", "0.0400", "0.0600"]


def test_every_data_set_has_the_rows_that_it_can_have():
    rows = list(all_rows())
    assert len(set(rows)) == len(rows)
    by_dataset = {name: {row.method for row in rows if row.dataset == name} for name in DATASETS}
    assert by_dataset["beauty"] == {NEIGHBORS, *METHODS}
    assert by_dataset["sports"] == {NEIGHBORS, *ELSEWHERE_WITH_TEXT}
    seeds = [row.seed for row in rows if (row.dataset, row.method) == ("movielens", "tiger")]
    assert seeds == [0, 1, 2]
    assert by_dataset["yelp"] == by_dataset["deskdrop-time"] == {NEIGHBORS, *ELSEWHERE}
    assert "generative-published" in by_dataset["instruments"]
    assert "generative-published" not in by_dataset["sports"]  # nobody published any
    assert {row.ties for row in rows if row.dataset == "yelp"} == {"shuffled"}
    assert recipe(Row("yelp", "shuffled", "sasrec"))["evaluation"]["exclude_seen"] is False
    assert recipe(Row("instruments", "shuffled", "sasrec"))["evaluation"]["exclude_seen"] is True
    assert recipe(Row("beauty", "shuffled", "sasrec"))["data"]["redraw_ties"] is True


def test_every_row_has_a_name_that_leads_back_to_it():
    for row in all_rows():
        name = f"{row.dataset}/{row.ties.replace(' ', '-')}/{row.method}"
        assert Row.named(name, row.seed) == row
    with pytest.raises(SystemExit, match="'books' is none of beauty, sports, movielens"):
        Row.named("books/shuffled/tiger", 0)
    with pytest.raises(SystemExit, match="'beauty/tiger' is no row: a row is DATASET/TIES/METHOD"):
        Row.named("beauty/tiger", 0)


def rewarded(method: str, change: float) -> dict:
    estimate = {"value": change, "low": change - 0.01, "high": change + 0.01}
    of_users = {
        "change": dict.fromkeys(RL_METRICS, estimate),
        "diversity": {when: {"distance": 0.8, "coverage": 0.5} for when in ("before", "after")},
    }
    return {"method": method, "all": of_users, "held_out": of_users}


def test_the_page_has_what_rewards_have_changed():
    text = page([], [rewarded("grpo", 0.02), rewarded("grpo", 0.04), rewarded("control", -0.03)])
    (grpo,) = [line for line in text.splitlines() if line.startswith("| GRPO (2 seeds)")]
    assert "| +3.0% (+1.0% to +5.0%) |" in grpo
    (control,) = [line for line in text.splitlines() if line.startswith("| control")]
    assert "| -3.0% (-4.0% to -2.0%) |" in control
    assert "| 0.500 → 0.500 |" in control
    assert "| SA-GCPO" not in text
    assert "Reinforcement learning" not in page([])


def test_tables_have_at_most_six_columns_and_the_csv_has_the_rest():
    records, rewards = [record("hstu", 0, 0.08), record("hstu", 1, 0.09)], [rewarded("grpo", 0.02)]

    rows = [line for line in page(records, rewards).splitlines() if line.startswith("| ")]
    assert {line.count("|") - 1 for line in rows} == {6}

    table = table_of_all(records, rewards).splitlines()
    assert f'"beauty, shuffled",hstu,1,"{MODEL_UNMASKED}",recall@5,0.09000,0.08000,0.10000' in table
    assert '"beauty, shuffled",hstu,1,training,num_parameters,1500000,,' in table
    assert "rl,grpo,0,users held out,recall@1,0.02000,0.01000,0.03000" in table


def positions(places: list[int], **header: str) -> Positions:
    of_list = ListInfo(depth=100, seen_items="left out", search="by hand")
    values = {
        "run": "run",
        "dataset": "beauty",
        "fingerprint": "f",
        "split": "test",
        "split_rule": "leave_one_out",
        "users": "u",
        "held_out": "h",
        "catalog": "c",
        "num_users": len(places),
        "num_items": 500,
        "head_from": 1,
        "lists": {MODEL: of_list},
    }
    return Positions(PositionsHeader(**(values | header)), {MODEL: np.array(places)})


def test_rows_with_positions_are_compared_in_pairs_in_the_order_of_their_recall(tmp_path):
    positions([0, 0, 20, 100]).write(tmp_path / "a.parquet")
    positions([0, 20, 5, 5]).write(tmp_path / "b.parquet")
    positions([0, 20, 20, 5], snapshot_fingerprint="c").write(tmp_path / "c.parquet")
    positions([0, 20, 20, 20], catalog="another").write(tmp_path / "d.parquet")
    records = [
        record("sasrec", 0, 0.06) | {"positions": "a.parquet"},
        record("hstu", 0, 0.08),  # of an earlier version: without
        record("tiger", 0, 0.06) | {"positions": "b.parquet"},
        record("tiger", 1, 0.06) | {"positions": "c.parquet"},
        record("generative", 0, 0.06) | {"positions": "d.parquet"},
    ]

    _, pairs = page(records).split("The same users in pairs", 1)

    sasrec, tiger, generative = (METHODS[name].title for name in ("sasrec", "tiger", "generative"))
    first, second, third = pairs.partition("| --- |")[2].splitlines()[1:4]
    assert first.startswith(f"| {tiger} (2 seeds) | 0.6250 |  | +0.1250 (")  # 3 and 2 of 4 against 2 of 4
    assert second.startswith(f"| {sasrec}")
    assert "| 0.5000 | -0.1250 (" in second
    assert third.startswith(f"| {generative}")
    assert third.count("cannot be compared") == 2


def test_the_csv_has_lists_and_slices():
    made = record("hstu", 0, 0.08)
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    made["lists"] = {MODEL: {"depth": 500, "coverage@10": 0.25, "novelty@10": estimate, "diversity@10": None}}
    made["slices"] = {"cold items": {"rule": "few", "results": {MODEL: {"recall@10": estimate}}}}

    table = table_of_all([made]).splitlines()

    assert f'"beauty, shuffled",hstu,0,{MODEL},coverage@10,0.25000,,' in table
    assert f'"beauty, shuffled",hstu,0,{MODEL},novelty@10,0.50000,0.40000,0.60000' in table
    assert f'"beauty, shuffled",hstu,0,"{MODEL}, cold items",recall@10,0.50000,0.40000,0.60000' in table


@pytest.mark.parametrize(("later", "are_alike"), [({}, True), ({"dropout": 0.5}, False)])
def test_seeds_between_which_a_setting_came_are_of_one_method_where_it_has_its_default(
    tmp_path, later, are_alike
):
    positions([0, 0, 20, 99], method="of all settings then", seed=0).write(tmp_path / "a.parquet")
    positions([0, 20, 5, 5], method="of all settings now", seed=1, snapshot_fingerprint="b").write(
        tmp_path / "b.parquet"
    )
    positions([0, 20, 20, 5], method="another", seed=0).write(tmp_path / "c.parquet")
    model = {"name": "sasrec", "backbone": {"dim": 8}}
    now = {"name": "sasrec", "backbone": {"dim": 8, "num_layers": 2} | later}
    records = [
        record("sasrec", 0, 0.06) | {"positions": "a.parquet", "made_of": {"settings": {"model": model}}},
        record("sasrec", 1, 0.06) | {"positions": "b.parquet", "made_of": {"settings": {"model": now}}},
        record("hstu", 0, 0.06) | {"positions": "c.parquet"},
    ]

    _, pairs = page(records).split("The same users in pairs", 1)

    assert "cannot be compared" not in pairs
    assert ("(2 seeds)" in pairs) == are_alike  # else the newer one is the row


def test_the_readme_has_what_was_measured_best_first():
    heading = "| | recall@10 | ndcg@10 | seeds | training |\n| --- | --- | --- | --- | --- |\n"
    readme = f"Before\n\n{heading}| old | 0.1 | 0.1 | 1 | 1 min |\n\nAfter\n"
    measured = [("sasrec", 0, 0.06), ("hstu", 0, 0.05), ("hstu", 1, 0.09), ("tiger", 0, 0.2)]

    written = with_best_rows(readme, [record(*each) for each in measured])

    rows = written.removeprefix(f"Before\n\n{heading}").removesuffix("\n\nAfter\n").splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| HSTU, full softmax", "| SASRec, full softmax"]
    assert rows[0].split(" | ")[1].startswith("0.0700")
    assert rows[0].split(" | ")[3] == "2"


def test_the_readme_is_up_to_date(monkeypatch):
    monkeypatch.setattr("benchmarks.quality_page.RECORDS", REAL_RECORDS)
    written = [json.loads(path.read_text()) for path in sorted(REAL_RECORDS.glob("*.json"))]
    readme = README.read_text()

    assert with_best_rows(readme, [each for each in written if "ties" in each]) == readme


def test_times_of_all_trainings_and_searches_stand_beside_the_budget():
    of_processor = {**record("sasrec", 0, 0.1), "processor_minutes": 57.0}
    before_it_was_recorded = {**record("hstu", 0, 0.1), "training_minutes": 63.0}
    trials = {"completed": 12, "pruned": 0, "failed": 0}
    search = {"of_recipe": 0.1, "of_best": 0.1, "best": 0, "trials": trials, "processor_minutes": 180.0}

    text = page([of_processor, before_it_was_recorded], tuned=[{**of_processor, "search": search}])

    assert "Those on record took 5; 1 of 2 trainings count by the minutes of their steps" in text
