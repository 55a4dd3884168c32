import pytest

from rayrec.embeddings.config import AdamConfig, RowwiseAdagradConfig, TableConfig
from rayrec.platform.errors import InputError


def test_optimizer_is_chosen_by_its_kind_and_is_rowwise_adagrad_unless_said():
    assert isinstance(TableConfig.parse({"name": "items", "dim": 8}).optimizer, RowwiseAdagradConfig)
    chosen = TableConfig.parse({"name": "users", "dim": 8, "optimizer": {"kind": "adam", "lr": 0.01}})
    assert chosen.optimizer == AdamConfig(lr=0.01)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "", "dim": 8}, "name"),
        ({"name": "items", "dim": 0}, "dim"),
        ({"name": "items", "dim": 8, "optimizer": {"kind": "adam", "rl": 1}}, "did you mean 'lr'"),
        ({"name": "items", "dim": 8, "optimizer": {"kind": "adam", "betas": [0.9, 1.0]}}, "betas"),
        ({"name": "items", "dim": 8, "eviction": {"ttl_hours": 0}}, "ttl_hours"),
        ({"name": "items", "dim": 8, "eviction": {"max_rows": 1000}}, "max_rows"),
        ({"name": "items", "dim": 8, "eviction": {"min_score": 0.5}}, "half_life_steps is missing"),
        (
            {"name": "items", "dim": 8, "eviction": {"max_age_steps": 9, "half_life_steps": 5}},
            "half_life_steps needs keep: score or min_score",
        ),
        (
            {
                "name": "items",
                "dim": 8,
                "eviction": {"max_age_steps": 9, "keep": "score", "half_life_steps": 5},
            },
            "keep: score needs max_rows_per_bucket, max_rows or max_bytes",
        ),
        (
            {"name": "items", "dim": 64, "eviction": {"max_bytes": "20 MiB"}},
            r"max_bytes is 20\.0 MiB, less than a row of 322 bytes for each of 65,536 buckets \(20\.1 MiB\)",
        ),
    ],
)
def test_mistakes_in_the_config_are_named(table, message):
    with pytest.raises(InputError, match=message):
        TableConfig.parse(table)


@pytest.mark.parametrize(
    ("eviction", "most"),
    [
        ({"max_age_steps": 5}, None),
        ({"max_rows_per_bucket": 7}, (7, 0)),
        ({"max_rows": 5 * 65_536 + 100}, (5, 100)),
        ({"max_rows": 5 * 65_536, "max_rows_per_bucket": 3}, (3, 0)),
        ({"max_rows": 5 * 65_536 + 100, "max_rows_per_bucket": 5}, (5, 0)),
        ({"max_bytes": 10 * 322 * 65_536}, (10, 0)),
    ],
)
def test_a_bound_on_a_table_is_one_on_each_of_its_buckets(eviction, most):
    table = TableConfig.parse({"name": "items", "dim": 64, "eviction": eviction})
    assert table.most_rows == most


def test_what_a_row_takes_is_its_record_and_its_id():
    table = {"name": "items", "dim": 64}
    assert TableConfig.parse(table).bytes_of_row == 4 * (64 + 1 + 2) + 54
    on_disk = TableConfig.parse(table | {"disk": {"memory": "1 GiB"}, "optimizer": {"kind": "adam"}})
    assert on_disk.bytes_of_row == 4 * (3 * 64 + 2) + 13


def test_a_decay_that_leaves_nothing_of_a_row_is_refused():
    with pytest.raises(ValueError, match="lr times weight_decay is 2, and has to be below 1"):
        AdamConfig(lr=0.5, weight_decay=4.0)
