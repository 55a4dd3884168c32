"""`rayrec tokenize`, as a person meets it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from rayrec.cli import semantic_ids
from rayrec.models.tokenizers.item_tokenizer import TOKENIZERS, ItemTokenizer
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.vector_sources import ItemData, TextVectors
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.item_ranker import item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.cli.commands import answer, rayrec, refused
from tests.helpers.data import random_events, write_source
from tests.helpers.ranking import recommender_run
from tests.helpers.runs import MODELS, trained

NUM_ITEMS = 40
KINDS = ("soap", "brush", "scent", None)


def make_dataset(folder, num_items=NUM_ITEMS):
    """Items "i0", ..., of four kinds in turn, the last kind without text; the first ones do not depend on how
    many there are."""
    events = random_events(60, NUM_ITEMS, seed=3)
    events += [("x", f"i{item}", 5000 + item) for item in range(num_items)]  # so that each is met
    items = {
        "item_id": [f"i{item}" for item in range(num_items)],
        "title": [
            f"A fine {KINDS[item % 4]} number {item}" if KINDS[item % 4] else None
            for item in range(num_items)
        ],
        "category": [KINDS[item % 4] for item in range(num_items)],
    }
    source = write_source(folder / f"source-{num_items}", events, items=items)
    config = PrepareConfig(num_partitions=3)
    prepare(source, folder / f"data-{num_items}", config)
    return folder / f"data-{num_items}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("tokenize"))


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("grown"), NUM_ITEMS + 8)


@pytest.fixture
def words_as_vectors(monkeypatch):
    """In place of the sentence model: a text's vector is the sum of its words' own."""

    def vectors(texts, progress=None):
        def of_word(word):
            return np.random.default_rng(sum(word.encode())).standard_normal(6)

        rows = [np.full(6, np.nan) if not text else sum(map(of_word, text.split())) for text in texts]
        return np.array(rows, dtype=np.float32).reshape(len(texts), 6)

    monkeypatch.setattr("rayrec.models.tokenizers.vector_sources.text_vectors", vectors)


def codes_by_key(data, folder):
    dataset, registry = Dataset.open(data), SemanticIdRegistry.load(folder)
    assert np.array_equal(registry.item_ids_I, dataset.items.ids_I)
    return dict(zip(dataset.items.keys.to_pylist(), registry.codes_IL.tolist(), strict=True))


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_every_tokenizer_makes_ids_that_are_reported_and_saved_with_it(name, data, tmp_path):
    options = ["--out", tmp_path, "--tokenizer", name, "--codebook-size", 4, "--iterations", 3]
    options += ["--vectors", "content"] if name == "letter" else []  # which draws them towards interactions
    report = answer("tokenize", data, *options)

    assert report["num_items"] == NUM_ITEMS
    assert len(report["levels"]) == 4
    assert {"perplexity", "prefix_entropy", "used"} <= set(report["levels"][0])
    assert len(report["reconstruction_error"]) == 3
    assert report["purity"]["column"] == "category"
    assert len(report["purity"]["levels"]) == 3
    registry, tokenizer = SemanticIdRegistry.load(tmp_path), ItemTokenizer.load(tmp_path)
    assert registry.version == report["version"]
    assert registry.tokenizer_version == tokenizer.version


def test_ids_are_made_of_the_graph_of_users_and_items(data, tmp_path):
    options = ["--vectors", "graph", "--codebook-size", 4, "--out", tmp_path]

    assert "components of graph" in answer("tokenize", data, *options)["method"]


def test_kinds_of_vectors_are_compared_by_what_users_met_next(data, tmp_path, words_as_vectors):
    options = ["--vectors", "interactions+text+graph", "--codebook-size", 4, "--out", tmp_path]

    report = answer("tokenize", data, *options)

    names = [block["name"] for block in report["vectors"]["blocks"]]
    assert names == ["interactions", "text", "graph", "interactions+text+graph"]
    assert report["vectors"]["blocks"][1]["items"] == 30
    assert len(report["vectors"]["overlap"]) == 3
    assert all(0 <= level["same"] <= 1 for level in report["next_items"]["levels"])
    (compared,) = answer("tokenize", data, "--compare", tmp_path)["registries"]
    assert compared["next_items"] == report["next_items"]


def test_both_may_stand_beside_others(data, tmp_path, words_as_vectors):
    options = ["--vectors", "both+graph", "--codebook-size", 4, "--out", tmp_path]

    report = answer("tokenize", data, *options)

    names = [block["name"] for block in report["vectors"]["blocks"]]
    assert names == ["interactions", "text", "graph", "both+graph"]


def write_vectors(folder, name, keys, width=5, scale=1.0):
    """An array as another program writes it, each row a function of its key."""
    rows = [np.random.default_rng(sum(key.encode())).normal(size=width) for key in keys]
    np.save(folder / f"{name}.npy", scale * np.array(rows))
    (folder / f"{name}.txt").write_text("".join(f"{key}\n" for key in keys))
    return f"{name}={folder / name}.npy"


def test_images_stand_beside_texts_whatever_their_scale_and_order(data, tmp_path, words_as_vectors):
    keys = [f"i{item}" for item in range(NUM_ITEMS) if item % 5]
    options = ["--vectors", "text,image", "--codebook-size", 4]
    small = write_vectors(tmp_path, "image", keys)
    report = answer("tokenize", data, "--out", tmp_path / "a", *options, "--vector-file", small)
    (tmp_path / "b").mkdir()
    large = write_vectors(tmp_path / "b", "image", ["elsewhere", *reversed(keys)], scale=1000.0)
    answer("tokenize", data, "--out", tmp_path / "b", *options, "--vector-file", large)

    blocks = {block["name"]: block["items"] for block in report["vectors"]["blocks"]}
    assert blocks == {"text": 30, "image": len(keys), "text,image": NUM_ITEMS}
    assert report["num_without_data"] == 2  # items 15 and 35: neither text nor image
    assert codes_by_key(data, tmp_path / "a") == codes_by_key(data, tmp_path / "b")


@pytest.mark.parametrize(("content", "num_by_words"), [(None, 0), ({"min_items": 1}, 1)])
def test_codes_are_made_of_what_a_trained_model_scores_items_by(grown, tmp_path, content, num_by_words):
    dataset = Dataset.open(grown)
    config = RunConfig.parse(
        {
            "data": {"path": str(grown)},
            "model": MODELS["sasrec"] | {"content": content},
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 16, "epochs": 1},
        }
    )
    run = trained(config, tmp_path / "run")
    answer("export", run, tmp_path / "sasrec", "--snapshot", "last")
    file = f"sasrec={tmp_path / 'sasrec' / 'items.npy'}"
    keys = (tmp_path / "sasrec" / "items.txt").read_text().split()
    weights_ID = item_ranker_of(TrainedModel.load(run, "last")).item_vectors()
    for vector_D, key in zip(np.load(tmp_path / "sasrec" / "items.npy"), keys, strict=True):
        np.testing.assert_array_equal(vector_D, weights_ID[dataset.position_by_key(key)])

    made = ["--vectors", "sasrec", "--vector-file", file, "--codebook-size", 4, "--out", tmp_path / "ids"]
    report = answer("tokenize", grown, *made)

    # Two items are but the last ones of a user: the model has learned the words of one, and nothing else.
    assert [block["items"] for block in report["vectors"]["blocks"]] == [NUM_ITEMS + 6 + num_by_words]
    assert report["num_without_data"] == 2 - num_by_words
    assert "of_other_data" not in report


def test_vectors_of_a_model_of_another_split_are_said_to_be(data, grown, tmp_path):
    run = recommender_run(Dataset.open(grown), tmp_path / "run")
    answer("export", run, tmp_path / "sasrec")
    made = ["--vectors", "sasrec", "--vector-file", f"sasrec={tmp_path / 'sasrec' / 'items.npy'}"]

    report = answer("tokenize", data, *made, "--codebook-size", 4, "--out", tmp_path / "ids")

    assert report["of_other_data"] == ["sasrec"]
    _, shown, _ = rayrec("tokenize", data, *made, "--codebook-size", 4, "--out", tmp_path / "again")
    assert "vectors of a model of another data set" in " ".join(shown.split())


def test_new_items_take_their_images_of_a_file_of_their_own(data, grown, tmp_path):
    old, new = [f"i{item}" for item in range(NUM_ITEMS)], [f"i{NUM_ITEMS + item}" for item in range(6)]
    file = write_vectors(tmp_path, "image", old)
    made = ["--vectors", "image", "--vector-file", file, "--out", tmp_path / "old", "--codebook-size", 4]
    answer("tokenize", data, *made)
    (tmp_path / "more").mkdir()
    more = write_vectors(tmp_path / "more", "image", new)

    extend = ["--extend", tmp_path / "old", "--out", tmp_path / "new"]
    report = answer("tokenize", grown, *extend, "--vector-file", more)

    assert report["extension"]["without_data"] == 2
    found = codes_by_key(grown, tmp_path / "new")
    assert {key: found[key] for key in old} == codes_by_key(data, tmp_path / "old")


def test_a_file_of_vectors_that_the_tokenizer_does_not_have_is_refused_with_new_items(data, grown, tmp_path):
    file = write_vectors(tmp_path, "image", [f"i{item}" for item in range(NUM_ITEMS)])
    made = ["--vectors", "image", "--vector-file", file, "--out", tmp_path / "old", "--codebook-size", 4]
    answer("tokenize", data, *made)

    extend = ["--extend", tmp_path / "old", "--out", tmp_path / "new"]
    message = refused("tokenize", grown, *extend, "--vector-file", f"img={tmp_path / 'image.npy'}")

    assert "vector_files (--vector-file) has one of 'img'" in message
    assert "made of 'image'" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "image.txt").unlink(), "cannot be read"),
        (lambda folder: (folder / "image.txt").write_text("i1\n"), "has 1 keys for 40 vectors"),
        (lambda folder: (folder / "image.txt").write_text("i1\n" * 40), "names the item 'i1' twice"),
        (lambda folder: (folder / "image.npy").write_bytes(b"no"), "not a readable array"),
        (lambda folder: np.save(folder / "image.npy", np.zeros(40)), "expected a row of floating-point"),
        (
            lambda folder: (folder / "image.txt").write_text("".join(f"x{n}\n" for n in range(40))),
            "and none of",
        ),
    ],
)
def test_files_of_vectors_that_do_not_fit_are_explained(damage, message, data, tmp_path):
    file = write_vectors(tmp_path, "image", [f"i{item}" for item in range(NUM_ITEMS)])
    damage(tmp_path)

    options = ["--vectors", "image", "--vector-file", file, "--out", tmp_path / "ids"]
    assert message in refused("tokenize", data, *options)


@pytest.mark.parametrize(("most", "taken"), [(4, 4), (1024, 8)])
def test_a_codebook_is_as_large_as_items_fill_it_up_to_a_most(most, taken, data, tmp_path):
    answer("tokenize", data, "--out", tmp_path, "--max-codebook-size", most)

    assert SemanticIdRegistry.load(tmp_path).level_sizes[:3] == (taken,) * 3


def test_ids_that_runs_may_need_go_only_if_told_to(data, tmp_path):
    made = answer("tokenize", data, "--out", tmp_path, "--codebook-size", 4)

    assert answer("tokenize", data, "--out", tmp_path, "--codebook-size", 4)["version"] == made["version"]
    said = refused("tokenize", data, "--out", tmp_path, "--codebook-size", 8)
    assert made["version"] in said
    assert "--out" in said
    assert SemanticIdRegistry.load(tmp_path).version == made["version"]
    other = answer("tokenize", data, "--out", tmp_path, "--codebook-size", 8, "--overwrite")
    assert SemanticIdRegistry.load(tmp_path).version == other["version"] != made["version"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "kmeans"], "tokenizer: expected one of 'rq_kmeans', 'balanced_rq_kmeans', "),
        (
            ["--vectors", "images"],
            "vectors: expected one of 'interactions', 'text', 'graph', 'content', 'image', 'both'",
        ),
        (["--vector-setting", "dim=3"], "or one that another package brings"),
        (["--vector-setting", "dim"], "expected the form KEY=VALUE"),
        (["--vectors", "a", "--vector-file", "a=/nowhere/a #1.npy"], "/nowhere/a #1.npy: no such file"),
        (["--vector-file", "a=b.npy", "--vector-file", "a=c.npy"], "a=c.npy: a is named twice"),
        (["--vector-file", "image=a.npy"], "and vectors is 'interactions': name it there, too"),
    ],
)
def test_names_and_settings_that_nothing_has_are_refused(options, message, data, tmp_path):
    assert message in refused("tokenize", data, "--out", tmp_path, *options)


def test_the_table_has_a_row_for_each_level(data, tmp_path):
    code, stdout, _ = rayrec("tokenize", data, "--out", tmp_path, "--levels", 2, "--collisions", "share")
    assert code == 0
    assert "policy share" in stdout.replace("\n", " ")
    assert "digit" in stdout
    assert "purity by category" in stdout


@pytest.mark.parametrize("policy", ["extra_digit", "share"])
def test_new_items_get_ids_and_all_others_keep_theirs(policy, data, grown, tmp_path, words_as_vectors):
    made = ["--vectors", "text", "--out", tmp_path / "old", "--collisions", policy, "--codebook-size", 4]
    before = answer("tokenize", data, *made)
    report = answer("tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "new")

    old, new = codes_by_key(data, tmp_path / "old"), codes_by_key(grown, tmp_path / "new")
    assert len(new) == len(set(map(tuple, new.values()))) == NUM_ITEMS + 8
    assert {key: new[key] for key in old} == old
    assert report["version"] != before["version"]
    assert report["ancestors"] == [before["version"]]
    assert report["extension"]["items"] == 8
    assert report["extension"]["without_data"] == report["num_without_data"] == 2  # two of eight have no text
    # The new catalog is of the same kind: what was fitted is there to extend it further.
    assert ItemTokenizer.load(tmp_path / "new").version == ItemTokenizer.load(tmp_path / "old").version


def test_an_extension_gives_an_item_the_prefix_that_it_would_have_had(
    data, grown, tmp_path, words_as_vectors
):
    answer("tokenize", data, "--vectors", "text", "--out", tmp_path / "old", "--codebook-size", 4)
    answer("tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "new")
    new = codes_by_key(grown, tmp_path / "new")

    tokenizer, dataset = ItemTokenizer.load(tmp_path / "old"), Dataset.open(grown)
    items = ItemData("", dataset.items.keys.to_pylist(), dataset.items.texts.to_pylist(), sequences=None)
    raw_IL = tokenizer.encode({"text": TextVectors().vectors(items)}, dataset.items.ids_I)
    for key, codes in zip(dataset.items.keys.to_pylist(), raw_IL.tolist(), strict=True):
        assert new[key][:2] == codes[:2]


def test_vectors_that_tell_few_items_apart_are_warned_of(data, tmp_path, caplog):
    """Words of these items are those of four kinds."""
    options = ["--vectors", "content", "--codebook-size", 4]
    report = answer("tokenize", data, *options, "--out", tmp_path / "alike")

    shared = report["collisions"]["items"]
    (line,) = [message for message in caplog.messages if "share all their codes" in message]
    assert line.startswith(f"{shared} of 40 items ({shared / 0.4:.0f} %) share all their codes with another")
    caplog.clear()
    report = answer("tokenize", data, "--out", tmp_path / "apart", "--codebook-size", 16)
    assert report["collisions"]["items"] < 20 < shared
    assert "share all their codes" not in caplog.text


def test_new_items_get_codes_by_the_words_and_values_that_old_ones_have(data, grown, tmp_path):
    """Those of its kind have the same ones; a word that was in no two old items says nothing."""
    answer("tokenize", data, "--vectors", "content", "--out", tmp_path / "old", "--codebook-size", 4)
    report = answer("tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "new")

    old, new = codes_by_key(data, tmp_path / "old"), codes_by_key(grown, tmp_path / "new")
    assert {key: new[key] for key in old} == old
    assert report["num_without_data"] == 2  # which have neither words nor a kind
    for number in range(NUM_ITEMS, NUM_ITEMS + 8):
        if KINDS[number % 4] is not None:
            assert new[f"i{number}"][:2] == old[f"i{number % 4}"][:2]
    answer("tokenize", grown, "--extend", tmp_path / "new", "--out", tmp_path / "again")
    assert codes_by_key(grown, tmp_path / "again") == new

    # An earlier version kept nothing of the analysis.
    tokenizer, registry = ItemTokenizer.load(tmp_path / "old"), SemanticIdRegistry.load(tmp_path / "old")
    without = dataclasses.replace(tokenizer, learned={})
    without.save(tmp_path / "old")
    dataclasses.replace(registry, tokenizer_version=without.version).save(tmp_path / "old")
    report = answer("tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "arbitrary")
    assert report["num_without_data"] == 8


def strict(text):
    """JSON as others read it: without Infinity and NaN."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))


