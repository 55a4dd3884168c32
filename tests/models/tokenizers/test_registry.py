import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rayrec.models.tokenizers.fit import fit_registry
from rayrec.models.tokenizers.registry import Ancestor, SemanticIdRegistry
from rayrec.platform.errors import InputError


def small_registry(**changes):
    values = {
        "item_ids_I": np.array([70, -3, 9, 12]),
        "codes_IL": np.array([[0, 1, 0], [0, 1, 1], [0, 3, 0], [1, 1, 0]], dtype=np.int16),
        "level_sizes": (2, 4, 2),
        "num_codebooks": 2,
        "collision_policy": "extra_digit",
        "method": "by hand",
        "dataset_fingerprint": "f00d",
        "codebooks_CKD": np.arange(8, dtype=np.float32).reshape(2, 4, 1),
        "fit_report": {"collisions": {"items": 2}},
    }
    return SemanticIdRegistry(**(values | changes))


def test_report_measures_the_use_of_every_level():
    report = small_registry().report()

    assert [level["size"] for level in report["levels"]] == [2, 4, 2]
    assert [level["used"] for level in report["levels"]] == [2, 2, 2]
    assert [level["prefixes"] for level in report["levels"]] == [2, 3, 4]
    # Three items to one: 4 / 3^(3/4).
    assert [level["perplexity"] for level in report["levels"]] == [pytest.approx(4 / 3**0.75)] * 3
    assert report["collisions"] == {"items": 2}
    assert json.loads(json.dumps(report)) == report


def test_a_saved_registry_is_loaded_as_it_was(tmp_path):
    registry = small_registry()
    registry.save(tmp_path / "ids")
    loaded = SemanticIdRegistry.load(tmp_path / "ids")

    assert loaded.version == registry.version
    assert loaded.codes_IL.dtype == np.int16
    assert loaded.report() == registry.report()
    assert np.array_equal(loaded.item_ids_I, registry.item_ids_I)
    assert sorted(path.name for path in (tmp_path / "ids").iterdir()) == [
        "codes.safetensors",
        "registry.json",
    ]


def test_a_registry_without_codebooks_can_be_saved(tmp_path):
    registry = small_registry(codebooks_CKD=None)
    registry.save(tmp_path)
    assert SemanticIdRegistry.load(tmp_path).codebooks_CKD is None


def test_the_version_is_a_checksum_of_everything():
    registry = small_registry()
    assert small_registry().version == registry.version
    changed = [
        replace(registry, item_ids_I=np.array([71, -3, 9, 12])),
        replace(registry, codes_IL=registry.codes_IL[::-1].copy()),
        replace(registry, level_sizes=(2, 5, 2)),
        replace(registry, collision_policy="reassign"),
        replace(registry, dataset_fingerprint="beef"),
        replace(registry, codebooks_CKD=None),
        replace(registry, uniform_digit=True),
        replace(registry, tokenizer_version="0123"),
        replace(registry, ancestors=(Ancestor("0123", "f00d"),)),
    ]
    assert len({registry.version, *(other.version for other in changed)}) == len(changed) + 1


def test_a_registry_of_format_1_is_read_and_keeps_its_version(tmp_path):
    small_registry().save(tmp_path)
    path = tmp_path / "registry.json"
    manifest = json.loads(path.read_text())
    assert manifest["format_version"] == 2
    # As it was written before there were shared digits, tokenizers and extensions.
    path.write_text(json.dumps(manifest | {"format_version": 1}))
    loaded = SemanticIdRegistry.load(tmp_path)

    assert loaded.version == "3584c89d73b4ba7e"
    assert (loaded.uniform_digit, loaded.tokenizer_version, loaded.ancestors) == (False, None, ())


def test_a_uniform_digit_is_no_level_that_a_model_learns():
    assert small_registry().num_learned_levels == 3
    registry = small_registry(collision_policy="share", uniform_digit=True)

    assert registry.num_learned_levels == 2
    assert registry.learned_level_sizes == (2, 4)
    assert registry.learned_codes_IL.tolist() == [[0, 1], [0, 1], [0, 3], [1, 1]]
    with pytest.raises(ValueError, match="none of them is a uniform digit"):
        small_registry(uniform_digit=True, num_codebooks=3)


def test_another_version_is_refused_with_both_named():
    registry = small_registry()
    registry.check_matches(registry.version, "the checkpoint")
    with pytest.raises(InputError, match=f"the checkpoint was made with version 0123.*{registry.version}"):
        registry.check_matches("0123", "the checkpoint")


def test_a_changed_code_is_noticed(tmp_path):
    small_registry().save(tmp_path)
    path = tmp_path / "codes.safetensors"
    content = bytearray(path.read_bytes())
    content[content.rindex(np.array([3, 0, 1, 1], dtype=np.int16).tobytes())] = 2
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"codes\.safetensors: its content .* checksum"):
        SemanticIdRegistry.load(tmp_path)


