from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from rayrec.platform.config import Config, differing_keys
from rayrec.platform.errors import InputError


class Layers(Config):
    num_layers: int = Field(2, gt=0)
    widths: tuple[int, int] = (4, 4)


class Tree(Config):
    kind: Literal["tree"]
    depth: int = 3


class Network(Config):
    kind: Literal["network"]
    layers: Layers = Layers()


class Settings(Config):
    seed: int = 0
    rate: float = 0.1
    note: str | None = None
    model: Annotated[Tree | Network, Field(discriminator="kind")]
    layers: Layers = Layers()
    by_name: dict[str, Layers] = Field(default_factory=dict)


TREE = {"model": {"kind": "tree"}}
NETWORK = {"model": {"kind": "network"}}


def complaint(values: dict) -> str:
    with pytest.raises(InputError) as raised:
        Settings.parse(values, source="run.yaml")
    return str(raised.value)


def with_layers(layers: dict) -> dict:
    return {"model": {"kind": "network", "layers": layers}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**TREE, "sed": 1}, "there is no setting 'sed'; did you mean 'seed'?"),
        ({**TREE, "layers": {"num_layer": 1}}, "no setting 'layers.num_layer'; did you mean 'num_layers'?"),
        (with_layers({"num_layer": 3}), "no setting 'model.layers.num_layer'; did you mean 'num_layers'?"),
        ({"model": {"kind": "tree", "layers": {}}}, "no setting 'model.layers'; known keys: depth, kind"),
        ({**TREE, "by_name": {"item": {"width": 1}}}, "'by_name.item.width'; did you mean 'widths'?"),
        ({**TREE, "zzz": 1}, "known keys: by_name, layers, model, note, rate, seed"),
    ],
)
def test_unknown_keys_suggest_the_nearest_of_their_place(values, expected):
    assert expected in complaint(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**TREE, "seed": "many"}, "seed: input should be a valid integer"),
        (with_layers({"num_layers": 0}), "model.layers.num_layers: input should be greater than 0, got 0"),
        ({**TREE, "layers": {"widths": [1, "b"]}}, "layers.widths.1: input should be a valid integer"),
        ({**TREE, "layers": {"widths": [1]}}, "the setting 'layers.widths.1' is missing"),
        ({}, "the setting 'model' is missing"),
        ({"model": {}}, "the setting 'model.kind' is missing; expected one of 'tree', 'network'"),
        ({"model": None}, "the setting 'model.kind' is missing; expected one of 'tree', 'network'"),
        ({**TREE, "rate": float("inf")}, "rate: input should be a finite number, got inf"),
        ({**TREE, "rate": float("nan")}, "rate: input should be a finite number, got nan"),
        ({**TREE, "seed": None}, "seed: input should be a valid integer, got None"),
        ({**TREE, "seed": True}, "seed: input should be a valid integer, unable to parse string as an"),
        ({**TREE, "rate": False}, "rate: input should be a valid number, unable to parse string as a number"),
        (with_layers({"num_layers": True}), "model.layers.num_layers: input should be a valid integer"),
        ({**TREE, "layers": [1]}, "layers: expected a mapping of keys to values, got [1]"),
        ({"model": "tree"}, "model: expected a mapping of keys to values, got 'tree'"),
        ({"model": {"kind": "bush"}}, "model.kind: expected one of 'tree', 'network', got 'bush'"),
    ],
)
def test_wrong_values_are_named_by_their_dotted_key(values, expected):
    assert expected in complaint(values)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"most": True}, "most"),
        ({"shares": {"click": False}}, "shares.click"),
        ({"sizes": [8, True]}, "sizes.1"),
        ({"betas": [0.9, True]}, "betas.1"),
    ],
)
def test_true_and_false_are_no_numbers_within_other_values_either(values, place):
    class Numbers(Config):
        most: Annotated[float, Field(gt=0)] | None = None
        shares: dict[str, Annotated[float, Field(ge=0)]] | None = None
        sizes: tuple[Annotated[int, Field(gt=0)], ...] | None = None
        betas: tuple[float, float] = (0.9, 0.99)

    with pytest.raises(InputError, match=rf"{place}: input should be a valid (number|integer), unable"):
        Numbers.parse(values)