def test_the_errors_of_new_items_are_relative_to_those_that_were_fitted(
    data, grown, tmp_path, words_as_vectors, monkeypatch
):
    """They may all have one text, and no variance of their own."""
    answer("tokenize", data, "--vectors", "text", "--out", tmp_path / "old", "--codebook-size", 4)
    monkeypatch.setattr(
        "rayrec.models.tokenizers.vector_sources.text_vectors",
        lambda texts, _: np.ones((len(texts), 6), np.float32),
    )

    code, stdout, _ = rayrec(
        "tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "new", "--json"
    )

    assert code == 0
    errors = strict(stdout.splitlines()[-1])["new_items_reconstruction_error"]
    assert len(errors) == 3
    assert all(0 < error < 100 for error in errors)
    # One of an earlier version does not say what its variance was.
    registry = SemanticIdRegistry.load(tmp_path / "old")
    fit_report = {key: value for key, value in registry.fit_report.items() if key != "vectors_variance"}
    dataclasses.replace(registry, fit_report=fit_report).save(tmp_path / "old")
    report = answer("tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "newer")
    assert report["new_items_reconstruction_error"] is None


def test_without_texts_new_items_have_no_data_and_that_is_said(data, grown, tmp_path):
    answer("tokenize", data, "--out", tmp_path / "old", "--codebook-size", 4)
    code, stdout, _ = rayrec("tokenize", grown, "--extend", tmp_path / "old", "--out", tmp_path / "new")
    assert code == 0
    assert "8 in all extensions, 8 without any data" in " ".join(stdout.replace("│", " ").split())


def test_extensions_that_cannot_be_are_explained(data, grown, tmp_path):
    answer("tokenize", grown, "--out", tmp_path / "old", "--codebook-size", 4)
    old = tmp_path / "old"
    assert "8 of the 48 items that have semantic IDs are not in the new catalog" in refused(
        "tokenize", data, "--extend", old, "--out", tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()
    assert "name another folder with --out" in refused("tokenize", grown, "--extend", old, "--out", old)
    assert "registry.json: cannot be read" in refused(
        "tokenize", grown, "--extend", tmp_path / "nothing", "--out", tmp_path / "new"
    )
    answer("tokenize", grown, "--out", tmp_path / "other", "--tokenizer", "opq", "--codebook-size", 4)
    for name in ("tokenizer.json", "tokenizer.safetensors"):
        shutil.copy(tmp_path / "other" / name, old / name)
    assert "put the files of one tokenizer together" in refused(
        "tokenize", grown, "--extend", old, "--out", tmp_path / "new"
    )


def test_published_ids_become_a_registry_that_is_compared_with_others(data, tmp_path):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({f"i{n}": [f"<a_{n % 4}>", f"<b_{n % 10}>"] for n in range(NUM_ITEMS)}))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    answer("tokenize", data, "--out", ours)
    report = answer("tokenize", data, "--published", file, "--out", theirs, "--collisions", "share")

    assert report["method"] == "published, read from theirs.json"
    assert report["collisions"]["items"] == NUM_ITEMS
    assert report["purity"]["levels"][0]["purity"] == 1.0  # its first code is the kind
    assert "no tokenizer that could give codes to new items" in refused(
        "tokenize", data, "--extend", theirs, "--out", tmp_path / "new"
    )

    compared = answer("tokenize", data, "--compare", ours, "--compare", theirs)["registries"]
    assert [entry["path"] for entry in compared] == [str(ours), str(theirs)]
    assert compared[1]["version"] == report["version"]
    code, stdout, _ = rayrec("tokenize", data, "--compare", ours, "--compare", theirs)
    assert code == 0
    for text in ("Semantic IDs compared", "collisions: 40 items in 20", "prefixes", "purity"):
        assert text in " ".join(stdout.replace("│", " ").split())


def test_published_ids_take_the_place_of_a_tokenizer(data, tmp_path):
    answer("tokenize", data, "--out", tmp_path)
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({f"i{n}": [n] for n in range(NUM_ITEMS)}))
    assert "need them" in refused("tokenize", data, "--published", file, "--out", tmp_path)
    answer("tokenize", data, "--published", file, "--out", tmp_path, "--overwrite")
    assert not (tmp_path / "tokenizer.json").exists()
    assert SemanticIdRegistry.load(tmp_path).tokenizer_version is None