def test_files_of_two_registries_are_noticed(tmp_path):
    old, new = small_registry(), small_registry(item_ids_I=np.array([1, 2, 3, 4]))
    old.save(tmp_path)
    old_manifest = (tmp_path / "registry.json").read_bytes()
    new.save(tmp_path)
    (tmp_path / "registry.json").write_bytes(old_manifest)
    with pytest.raises(InputError, match=f"checksum {new.version}, but version {old.version} was saved"):
        SemanticIdRegistry.load(tmp_path)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"registry\.json: cannot be read"):
        SemanticIdRegistry.load(tmp_path / "nothing")
    small_registry().save(tmp_path)
    (tmp_path / "codes.safetensors").write_bytes(b"short")
    with pytest.raises(InputError, match=r"codes\.safetensors: damaged"):
        SemanticIdRegistry.load(tmp_path)
    (tmp_path / "codes.safetensors").unlink()
    with pytest.raises(InputError, match=r"codes\.safetensors: cannot be read"):
        SemanticIdRegistry.load(tmp_path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "registry.json").write_text(content)
        with pytest.raises(InputError, match=r"registry\.json: not the manifest"):
            SemanticIdRegistry.load(tmp_path)
    (tmp_path / "registry.json").write_text('{"format_version": 99}')
    with pytest.raises(InputError, match=r"registry\.json: written in format 99"):
        SemanticIdRegistry.load(tmp_path)


def test_a_manifest_with_missing_settings_is_refused(tmp_path):
    small_registry().save(tmp_path)
    manifest = json.loads((tmp_path / "registry.json").read_text())
    del manifest["level_sizes"]
    (tmp_path / "registry.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"registry\.json and codes\.safetensors do not form a registry"):
        SemanticIdRegistry.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"item_ids_I": np.array([1, 2, 3])}, "3 items with 3 levels"),
        ({"item_ids_I": np.array([1, 2, 3, 2])}, "4 items have only 3 distinct item ids"),
        ({"codes_IL": np.zeros((4, 3), dtype=np.int16)}, "4 items have only 1 distinct code tuples"),
        (
            {"level_sizes": (2, 3, 2)},
            r"item 9 has the codes \[0, 3, 0\], outside the level sizes \[2, 3, 2\]",
        ),
        ({"num_codebooks": 1}, "num_codebooks is 1 for 3 levels"),
    ],
)
def test_inconsistent_content_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small_registry(**changes)


def vectors_with_twins(num_items=200, num_twins=30):
    vectors_ID = np.random.default_rng(0).standard_normal((num_items, 8)).astype(np.float32)
    vectors_ID[:num_twins] = vectors_ID[num_twins : 2 * num_twins]
    return vectors_ID


@pytest.mark.parametrize("policy", ["extra_digit", "reassign", "share"])
def test_fitting_gives_every_item_its_own_tuple_and_reports_collisions(policy):
    ids_I = np.arange(200)[::-1] * 11
    registry, report = fit_registry(
        vectors_with_twins(),
        ids_I,
        "f00d",
        num_levels=3,
        codebook_size=16,
        collision_policy=policy,
    )

    assert len(np.unique(registry.codes_IL, axis=0)) == 200
    assert registry.codes_IL.dtype == np.int16
    assert registry.num_codebooks == 3
    assert registry.codebooks_CKD.shape == (3, 16, 8)
    assert registry.level_sizes[:3] == (16, 16, 16)
    assert report == registry.report()
    # A twin cannot be told from its twin, whatever the codebooks are.
    assert report["collisions"]["items"] >= 60
    assert report["collisions"]["groups"] >= 30 - report["collisions"]["largest_group"]
    errors = report["reconstruction_error"]
    assert 0 < errors[2] < errors[1] < errors[0] < 1
    assert registry.uniform_digit == (policy == "share")
    if policy != "reassign":
        assert registry.level_sizes[3] == report["collisions"]["largest_group"]
    else:
        assert len(registry.level_sizes) == 3


def test_the_same_vectors_and_seed_give_the_same_version():
    def version(seed):
        return fit_registry(
            vectors_with_twins(), np.arange(200), "f00d", num_levels=2, codebook_size=8, seed=seed
        )[0].version

    assert version(1) == version(1)
    assert version(1) != version(2)


def test_first_level_error_is_the_worked_number():
    # Two pairs at distance 1 around -10 and 10: variance 4 * 100.25, error 4 * 0.25.
    vectors_ID = np.array([[-10.5], [-9.5], [9.5], [10.5]])
    _, report = fit_registry(vectors_ID, np.arange(4), "f00d", num_levels=1, codebook_size=2)
    assert report["vectors_variance"] == pytest.approx(100.25)
    assert report["reconstruction_error"] == [pytest.approx(0.25 / 100.25)]
    assert report["collisions"] == {"items": 4, "groups": 2, "largest_group": 2}
    assert report["levels"][0]["perplexity"] == pytest.approx(2.0)
    assert math.isclose(report["levels"][1]["perplexity"], 2.0)


def test_unknown_policy_and_missing_vectors_are_refused():
    with pytest.raises(ValueError, match="no collision policy 'ignore'; known: extra_digit, reassign, share"):
        fit_registry(np.eye(4), np.arange(4), "f00d", collision_policy="ignore")
    with pytest.raises(ValueError, match="a vector for each of 5 items, got 4"):
        fit_registry(np.eye(4), np.arange(5), "f00d")