def test_true_and_false_stay_where_they_may_be():
    class Mixed(Config):
        is_on: bool = False
        either: bool | int | None = None
        anything: Any = None
        several: tuple[bool | int, ...] = ()

    mixed = Mixed.parse({"is_on": True, "either": False, "anything": True, "several": [True, 2]})

    assert (mixed.is_on, mixed.either, mixed.anything, mixed.several) == (True, False, True, (True, 2))


def test_every_mistake_is_reported_at_once_and_names_the_source():
    message = complaint({**TREE, "sed": 1, "layers": {"num_layers": -1}})

    assert message.startswith("run.yaml: ")
    assert "'sed'" in message
    assert "layers.num_layers" in message


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Settings.parse(TREE).seed = 3


def load(tmp_path, text: str | bytes, *overrides: str) -> Settings:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Settings.load(path, overrides)


def test_overrides_are_applied_in_order_and_make_sections(tmp_path):
    settings = load(
        tmp_path, "{seed: 1, model: {kind: network}}", "seed=2", "seed=3", "model.layers.num_layers=5"
    )

    assert settings.seed == 3
    assert settings.model == Network(kind="network", layers=Layers(num_layers=5))


def test_an_empty_section_has_its_defaults(tmp_path):
    text = "model:\n  kind: network\n  layers:\nlayers:\nby_name:\nnote:\n"

    assert load(tmp_path, text) == Settings.parse(NETWORK)
    assert load(tmp_path, text, "layers.num_layers=7").layers == Layers(num_layers=7)


def test_a_key_that_stands_twice_is_named_with_its_line(tmp_path):
    text = "model: {kind: network}\nlayers:\n  num_layers: 1\n  widths: [1, 2]\n  num_layers: 2\n"

    with pytest.raises(InputError) as raised:
        load(tmp_path, text)
    assert str(raised.value) == (
        f"{tmp_path}/run.yaml: the key 'num_layers' in line 5 stands in line 3 already; keep one of them"
    )

    override = "layers={num_layers: 1, num_layers: 2}"
    with pytest.raises(
        InputError, match=r"^--set layers=.*: the key 'num_layers' in line 1 stands in line 1"
    ):
        load(tmp_path, "model: {kind: tree}", override)


def test_one_key_in_several_sections_and_merged_sections_are_no_repetition(tmp_path):
    text = (
        "model: {kind: network, layers: &small {num_layers: 1}}\nlayers: {<<: *small, num_layers: 3}\n"
        "by_name: {layers: {<<: *small}}\n"
    )

    settings = load(tmp_path, text)

    assert settings.layers == Layers(num_layers=3)
    assert settings.by_name == {"layers": Layers(num_layers=1)}

    text = (
        "by_name: {first: &one {num_layers: 1}, second: &two {<<: *one, num_layers: 2}}\n"
        "layers: {<<: *two}\nmodel: {kind: network}\n"
    )
    assert load(tmp_path, text).by_name["second"] == load(tmp_path, text).layers == Layers(num_layers=2)


