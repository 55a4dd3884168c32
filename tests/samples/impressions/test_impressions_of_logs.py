"""Impressions made of logs of events: what was known at the time, and nothing else."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.ids import id_of, null_id
from rayrec.samples.impressions.layouts.histories import histories_now, past_events_before
from rayrec.samples.impressions.prepare import prepare_impressions
from rayrec.samples.impressions.query_rows import QueryRows
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import real_data


def prepared(layout, source, out, **settings):
    prepare_impressions(source, out, ImpressionsConfig(layout=layout, **settings))
    return ImpressionDataset.open(out)


def all_rows(dataset):
    train = [pq.read_table(dataset.root / name) for name in dataset.train_files]
    return pa.concat_tables([*train, dataset.split_table("valid"), dataset.split_table("test")])


def write(folder, **files):
    folder.mkdir()
    for name, lines in files.items():
        (folder / name.replace("__", ".")).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("seed", range(5))
def test_histories_are_those_of_brute_force(seed):
    random = np.random.default_rng(seed)
    users_E, times_E = random.integers(0, 4, 60), random.integers(0, 9, 60)
    kept_E = random.random(60) < 0.6
    histories = past_events_before(users_E, times_E, pa.array([f"i{n}" for n in range(60)]), kept_E, most=3)
    for event in range(60):
        before = np.flatnonzero((users_E == users_E[event]) & (times_E < times_E[event]))
        kept = before[kept_E[before]]
        newest = kept[np.argsort(times_E[kept], kind="stable")][-3:]
        assert histories.of(np.array([event])).to_pylist() == [[f"i{n}" for n in newest]]
        assert histories.num_events_E[event] == len(before)
        assert histories.num_kept_E[event] == len(kept)


@pytest.fixture
def films(tmp_path):
    ratings = [
        ("1", item, rating, 100 * n) for n, (item, rating) in enumerate([(7, 5), (8, 3), (9, 4), (7, 4)])
    ]
    ratings += [("2", 8, 4, 200), ("2", 9, 1, 200), ("1", 5, 2, 1000), ("2", 5, 5, 2000)]
    return write(
        tmp_path / "ml",
        ml__inter=[
            "user_id:token\titem_id:token\trating:float\ttimestamp:float",
            *("\t".join(map(str, row)) for row in ratings),
        ],
        ml__item=[
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            "7\tSeven\t1995\tCrime Drama",
            "8\tEight\tunkonwn\t",
        ],
        ml__user=["user_id:token\tage:token\tgender:token\tzip_code:token", "1\t24\tM\t85711"],
    )


def test_movielens_knows_the_past_alone(films, tmp_path):
    dataset = prepared("movielens", films, tmp_path / "data", valid_start=1000, test_start=2000, split="time")
    assert dataset.manifest.rows == {"train": 6, "valid": 1, "test": 1}
    rows = all_rows(dataset).to_pylist()
    assert [row["liked"] for row in rows] == [1, 0, 1, 1, 0, 1, 0, 1]
    item = {n: id_of("item", str(n)) for n in (5, 7, 8, 9)}
    of_one = [row for row in rows if row["user"] == id_of("user", "1")]
    assert [row["history"] for row in of_one] == [
        [],
        [item[7]],
        [item[7]],
        [item[7], item[9]],
        [item[7], item[9], item[7]],
    ]
    assert [row["num_rated"] for row in of_one] == [0, 1, 2, 3, 4]
    assert [row["share_liked"] for row in of_one] == [None, 1, 0.5, np.float32(2 / 3), 0.75]
    of_two = [row for row in rows if row["user"] == id_of("user", "2")]
    assert [row["history"] for row in of_two] == [[], [], [item[8]]]  # two ratings of one second


def test_movielens_describes_users_and_films(films, tmp_path):
    dataset = prepared("movielens", films, tmp_path / "data", positive_rating=5)
    first, second = all_rows(dataset).to_pylist()[:2]
    assert first["genres"] == [id_of("genre", "Crime"), id_of("genre", "Drama")]
    assert (first["release_year"], second["release_year"], second["genres"]) == (1995, None, [])
    assert first["age_group"] == id_of("age_group", "18")
    assert first["zip_prefix"] == id_of("zip_prefix", "857")
    assert [row["gender"] for row in all_rows(dataset).to_pylist()].count(None) == 3
    assert dataset.schema.lists == {"genres": "genre", "history": "item"}
    assert sum(row["liked"] for row in all_rows(dataset).to_pylist()) == 2
    assert null_id("gender") not in all_rows(dataset)["gender"].to_pylist()


def test_movielens_is_divided_by_time_alone(films, tmp_path):
    with pytest.raises(InputError, match="the layout movielens is divided by time"):
        prepared("movielens", films, tmp_path / "data", split="random")


@pytest.fixture
def articles(tmp_path):
    events = [
        (10, "VIEW", "a", "p", "BR"),
        (10, "LIKE", "a", "p", "BR"),
        (20, "VIEW", "b", "p", ""),
        (30, "VIEW", "a", "q", "US"),
        (130, "LIKE", "b", "p", ""),  # in the time of validation
        (120, "VIEW", "b", "q", "US"),
        (125, "VIEW", "a", "q", "US"),  # a second time
        (140, "COMMENT CREATED", "b", "q", "US"),
        (220, "FOLLOW", "c", "p", "BR"),  # seen by following
        (260, "BOOKMARK", "c", "p", "BR"),
    ]
    header = "timestamp,eventType,contentId,personId,userCountry"
    return write(
        tmp_path / "deskdrop",
        users_interactions__csv=[header, *(",".join(map(str, event)) for event in reversed(events))],
        shared_articles__csv=[
            "timestamp,contentId,authorPersonId,lang",
            "1,a,77,en",
            "2,a,78,pt",
            "3,b,79,pt",
        ],
    )


def test_deskdrop_labels_are_of_the_period_of_their_split(articles, tmp_path):
    dataset = prepared("deskdrop", articles, tmp_path / "data", split="time", valid_start=100, test_start=200)
    assert dataset.manifest.rows == {"train": 3, "valid": 1, "test": 1}
    rows = all_rows(dataset).to_pydict()
    assert rows["like"] == [1, 0, 0, 0, 0]  # that of b came later
    assert rows["comment"] == [0, 0, 0, 1, 0]
    assert rows["follow"] == [0, 0, 0, 0, 1]
    assert rows["bookmark"] == [0, 0, 0, 0, 1]
    a, b = id_of("item", "a"), id_of("item", "b")
    assert rows["history"] == [[], [a], [], [a], [a, b]]
    assert rows["author"] == [id_of("author", key) if key else None for key in ("77", "79", "77", "79", "")]
    assert rows["country"] == [id_of("country", key) if key else None for key in ("BR", "", "US", "US", "BR")]
    assert dataset.schema.group == "user"
    assert list(dataset.schema.labels) == ["like", "bookmark", "follow", "comment"]


@pytest.mark.slow
def test_the_later_log_changes_no_earlier_row(tmp_path):
    source = real_data("deskdrop")
    events = pd.read_csv(source / "users_interactions.csv.gz", dtype=str)
    times = events["timestamp"].astype(int)
    valid_start, test_start = sorted(times)[30_000], sorted(times)[40_000]
    found = {}
    for name, kept in {"whole": times >= 0, "cut": times < test_start + 86_400}.items():
        folder = tmp_path / name
        folder.mkdir()
        events[kept].to_csv(folder / "log.csv", index=False)
        found[name] = prepared(
            "deskdrop",
            folder,
            tmp_path / f"{name}-data",
            split="time",
            valid_start=valid_start,
            test_start=test_start,
        )
    assert found["whole"].manifest.rows["train"] > 10_000
    for name in ("train/part-00000.parquet", "valid.parquet"):
        assert found["whole"].manifest.files[name] == found["cut"].manifest.files[name]


@pytest.mark.slow
def test_the_real_logs(tmp_path):
    films = prepared("movielens", real_data("movielens-100k"), tmp_path / "ml")
    assert sum(films.manifest.rows.values()) == 100_000
    assert sum(films.manifest.positives["liked"].values()) == 34_174 + 21_201
    assert (films.num_ids["user"], films.num_ids["item"], films.num_ids["genre"]) == (943, 1682, 19)
    articles = prepared("deskdrop", real_data("deskdrop"), tmp_path / "deskdrop")
    assert sum(articles.manifest.rows.values()) == 40_710
    assert articles.manifest.positives["like"]["train"] == 4745
    assert (articles.num_ids["user"], articles.num_ids["item"]) == (1895, 2987)


def histories_of(source, out, **settings):
    """A data set of histories of the same log, in which no article is described twice."""
    copy = write(
        out.parent / f"{out.name}-source",
        **{
            path.name.replace(".", "__"): [
                line for line in path.read_text().splitlines() if line != "2,a,78,pt"
            ]
            for path in source.iterdir()
        },
    )
    prepare(copy, out, PrepareConfig(**settings))
    return str(out)


def test_what_a_data_set_of_histories_holds_out_is_held_out(films, tmp_path):
    # The last two events of "1" are held out; "2" has three events, two of them of one second.
    histories = histories_of(films, tmp_path / "histories", allow=frozenset({"duplicates"}))
    dataset = prepared("movielens", films, tmp_path / "data", held_out_of=histories)
    assert dataset.manifest.rows == {"train": 4, "valid": 2, "test": 2}
    assert dataset.manifest.split.kind == "data_set"
    assert dataset.manifest.split.held_out_of == Dataset.open(histories).fingerprint
    one, seven, five = id_of("user", "1"), id_of("item", "7"), id_of("item", "5")
    of_one = {
        split: [row["item"] for row in dataset.split_table(split).to_pylist() if row["user"] == one]
        for split in ("valid", "test")
    }
    assert of_one == {"valid": [seven], "test": [five]}


def test_blanks_around_ids_say_nothing(tmp_path):
    rows = [(f"u{n % 2}", f"i{n // 2}", 1000 + n, 2 + n % 4) for n in range(12)]
    files = {}
    for name, blank in (("plain", ""), ("blank", " ")):
        ratings = [
            f"{user}{blank * (n % 3)},{blank * (n % 2)}{item},{time},{rating}"
            for n, (user, item, time, rating) in enumerate(rows)
        ]
        files[name] = write(
            tmp_path / name,
            interactions__csv=["user_id,item_id,timestamp,rating", *ratings],
            items__csv=["item_id,year", *(f"{blank}i{n},{1990 + n}" for n in range(6))],
            users__csv=["user_id,gender", f"u0{blank},F", f"u1,{'M'}"],
        )
    prepare(files["plain"], tmp_path / "histories", PrepareConfig())
    held_out_of = str(tmp_path / "histories")
    plain, blank = (
        prepared("movielens", files[name], tmp_path / f"of {name}", held_out_of=held_out_of) for name in files
    )
    assert blank.manifest.rows == plain.manifest.rows == {"train": 8, "valid": 2, "test": 2}
    assert all_rows(blank).equals(all_rows(plain))


def test_labels_of_held_out_events_are_no_labels_of_training(articles, tmp_path):
    histories = histories_of(articles, tmp_path / "histories")
    dataset = prepared("deskdrop", articles, tmp_path / "data", held_out_of=histories)
    rows = pq.read_table(dataset.root / dataset.train_files[0]).to_pylist()
    # The comment of "q" on b is what is tested, and the second view of a validates; b was seen before.
    (of_b,) = [row for row in rows if row["user"] == id_of("user", "q") and row["item"] == id_of("item", "b")]
    assert of_b["comment"] == 0
    # The bookmark of c is tested, the follow validates: the row is of the follow.
    (of_c,) = dataset.split_table("valid").to_pylist()
    assert (of_c["item"], of_c["follow"], of_c["bookmark"]) == (id_of("item", "c"), 1, 0)


def test_a_split_by_date_is_followed_too(films, tmp_path):
    histories = histories_of(
        films,
        tmp_path / "histories",
        split="time",
        valid_start=1000,
        test_start=2000,
        allow=frozenset({"duplicates"}),
    )
    dataset = prepared("movielens", films, tmp_path / "data", held_out_of=histories)
    assert dataset.manifest.rows == {"train": 6, "valid": 1, "test": 1}


def test_features_may_be_left_out(films, tmp_path):
    left_out = ("share_liked", "user", "genres")
    dataset = prepared("movielens", films, tmp_path / "data", leave_out=left_out)
    assert not set(left_out) & set(dataset.schema.features)
    assert dataset.schema.group == "user"
    with pytest.raises(InputError, match=r"--leave-out\) names 'price'; the features of .* are num_rated"):
        prepared("movielens", films, tmp_path / "other", leave_out=("price",))


def test_histories_of_all_films_have_no_share_of_those_liked(films, tmp_path):
    dataset = prepared("movielens", films, tmp_path / "data", history_events="all")
    assert "share_liked" not in dataset.schema.numbers
    last = max(all_rows(dataset).to_pylist(), key=lambda row: row["num_rated"])
    assert last["history"] == [id_of("item", key) for key in "7897"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"held_out_of": "data", "split": "time"}, "says what is held out"),
        ({"origins": {"price": "item.price"}}, r"origins \(--origin\) belongs to the layout table"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, expected):
    with pytest.raises(InputError, match=expected):
        ImpressionsConfig.parse({"layout": "movielens", **settings})


@pytest.mark.parametrize("events", ["all", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_who_asks_now_has_the_history_of_one_more_event(seed, events):
    random = np.random.default_rng(seed)
    lengths_B = random.integers(0, 7, 5)
    offsets_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
    items_N = random.integers(0, 5, offsets_B1[-1])
    found = histories_now(HistoryRule(events=events, length=3), pa.array(items_N), offsets_B1)
    for row in range(5):
        own = items_N[offsets_B1[row] : offsets_B1[row + 1]].tolist()
        kept = list(dict.fromkeys(own)) if events == "first" else own
        assert found.of(np.array([row])).to_pylist() == [kept[-3:]]
        assert (found.num_events_E[row], found.num_kept_E[row]) == (len(own), len(kept))


def test_articles_are_ranked_by_the_hour_in_which_somebody_asks(articles, tmp_path):
    histories = Dataset.open(histories_of(articles, tmp_path / "histories"))
    dataset = prepared("deskdrop", articles, tmp_path / "data", leave_out=("country",))
    made = QueryRows(dataset, histories, dataset.schema.features)
    a, b = (histories.position_by_key(key) for key in "ab")
    rows = made.rows(
        users_B=np.array([-1]),
        history_N=np.array([a, a, b]),
        offsets_B1=np.array([0, 3]),
        times_B=np.array([3600 * 5]),
        queries_R=np.array([0]),
        items_R=np.array([b]),
    ).rows.to_pylist()
    assert made.needs_times
    assert rows == [
        {
            "num_opened": 2,
            "user": None,
            "item": id_of("item", "b"),
            "hour_of_day": id_of("hour_of_day", "5"),
            "weekday": id_of("weekday", "3"),  # the first of January 1970 was a Thursday
            "author": id_of("author", "79"),
            "language": id_of("language", "pt"),
            "history": [id_of("item", "a"), id_of("item", "b")],
        }
    ]
    whole = prepared("deskdrop", articles, tmp_path / "whole")
    with pytest.raises(InputError, match=r"the column country, .* those who ask do not say"):
        QueryRows(whole, histories, whole.schema.features)