def test_published_ids_of_another_catalog_are_explained(data, tmp_path):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({f"i{n}": [n] for n in range(1, NUM_ITEMS + 1)}))
    line = refused("tokenize", data, "--published", file, "--out", tmp_path / "ids")
    assert "1 of the catalog's 40 items have no codes there, the first is 'i0'" in line
    assert "1 of its items are not in the catalog, the first is 'i40'" in line
    assert not (tmp_path / "ids").exists()


def test_registries_of_other_items_are_not_compared(data, grown, tmp_path):
    answer("tokenize", grown, "--out", tmp_path)
    assert "other items than" in refused("tokenize", data, "--compare", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--extend", "a", "--published", "b"], "--extend and --published are two different things"),
        (["--extend", "a", "--levels", 2], "--levels has no effect with --extend"),
        (["--compare", "a", "--out", "b"], "--out has no effect with --compare"),
        (["--published", "a", "--tokenizer", "opq"], "--tokenizer has no effect with --published"),
        (["--key-offset", 1], "--key-offset goes with --published"),
        (["--codebook-size", 4, "--max-codebook-size", 8], "--max-codebook-size has no effect with"),
        (["--categories", "shelf"], "its items have no column 'shelf'; they have item_id"),
        (["--codebook-size", 64], "codebook_size is 64, but the 40 item vectors have only 40 distinct"),
    ],
)
def test_options_that_do_not_fit_are_explained(options, message, data, tmp_path):
    out = [] if "--compare" in options else ["--out", tmp_path / "ids"]
    assert message in refused("tokenize", data, *options, *out)