def test_an_override_changes_one_of_the_sections_that_are_written_once(tmp_path):
    text = "model: {kind: network, layers: &all {num_layers: 1}}\nlayers: *all\n"

    settings = load(tmp_path, text, "layers.num_layers=4")

    assert settings.layers == Layers(num_layers=4)
    assert settings.model == Network(kind="network", layers=Layers(num_layers=1))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "--set seed: expected the form section.key=value"),
        ("=3", "--set =3: expected the form"),
        ("seed.deep=1", "--set seed.deep=1: 'seed' is a value, not a section"),
        ("seed=[1", "--set seed=[1: the value is not valid YAML"),
        ("seed=2026-02-30", "--set seed=2026-02-30: the value is not valid YAML"),
        ("model.dept=1", "no setting 'model.dept'; did you mean 'depth'?"),
    ],
)
def test_overrides_that_cannot_be_applied_are_explained(tmp_path, override, expected):
    with pytest.raises(InputError) as raised:
        load(tmp_path, "{seed: 1, model: {kind: tree}}", override)

    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("seed: [1", "not valid YAML"),
        (b"seed: \xff\xfe\x00", "not valid YAML"),
        ("- 1", "expected a mapping of settings, found list"),
        ("", "expected a mapping of settings, found NoneType"),
        ("seed: 2026-02-30", "not valid YAML: there is no such value as '2026-02-30'"),
        ("seed: !!bool perhaps", "not valid YAML: there is no such value as 'perhaps'"),
        ("!!map [seed]", "not valid YAML: expected a mapping node"),
    ],
)
def test_files_that_hold_no_settings_are_refused_by_name(tmp_path, content, expected):
    with pytest.raises(InputError) as raised:
        load(tmp_path, content)

    assert str(raised.value).startswith(str(tmp_path / "run.yaml"))
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.yaml: no such config file"):
        Settings.load(tmp_path / "nothing.yaml")


def test_of_a_relative_path_the_directory_that_was_looked_in_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"^nothing\.yaml: no such config file in {tmp_path};"):
        Settings.load("nothing.yaml")


@given(
    st.builds(
        Settings,
        seed=st.integers(),
        model=st.one_of(
            st.builds(Tree, kind=st.just("tree"), depth=st.integers()),
            st.builds(Network, kind=st.just("network"), layers=st.builds(Layers, num_layers=st.just(7))),
        ),
        by_name=st.dictionaries(st.text(), st.just(Layers(widths=(1, 2)))),
    )
)
def test_yaml_holds_everything(settings):
    assert Settings.parse(yaml.safe_load(settings.to_yaml())) == settings


def test_differing_keys_are_dotted_and_sorted():
    first = Settings.parse({"seed": 1, "model": {"kind": "network", "layers": {"num_layers": 3}}})
    second = Settings.parse({"seed": 2, **NETWORK, "by_name": {"item": {}}})

    assert differing_keys(first, first) == []
    assert differing_keys(first, second) == [
        "by_name.item.num_layers",
        "by_name.item.widths",
        "model.layers.num_layers",
        "seed",
    ]


class Named(Config):
    class Table(Config):
        place: str | None = None
        width: int | None = None

    tables: dict[str, Table] = Field(default_factory=dict)


def test_an_entry_differs_from_none_only_in_what_it_says():
    without, with_one = Named.parse({}), Named.parse({"tables": {"item": {"place": "disk"}}})

    assert differing_keys(without, with_one) == ["tables.item.place"]
    assert differing_keys(with_one, without) == ["tables.item.place"]


class Renamed(Config):
    RENAMED: ClassVar[Mapping[str, str]] = {"colour": "color"}

    color: str


def test_keys_of_an_earlier_version_are_read_and_written_as_they_are_called_now():
    assert Renamed.parse({"colour": "red"}).to_yaml() == "color: red\n"


def test_a_key_under_its_old_and_its_new_name_is_refused():
    with pytest.raises(InputError, match="'colour' is called 'color' now; keep one of them"):
        Renamed.parse({"colour": "red", "color": "blue"})


def test_a_list_is_not_too_short_for_want_of_a_member_that_is_refused():
    class Member(Config):
        size: int

    class Several(Config):
        members: tuple[Member, ...] = Field(min_length=1)

    with pytest.raises(InputError) as refused:
        Several.parse({"members": [{"sized": 1}]})
    assert "did you mean 'size'?" in str(refused.value)
    assert "at least 1" not in str(refused.value)
    with pytest.raises(InputError, match="members: tuple should have at least 1 item"):
        Several.parse({"members": []})
