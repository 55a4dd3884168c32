import json

import numpy as np
import pytest

from rayrec.models.tokenizers.published import published_registry
from rayrec.models.tokenizers.report import collision_counts
from rayrec.platform.errors import InputError
from tests.helpers.data import real_data

KEYS = ("12", "10", "11")
"""Of the catalog, in its order."""


def write(path, values):
    path.write_text(json.dumps(values))
    return path


def registry_of(path, keys=KEYS, **settings):
    return published_registry(path, keys, np.arange(len(keys)) * 100, "f00d", **settings)


def test_numbers_and_tokens_are_read_in_catalog_order(tmp_path):
    numbers = write(tmp_path / "a.json", {"10": [3, 0], "11": [3, 7], "12": [0, 2]})
    tokens = write(
        tmp_path / "b.json", {"10": ["<a_3>", "<b_0>"], "11": ["<a_3>", "<b_7>"], "12": ["<a_0>", "<b_2>"]}
    )

    for path in (numbers, tokens):
        registry = registry_of(path)
        assert registry.codes_IL.tolist() == [[0, 2], [3, 0], [3, 7]]
        assert registry.item_ids_I.tolist() == [0, 100, 200]
        assert registry.level_sizes == (4, 8)
        assert registry.num_codebooks == 2
        assert registry.method == f"published, read from {path.name}"
        assert registry.tokenizer_version is None
    assert registry_of(numbers, codebook_size=256).level_sizes == (256, 256)
    with pytest.raises(InputError, match="has the code 7, outside a codebook of 4"):
        registry_of(numbers, codebook_size=4)


def test_keys_that_count_from_another_number_are_shifted_if_told_so(tmp_path):
    path = write(tmp_path / "a.json", {"0": [1], "1": [2], "2": [3]})
    assert registry_of(path, key_offset=10).codes_IL.tolist() == [[3], [1], [2]]
    with pytest.raises(InputError, match=r"3 of the catalog's 3 items .* --key-offset 10 makes them fit"):
        registry_of(path)


def test_two_keys_that_are_one_number_are_refused(tmp_path):
    path = write(tmp_path / "a.json", {"0": [1], "1": [2], "2": [3], "01": [4]})
    with pytest.raises(InputError, match="items '1' and '01' are both '11' with key_offset 10"):
        registry_of(path, key_offset=10)


@pytest.mark.parametrize(("policy", "digits"), [("extra_digit", [0, 1, 0]), ("share", [1, 0, 0])])
def test_collisions_are_resolved_by_the_policy(policy, digits, tmp_path):
    path = write(tmp_path / "a.json", {"10": [3, 1], "11": [0, 2], "12": [3, 1]})
    registry = registry_of(path, collision_policy=policy, popularity_I=np.array([1, 5, 9]))

    assert registry.codes_IL[:, 2].tolist() == digits
    assert registry.num_codebooks == 2
    assert registry.uniform_digit == (policy == "share")
    assert registry.report()["collisions"] == {"items": 2, "groups": 1, "largest_group": 2}
    with pytest.raises(InputError, match="came without codebooks"):
        registry_of(path, collision_policy="reassign")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"10": [1], "11": [2]}, "1 of the catalog's 3 items have no codes there, the first is '12'"),
        (
            {"10": [1], "11": [2], "12": [3], "13": [4]},
            "1 of its items are not in the catalog, the first is '13'",
        ),
        ({"10": [1], "11": [2], "x": [3]}, "'12' and 1 of its items are not in .* first is 'x'; the keys"),
        ({"10": [1], "11": [2, 3], "12": [3]}, "tuples have 1 and 2 codes; expected one length"),
        ({"10": [], "11": [], "12": []}, "tuples have 0 codes"),
        ({"10": [1], "11": [-2], "12": [3]}, r"the item '11' has \[-2\]; expected codes such as"),
        ({"10": [1], "11": ["<b_2>"], "12": [3]}, r"the item '11' has \['<b_2>'\]"),
        ({"10": [1], "11": "2", "12": [3]}, "the item '11' has '2'"),
        ({"10": [1], "11": [True], "12": [3]}, "the item '11' has"),
        ([], "expected a JSON object"),
    ],
)
def test_files_that_are_no_codes_of_the_catalog_are_refused(values, message, tmp_path):
    with pytest.raises(InputError, match=message):
        registry_of(write(tmp_path / "a.json", values))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InputError, match=r"a\.json: cannot be read"):
        registry_of(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"10": [1], "11": [2], "10": [3]}')
    with pytest.raises(InputError, match="the item '10' stands there twice"):
        registry_of(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"10":' + "[" * 100_000)
    with pytest.raises(InputError, match="not JSON"):
        registry_of(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"10": [1]')
    with pytest.raises(InputError, match=r"a\.json: not JSON"):
        registry_of(tmp_path / "a.json")
    path = write(tmp_path / "a.json", {"x": [1]})
    with pytest.raises(InputError, match="the key 'x' is no whole number"):
        registry_of(path, key_offset=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "key_offset", "num_colliding", "num_of_three_codes"),
    [
        ("letter_rqvae_4x256.json", 1, 12_101 - 12_088, 11_696),
        ("tiger_cf_rqvae_4x256.json", 0, 0, 11_412),
        ("tiger_cf_rqkmeans_4x256.json", 0, 0, 7_840),
    ],
)
def test_published_codes_of_beauty(file, key_offset, num_colliding, num_of_three_codes):
    path = real_data("amazon14-beauty") / "semantic_ids" / file
    keys = [str(number) for number in range(1, 12_102)]
    registry = registry_of(path, keys, key_offset=key_offset, codebook_size=256, collision_policy="share")

    assert registry.num_codebooks == 4
    assert registry.uniform_digit == (num_colliding > 0)
    levels = registry.report()["levels"]
    assert levels[2]["prefixes"] == num_of_three_codes
    assert levels[3]["prefixes"] == 12_101 - num_colliding
    if key_offset:
        assert levels[0]["used"] == 197
        with pytest.raises(InputError, match="--key-offset 1 makes them fit"):
            registry_of(path, keys)


def test_published_codes_of_industrial():
    path = real_data("minionerec-industrial") / "Industrial_and_Scientific.index.json"
    keys = sorted(json.loads(path.read_text()), key=int)
    registry = registry_of(path, keys, collision_policy="extra_digit")

    assert (registry.num_items, registry.num_codebooks) == (3_686, 3)
    assert registry.report()["levels"][2]["prefixes"] == 3_670
    assert collision_counts(registry.codes_IL)["items"] == 0
