"""`rayrec text prepare`: files of records become a data set that readers of training read."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.reading.read_plan import ReadPlan
from rayrec.samples.text.dataset import TextDataset
from rayrec.samples.text.prepare import TextPrepareConfig, prepare_text
from tests.cli.commands import answer, rayrec, refused

RECORDS = [{"prompt": f"What is {n} and {n}?", "completion": f"{2 * n}."} for n in range(200)]


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records))
    return path


def prepared(inputs, out, **settings):
    return prepare_text(inputs, out, TextPrepareConfig.parse(settings)).manifest


def test_a_data_set_has_the_same_bits_however_records_lie_in_files(tmp_path):
    whole = write(tmp_path / "all.jsonl", RECORDS)
    first, second = RECORDS[:77], RECORDS[77:]
    write(tmp_path / "parts" / "b.jsonl", first[::-1])
    pq.write_table(pa.Table.from_pylist(second[:50]), tmp_path / "parts" / "a.parquet")
    lines = ["completion,prompt", *(f'{one["completion"]},"{one["prompt"]}"' for one in second[50:])]
    (tmp_path / "parts" / "c.csv").write_text("\n".join(lines))
    one, other = prepared([whole], tmp_path / "one"), prepared([tmp_path / "parts"], tmp_path / "other")

    assert one.fingerprint == other.fingerprint
    assert sum(one.rows.values()) == 200
    assert one.rows["valid"] > 0 < one.rows["test"]


def test_a_record_stays_in_its_split_when_others_are_added(tmp_path):
    few = write(tmp_path / "few.jsonl", RECORDS[:100])
    prepared([few], tmp_path / "few")
    prepared([write(tmp_path / "many.jsonl", RECORDS)], tmp_path / "many")
    held_out = [
        {record.key for record in TextDataset.open(tmp_path / name).records("test")}
        for name in ("few", "many")
    ]

    assert held_out[0]
    assert held_out[0] <= held_out[1]


def test_readers_of_training_read_every_row_once(tmp_path):
    prepared([write(tmp_path / "all.jsonl", RECORDS)], tmp_path / "out", rows_per_group=16, rows_per_file=64)
    dataset = TextDataset.open(tmp_path / "out")
    plan = ReadPlan.of_files(dataset.root, dataset.train_files, 32)

    assert len(dataset.train_files) > 1
    assert plan.source.schema.field("roles").type == pa.list_(pa.string())
    assert sum(file.num_rows for file in plan.source.files) == dataset.manifest.rows["train"]
    ids = np.concatenate([dataset.read(name)["record_id"].to_numpy() for name in dataset.train_files])
    assert len(np.unique(ids)) == dataset.manifest.rows["train"]


def test_all_kinds_may_be_in_one_data_set(tmp_path):
    records = [
        {"text": "A tale."},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"text": "Rome", "spans": [{"start": 0, "end": 4, "label": "city"}]},
        {"text": "Sky?", "options": ["red", "blue"], "choice": "blue"},
        RECORDS[0],
    ]
    manifest = prepared([write(tmp_path / "train.jsonl", records)], tmp_path / "out")

    assert manifest.kinds == {"messages": 1, "prompt": 1, "spans": 1, "choice": 1, "text": 1}
    found = list(TextDataset.open(tmp_path / "out").records("train"))
    assert sorted(record.kind for record in found) == ["choice", "messages", "prompt", "spans", "text"]


def test_names_of_files_and_folders_say_the_split(tmp_path):
    write(tmp_path / "in" / "train" / "0.jsonl", RECORDS[:10])
    write(tmp_path / "in" / "test-00000.jsonl", RECORDS[10:14])
    write(tmp_path / "in" / "dev.jsonl", RECORDS[14:17])

    assert prepared([tmp_path / "in"], tmp_path / "out").rows == {"train": 10, "valid": 3, "test": 4}


def test_a_file_of_no_split_beside_those_of_splits_is_refused(tmp_path):
    write(tmp_path / "in" / "train.jsonl", RECORDS[:10])
    write(tmp_path / "in" / "more.jsonl", RECORDS[10:14])

    with pytest.raises(InputError, match=r"more.jsonl: its name is not train, valid or test"):
        prepared([tmp_path / "in"], tmp_path / "out")


def test_a_column_says_the_split(tmp_path):
    rows = [one | {"part": ("train", "dev", "test")[n % 3]} for n, one in enumerate(RECORDS[:30])]

    assert prepared([write(tmp_path / "a.jsonl", rows)], tmp_path / "out", split_column="part").rows == {
        "train": 10,
        "valid": 10,
        "test": 10,
    }


def test_a_bad_row_stops_with_its_place_or_is_counted(tmp_path):
    rows = [*RECORDS[:10], {"prompt": "a", "completion": " "}, {"poem": 1}]
    source = write(tmp_path / "train.jsonl", rows)
    with source.open("a") as file:
        file.write("{no json\n")

    with pytest.raises(InputError, match=r"train.jsonl line 11: completion is empty.*--on-bad-rows\) drop"):
        prepared([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    manifest = prepared([source], tmp_path / "out", on_bad_rows="drop")
    assert manifest.bad == {"empty completions": 1, "no JSON": 1, "unknown kind": 1}
    assert (manifest.rows_read, manifest.rows["train"], manifest.ignored) == (13, 10, ("poem",))


def test_a_data_set_of_text_is_no_other_and_is_not_replaced_unasked(tmp_path):
    source = write(tmp_path / "train.jsonl", RECORDS)
    prepared([source], tmp_path / "out")

    assert "a data set is there already" in refused("text", "prepare", source, "--out", tmp_path / "out")
    assert "a data set of text" in refused(
        "train", "configs/beauty-sasrec.yaml", "--set", f"data.path={tmp_path / 'out'}"
    )
    assert answer("text", "prepare", source, "--out", tmp_path / "out", "--overwrite")["rows"]["train"] == 200


def test_settings_come_from_a_file_and_from_options(tmp_path):
    rows = [{"question": one["prompt"], "answer": one["completion"]} for one in RECORDS]
    source = write(tmp_path / "train.jsonl", rows)
    (tmp_path / "text.yaml").write_text(
        "columns: {prompt: question, completion: answer}\ncleaning: {rules: {min_characters: 20}}\n"
    )
    arguments = ("text", "prepare", source, "--config", tmp_path / "text.yaml", "--kind", "prompt")

    manifest = answer(*arguments, "--out", tmp_path / "a")
    assert manifest["rows"]["train"] < 200 == manifest["rows_read"]
    assert manifest["removed"] == {"too short": 200 - manifest["rows"]["train"]}
    less = answer(*arguments, "--out", tmp_path / "b", "--set", "cleaning.rules.min_characters=null")
    assert less["rows"]["train"] == 200
    assert "no setting 'cleaning.rule'" in refused(
        *arguments, "--out", tmp_path / "c", "--set", "cleaning.rule=1"
    )


def test_the_summary_says_what_was_left_out(tmp_path):
    source = write(tmp_path / "train.jsonl", [*RECORDS, *RECORDS[:3]])
    code, stdout, _ = rayrec("text", "prepare", source, "--out", tmp_path / "out")

    assert code == 0
    assert "exact duplicates, left out" in stdout
    assert "training rows" in stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"answer": "x"}}, "no record has a field 'answer'"),
        ({"split": "column"}, "split_column"),
        ({"split": "random", "split_column": "part"}, "split_column"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "leave no record to train on"),
        ({"cleaning": {"rules": {"min_characters": 9, "max_characters": 8}}}, "no record is left"),
        ({"cleaning": {"rules": {"scripts": ["Latin"]}}}, "expected such as LATIN"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        TextPrepareConfig.parse(settings)


def test_inputs_that_are_not_there_or_empty_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, said in [("nowhere", "no such file or folder"), ("empty", "no file that ends in .jsonl")]:
        with pytest.raises(InputError, match=said):
            prepared([tmp_path / source], tmp_path / "out")
    with pytest.raises(InputError, match="there is no record to train on"):
        prepared([write(tmp_path / "test.jsonl", RECORDS)], tmp_path / "out")


def test_why_no_record_is_left_is_said(tmp_path):
    short = [{"text": word} for word in ("tea", "tea", "sea")]
    file = write(tmp_path / "train.jsonl", [*short, {"text": "a sentence. " * 9}, {"text": ""}])
    rules = {"min_characters": 10, "max_characters": 50}
    with pytest.raises(InputError, match=r"of 5 rows read, 5 left out \(too short 3, .* 1, .* 1\); give"):
        prepared([file], tmp_path / "out", on_bad_rows="drop", cleaning={"rules": rules})


def test_a_file_at_a_url_and_a_packed_one_are_read(tmp_path):
    import gzip

    import fsspec

    content = "".join(json.dumps(one) + "\n" for one in RECORDS[:20]).encode()
    with fsspec.open("memory://text/train.jsonl", "wb") as file:
        file.write(content)
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(content))

    assert (
        prepared(["memory://text/train.jsonl"], tmp_path / "a").fingerprint
        == prepared([tmp_path / "train.jsonl.gz"], tmp_path / "b").fingerprint
    )
