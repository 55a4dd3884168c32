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
    ],
)
def test_mistakes_in_the_config_are_named(table, message):
    with pytest.raises(InputError, match=message):
        TableConfig.parse(table)