def test_a_large_catalog_is_tokenized_in_tasks_and_a_small_one_needs_none(data, tmp_path):
    options = ["--codebook-size", 4, "--iterations", 3, "--no-ray"]
    report = answer("tokenize", data, "--out", tmp_path, "--large-catalog", NUM_ITEMS, *options)

    assert report["num_items"] == NUM_ITEMS
    assert "learned of 40 items" in report["method"]
    small = ["tokenize", data, "--out", tmp_path / "small", "--codebook-size", 4]
    assert "--no-ray is for large catalogs, and this one has 40 items" in refused(*small, "--no-ray")
    assert "--resume is for large catalogs" in refused(*small, "--resume")
    assert "--fit-items has no effect with --compare" in refused(
        "tokenize", data, "--compare", tmp_path, "--fit-items", 3
    )


def test_a_tokenizer_that_reads_interactions_is_not_for_catalogs_in_parts(data, tmp_path, monkeypatch):
    monkeypatch.setattr(semantic_ids, "preparing_cluster", None)  # it is refused before Ray starts
    options = ("--out", tmp_path, "--tokenizer", "letter")

    message = refused("tokenize", data, *options, "--vectors", "content", "--large-catalog", NUM_ITEMS)

    assert "reads the interactions of all items at once" in message
    assert "name others, such as 'text' or 'content'" in refused("tokenize", data, *options)
