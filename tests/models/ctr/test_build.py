import dataclasses

import pytest
import torch
from pydantic import ValidationError

from rayrec.models.ctr.config import DinConfig, DlrmConfig
from rayrec.models.ctr.program import build_ctr_model
from rayrec.models.registry import AnyModelConfig
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from tests.models.ctr.batches import CONFIGS, SCHEMA

every_network = pytest.mark.parametrize("name", CONFIGS)
RENAMED = ImpressionSchema(
    labels=("a", "b"),
    numbers=("c", "d"),
    ids={"e": "e", "item": "item", "g": "g"},
    lists={"clicked": "item", "h.i": "h"},
)
"""The shapes of `SCHEMA`; a name has a dot."""


def weights(name: str, seed: int, schema: ImpressionSchema = SCHEMA) -> dict[str, torch.Tensor]:
    return dict(build_ctr_model(CONFIGS[name], schema, seed).named_parameters())


@every_network
def test_initial_weights_hang_on_seed_and_shapes_alone(name):
    state = torch.random.get_rng_state()
    first = weights(name, seed=1)
    torch.rand(3)
    again, renamed, other = weights(name, 1), weights(name, 1, RENAMED), weights(name, 2)

    assert first.keys() == again.keys() == renamed.keys()
    assert all(torch.equal(first[key], again[key]) and torch.equal(first[key], renamed[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    torch.random.set_rng_state(state)


@every_network
def test_building_leaves_the_global_generator_alone(name):
    state = torch.random.get_rng_state()

    weights(name, seed=1)

    assert torch.equal(torch.random.get_rng_state(), state)


@every_network
def test_shapes_are_known_without_memory(name):
    with torch.device("meta"):
        built = build_ctr_model(CONFIGS[name], SCHEMA, seed=1)

    assert all(parameter.is_meta for parameter in built.parameters())
    shapes = {key: weight.shape for key, weight in weights(name, seed=1).items()}
    assert {key: weight.shape for key, weight in built.named_parameters()} == shapes


@every_network
def test_settings_know_the_width_of_rows(name):
    built = build_ctr_model(CONFIGS[name], SCHEMA, seed=1)

    assert built.row_dim == CONFIGS[name].row_dim


@every_network
def test_nothing_but_weights_is_saved(name):
    """Snapshots and sharding know parameters, which have at least one axis."""
    built = build_ctr_model(CONFIGS[name], SCHEMA, seed=1)

    assert built.state_dict().keys() == dict(built.named_parameters()).keys()
    assert all(parameter.ndim for parameter in built.parameters())


def test_weights_of_labels_stand_in_the_order_of_the_schema():
    config = DlrmConfig(name="dlrm", label_weights={"like": 0.5}, positive_weights={"like": 3, "click": 2})

    loss = build_ctr_model(config, SCHEMA, seed=1).label_loss

    assert loss.label_weights_T.tolist() == [1.0, 0.5]
    assert loss.positive_weights_T.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            DlrmConfig(name="dlrm", label_weights={"buy": 2}),
            "label_weights names 'buy', .* there are: 'click', 'like'",
        ),
        (DlrmConfig(name="dlrm", positive_weights={"buy": 2}), "positive_weights names 'buy'"),
        (DlrmConfig(name="dlrm", label_weights={"click": 0, "like": 0}), "0 for every label"),
        (
            DinConfig(name="din", attention={"seen": "item"}),
            "names 'seen', which is no column of lists; there are: 'clicked', 'tags'",
        ),
        (
            DinConfig(name="din", attention={"clicked": "shop"}),
            "names 'shop', which is no column of ids; there are: 'user', 'item', 'brand'",
        ),
        (DinConfig(name="din", attention={"tags": "item"}), "other spaces"),
    ],
)
def test_settings_that_do_not_fit_the_columns_are_refused(config, message):
    with pytest.raises(InputError, match=message):
        build_ctr_model(config, SCHEMA, seed=1)


def test_columns_from_which_nothing_can_be_learned_are_refused():
    for schema in (ImpressionSchema(labels=("click",)), dataclasses.replace(SCHEMA, labels=())):
        with pytest.raises(InputError, match="needs at least one column"):
            build_ctr_model(CONFIGS["dlrm"], schema, seed=1)


class Run(Config):
    model: AnyModelConfig


def test_settings_are_told_apart_by_name():
    for config in CONFIGS.values():
        assert Run.parse({"model": config.model_dump()}).model == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "din", "attention": {}}, "model.attention is empty"),
        ({"name": "dlrm", "dim": 0}, "model.dim"),
        ({"name": "dcn_v2", "rank": 0}, "rank"),
        ({"name": "mmoe", "hidden_dims": []}, "hidden_dims"),
        ({"name": "dlrm", "positive_weights": {"click": 0}}, "positive_weights"),
        ({"name": "dlrm", "label_weights": {"click": -1}}, "label_weights"),
        ({"name": "wide_and_deep"}, "'dlrm', 'deepfm', 'dcn_v2', 'din', 'mmoe'"),
    ],
)
def test_mistakes_in_settings_are_named(settings, message):
    with pytest.raises(InputError, match=message):
        Run.parse({"model": settings})


def test_settings_are_immutable():
    with pytest.raises(ValidationError):
        CONFIGS["dlrm"].dim = 5
