import pytest

from rayrec.embeddings.config import AdamConfig, RowwiseAdagradConfig, SparseConfig
from rayrec.platform.errors import InputError


def test_optimizer_is_chosen_by_its_kind_and_is_rowwise_adagrad_unless_said():
    config = SparseConfig.parse(
        {
            "tables": [
                {"name": "items", "dim": 8, "seed": 1},
                {"name": "users", "dim": 8, "seed": 2, "optimizer": {"kind": "adam", "lr": 0.01}},
            ]
        }
    )
    assert isinstance(config.tables[0].optimizer, RowwiseAdagradConfig)
    assert config.tables[1].optimizer == AdamConfig(lr=0.01)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"name": "items", "dim": 8}, {"name": "items", "dim": 4, "seed": 1}], "two .*named 'items'"),
        ([{"name": "items", "dim": 8}, {"name": "users", "dim": 8}], "'items' and 'users' share seed 0"),
        ([], "tables"),
        ([{"name": "items", "dim": 0}], "dim"),
        ([{"name": "items", "dim": 8, "optimizer": {"kind": "adam", "rl": 1}}], "did you mean 'lr'"),
        ([{"name": "items", "dim": 8, "optimizer": {"kind": "adam", "betas": [0.9, 1.0]}}], "betas"),
    ],
)
def test_mistakes_in_the_config_are_named(tables, message):
    with pytest.raises(InputError, match=message):
        SparseConfig.parse({"tables": tables})
