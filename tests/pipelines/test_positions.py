"""Files of positions, and what slices and comparisons make of them, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.evaluation.compare import ALL_USERS, Evaluated, Sources, compare, evaluated, expanded
from rayrec.pipelines.evaluation.lists import CO_VISITATION, MODEL, MODEL_UNMASKED
from rayrec.pipelines.metrics.positions import (
    EvaluatedUsers,
    ListInfo,
    Positions,
    PositionsHeader,
    read_header,
)
from rayrec.pipelines.metrics.ranking_metrics import metric_names
from rayrec.pipelines.metrics.slices import head_from, slice_reports, slices_of
from rayrec.platform.errors import InputError

DEPTH = 100


def made(
    places: dict[str, list[int]], of_users: EvaluatedUsers | None = None, depth: int = DEPTH, **header: Any
) -> Positions:
    """Positions of as many users as each list has places."""
    infos = {
        name: ListInfo(depth=depth, seen_items="kept" if "kept" in name else "left out", search="by hand")
        for name in places
    }
    values: dict[str, Any] = {
        "run": "a-run",
        "dataset": "tiny",
        "fingerprint": "f",
        "split": "test",
        "split_rule": "leave_one_out",
        "users": "u",
        "held_out": "h",
        "catalog": "c",
        "num_users": len(next(iter(places.values()))),
        "num_items": 1000,
        "head_from": 10,
        "lists": infos,
    }
    return Positions(
        PositionsHeader(**(values | header)),
        {name: np.array(each) for name, each in places.items()},
        of_users,
    )


def users_of(counts, lengths, behaviors=None, repeats=None) -> EvaluatedUsers:
    num_users = len(counts)
    return EvaluatedUsers(
        user_ids_U=np.arange(num_users) * 7,
        targets_U=np.arange(num_users) + 100,
        history_lengths_U=np.array(lengths),
        train_counts_U=np.array(counts),
        is_repeat_U=np.zeros(num_users, dtype=bool) if repeats is None else np.array(repeats),
        behaviors_U=None if behaviors is None else np.array(behaviors),
    )


def side(*places: list[int], where: str = "here", name: str = MODEL, **header: Any) -> list[Evaluated]:
    """A seed for each list of places."""
    return [
        Evaluated(where, name, made({name: each}, **({"snapshot_fingerprint": f"{where} {seed}"} | header)))
        for seed, each in enumerate(places)
    ]


def test_a_file_has_what_was_written_and_counts_from_one(tmp_path):
    users = users_of([0, 3, 50], [1, 2, 60], behaviors=[0, -1, 1], repeats=[True, False, False])
    written = made({MODEL: [0, 99, DEPTH], MODEL_UNMASKED: [DEPTH, 4, 7]}, users, behaviors=("view", "buy"))
    path = tmp_path / "new" / "some.positions.parquet"

    written.write(path)
    read = Positions.read(path)

    table = pq.read_table(path)
    assert table[MODEL].to_pylist() == [1, 100, None]
    assert table["target_behavior"].to_pylist() == [0, None, 1]
    assert read.header == written.header == read_header(path)
    for name, places_U in written.places.items():
        assert read.places[name].tolist() == places_U.tolist()
    assert read.users is not None
    for name, values in vars(users).items():
        assert getattr(read.users, name).tolist() == values.tolist()


def test_one_list_without_users_takes_two_bytes_a_user_at_most(tmp_path):
    places = np.random.default_rng(0).integers(0, DEPTH + 1, 20_000).tolist()
    whole = made({MODEL: places, MODEL_UNMASKED: places}, users_of([1] * len(places), [2] * len(places)))
    path = tmp_path / "a.positions.parquet"

    whole.only(MODEL).write(path)

    read = Positions.read(path)
    assert (list(read.places), read.users) == ([MODEL], None)
    assert read.places[MODEL].tolist() == places
    assert path.stat().st_size < 2 * len(places)


def test_what_is_no_file_of_positions_is_refused(tmp_path):
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), other)
    for path, message in (
        (tmp_path / "none", "there is no such file"),
        (other, "not a file of positions"),
        (Path(__file__), "not a file of positions"),
    ):
        with pytest.raises(InputError, match=message):
            Positions.read(path)


def test_the_head_makes_up_four_fifths_of_the_events():
    assert head_from(np.array([1, 50, 4, 30, 15])) == 30  # 50 + 30 of 100
    assert head_from(np.array([1, 50, 4, 29, 16])) == 16  # 79 are too few
    assert head_from(np.array([10, 10, 10, 10, 10])) == 10
    assert head_from(np.array([0, 0])) == 1  # nothing is of the head


def test_slices_by_hand():
    users = users_of([0, 4, 5, 9, 10, 200], [0, 1, 4, 5, 49, 50], behaviors=[0, 0, 1, -1, 1, 1])

    found = {each.name: each.chosen_U.astype(int).tolist() for each in slices_of(users, 10, ("view", "buy"))}

    assert found == {
        "unseen items": [1, 0, 0, 0, 0, 0],
        "cold items": [1, 1, 0, 0, 0, 0],
        "warm items": [0, 0, 1, 1, 1, 1],
        "head items": [0, 0, 0, 0, 1, 1],
        "tail items": [1, 1, 1, 1, 0, 0],
        "history of 0": [1, 0, 0, 0, 0, 0],
        "history of 1 to 4": [0, 1, 1, 0, 0, 0],
        "history of 5 to 9": [0, 0, 0, 1, 0, 0],
        "history of 10 to 19": [0, 0, 0, 0, 0, 0],
        "history of 20 to 49": [0, 0, 0, 0, 1, 0],
        "history of 50 or more": [0, 0, 0, 0, 0, 1],
        "behavior view": [1, 1, 0, 0, 0, 0],
        "behavior buy": [0, 0, 1, 0, 1, 1],
    }


def test_a_slice_without_users_is_left_out_and_named():
    users = users_of([4, 5, 10], [1, 1, 1])

    slices, empty = slice_reports(made({MODEL: [0, 20, DEPTH]}, users))

    assert empty == [
        "unseen items",
        "history of 0",
        "history of 5 to 9",
        "history of 10 to 19",
        "history of 20 to 49",
        "history of 50 or more",
    ]
    assert {name: each.num_users for name, each in slices.items()} == {
        "cold items": 1,
        "warm items": 2,
        "head items": 1,
        "tail items": 2,
        "history of 1 to 4": 3,
    }
    assert slices["warm items"].results[MODEL]["recall@50"].value == 0.5
    assert slices["tail items"].results[MODEL]["recall@10"].value == 0.5
    assert "recall@500" not in slices["tail items"].results[MODEL]  # lists have 100 items
    assert "fewer than 5 training events" in slices["cold items"].rule


def test_two_methods_by_hand():
    a, b = side([0, 5, 50, DEPTH]), side([0, 50, 3, 2])

    found = compare(a, b, "recall@10").estimates[ALL_USERS]

    assert (found.a.value, found.b.value, found.difference.value) == (0.5, 0.75, 0.25)
    assert (found.only_a, found.only_b, found.num_users) == (1, 2, 4)
    assert found.mcnemar_p == pytest.approx(1.0)  # 1 of 3
    assert found.difference.low < 0 < found.difference.high


def test_slices_of_runs_of_other_training_data_are_by_those_of_the_run_that_knows_most():
    earlier = [Evaluated("earlier", MODEL, made({MODEL: [0, 0, 99, 99]}, users_of([0, 1, 2, 9], [4] * 4)))]
    later = [Evaluated("later", MODEL, made({MODEL: [0, 99, 0, 0]}, users_of([0, 9, 9, 9], [4] * 4)))]

    one, other = compare(earlier, later, "recall@10", True), compare(later, earlier, "recall@10", True)

    assert one.sliced_by == other.sliced_by == "later"
    for found in (one, other):
        assert found.estimates["cold items"].num_users == 1
        assert found.estimates["warm items"].num_users == 3


def test_slices_are_compared_with_the_users_of_either_side():
    users = users_of([4, 4, 20, 20], [1, 1, 1, 1])
    a = [Evaluated("a", MODEL, made({MODEL: [0, 0, 99, 99]}).only(MODEL))]
    b = [Evaluated("b", MODEL, made({MODEL: [0, 99, 0, 0]}, users))]

    found = compare(a, b, "recall@10", slices=True)

    assert found.estimates["cold items"].difference.value == -0.5
    assert found.estimates["head items"].difference.value == 1.0
    assert "unseen items" in found.empty_slices
    with pytest.raises(InputError, match="files of records leave out"):
        compare(a, a, "recall@10", slices=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"users": "v", "num_users": 943, "dataset": "big"}, "users .3 users of tiny; 943 users of big"),
        ({"catalog": "d", "num_items": 7}, "catalogs .1,000 items of tiny; 7 items of tiny"),
        ({"split": "valid"}, "splits .test; valid"),
        ({"held_out": "i", "split_rule": "time"}, "held-out events of the same users .tiny, split leave_one"),
        ({"name": MODEL_UNMASKED}, "mask rules .seen items left out; seen items kept"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(other, message):
    with pytest.raises(
        InputError, match=rf"runs/a \('model'\) and runs/b \(.*\) cannot be compared.*{message}"
    ):
        compare(side([0, 1, 2], where="runs/a"), side([0, 1, 2], where="runs/b", **other), "recall@10")


def test_lists_of_the_same_mask_rule_are_named():
    one, other = side([0, 1, 2]), side([0, 1, 2], where="runs/b", name=MODEL_UNMASKED)
    other[0].header.lists[MODEL] = one[0].info

    with pytest.raises(InputError, match="seen items kept; take of runs/b 'model'"):
        compare(one, other, "recall@10")


def test_seeds_of_one_side_have_to_fit_as_well():
    seeds = [*side([0, 1], where="runs/a-0"), *side([0, 1], where="runs/a-1", catalog="other")]

    with pytest.raises(InputError, match="runs/a-1"):
        compare(seeds, side([0, 1]), "recall@10")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"snapshot_fingerprint": "f0"}, r"the same run \(a-run\), which would count twice"),
        ({"method": "of content"}, "their settings differ in more than the seed"),
        ({"seed": 0}, "both have the seed 0"),
        ({"search": "512 beams"}, r"found differently \(by hand; 512 beams\)"),
    ],
)
def test_runs_of_one_side_are_different_seeds_of_one_method(other, message):
    def run(where: str, search: str = "by hand", **header: Any) -> Evaluated:
        values = {"method": "m", "seed": 0, "snapshot_fingerprint": "f0"} | header
        positions = made({MODEL: [0, 1]}, **values)
        info = positions.header.lists[MODEL].model_copy(update={"search": search})
        header_of = positions.header.model_copy(update={"lists": {MODEL: info}})
        return Evaluated(where, MODEL, Positions(header_of, positions.places))

    first, second = run("runs/a-0"), run("runs/a-1", seed=1, snapshot_fingerprint="f1")
    third = run("runs/b-2", **({"seed": 2, "snapshot_fingerprint": "f2"} | other))

    assert len(compare([first, second], [first], "recall@10").a) == 2
    with pytest.raises(InputError, match=f"runs/a-0 and runs/b-2 are not two seeds of one method.*{message}"):
        compare([first, third], [second], "recall@10")


def test_what_intervals_are_over_is_said():
    one, two = (
        side([0, 20], method="m", seed=0),
        [
            *side([0, 20], where="there", method="m", seed=0),
            *side([20, 0], where="there too", method="m", seed=1),
        ],
    )
    neighbors = side([0, 20], where="data")

    assert compare(one, one, "recall@10").over == "users"
    assert compare(two, two, "recall@10").over == "users and seeds"
    assert compare(one, two, "recall@10").over == "users and seeds of B, not of A, which has one"
    assert compare(two, one, "recall@10").over == "users and seeds of A, not of B, which has one"
    assert compare(two, neighbors, "recall@10").over == "users and seeds of A, not of B, which is not trained"


def test_files_of_different_formats_are_not_compared():
    with pytest.raises(InputError, match=r"different formats.*evaluate the older one again"):
        compare(side([0, 1], format=1), side([0, 1]), "recall@10")


def test_a_list_that_is_too_short_for_a_metric_is_refused():
    deep = side([0, 400], depth=500, where="deep")
    short = side([0, DEPTH], where="short")

    assert compare(deep, deep, "recall@500").estimates[ALL_USERS].a.value == 1.0
    with pytest.raises(InputError, match="short: its lists 'model' have 100 items, too few for recall@500"):
        compare(deep, short, "recall@500")


@pytest.mark.parametrize("metric", ["precision@10", "recall@7", "recall", "ndcg@1"])
def test_a_metric_that_does_not_exist_is_refused_with_those_that_do(metric):
    with pytest.raises(InputError, match=rf"no metric '{metric}'.*{', '.join(metric_names(500))}"):
        compare(side([0]), side([0]), metric)


def test_a_record_names_its_positions(tmp_path):
    made({MODEL: [0, 3], CO_VISITATION: [3, 3]}).write(tmp_path / "positions" / "a.positions.parquet")
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"positions": "positions/a.positions.parquet"}))

    of_model = evaluated(str(record), None, Sources())
    of_neighbors = evaluated(str(record), CO_VISITATION, Sources())

    assert (of_model.name, of_model.scores("recall@1").tolist()) == (MODEL, [1, 0])
    assert of_neighbors.scores("recall@3").tolist() == [0, 0]
    with pytest.raises(InputError, match="has no list 'swing'; it has 'model', 'neighbors, co-visitation'"):
        evaluated(str(record), "swing", Sources())
    with pytest.raises(InputError, match=r"of the split 'test', not of 'valid' \(--split\)"):
        evaluated(str(record), None, Sources(split="valid"))


def test_a_record_of_an_earlier_version_is_refused_by_name(tmp_path):
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"results": {}}))

    with pytest.raises(InputError, match=r"record.json: names no file of positions"):
        evaluated(str(record), None, Sources())


def test_a_side_is_one_run_or_several_or_a_pattern():
    names = {"runs/a-*": ["runs/a-1", "runs/a-0"]}

    assert expanded("runs/x", names.__getitem__) == ["runs/x"]
    assert expanded("runs/x,runs/a-*", names.__getitem__) == ["runs/x", "runs/a-0", "runs/a-1"]
    for said in ("", "runs/x,", "runs/x,,runs/y"):
        with pytest.raises(InputError, match=rf"'{said}': expected a run"):
            expanded(said, names.__getitem__)
    with pytest.raises(InputError, match=r"runs/b-\*: there is nothing"):
        expanded("runs/b-*", lambda pattern: [])
