"""The layouts of the two public logs of clicks."""

import gzip

import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.ids import id_of
from rayrec.samples.impressions.layouts.avazu import COLUMNS
from rayrec.samples.impressions.prepare import prepare_impressions
from tests.helpers.data import real_data


def criteo_line(label, first_number="", first_id="05db9164"):
    return "\t".join([str(label), first_number, *["7"] * 12, first_id, *["ab"] * 24, ""])


def avazu_line(hour="14102113", click="1", device="x"):
    return ",".join(["1000", click, hour, *["5"] * 8, device, *["6"] * 12])


def prepared(layout, source, out, **settings):
    prepare_impressions(source, out, ImpressionsConfig(layout=layout, **settings))
    return ImpressionDataset.open(out)


def train(dataset):
    return pq.read_table(dataset.root / dataset.train_files[0])


def test_criteo_has_missing_values_and_no_header(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\n".join([criteo_line(0), criteo_line(1, "-2"), *[criteo_line(0)] * 8]) + "\n")
    dataset = prepared("criteo", path, tmp_path / "data")
    rows = train(dataset)
    assert dataset.manifest.rows == {"train": 8, "valid": 1, "test": 1}
    assert rows["I1"].to_pylist()[:2] == [None, -2.0]
    assert rows["C1"][0].as_py() == id_of("C1", "05db9164")
    assert rows["C26"].null_count == 8
    assert dataset.num_ids["C26"] == 0


def test_criteo_leaves_the_challenges_test_file_aside(tmp_path):
    folder = tmp_path / "dac"
    folder.mkdir()
    with gzip.open(folder / "train.txt.gz", "wt") as file:
        file.write("\n".join([criteo_line(number % 2) for number in range(10)]))
    (folder / "test.txt").write_text(criteo_line(0).removeprefix("0\t"))
    dataset = prepared("criteo", folder, tmp_path / "data")
    assert dataset.manifest.rows == {"train": 8, "valid": 1, "test": 1}


def test_a_split_without_a_file_is_named(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    for name in ("train.tsv", "test.tsv"):
        (folder / name).write_text(criteo_line(0))
    with pytest.raises(
        InputError, match="no file named valid or validation or val or dev; expected one each"
    ):
        prepared("criteo", folder, tmp_path / "data")


def test_a_line_of_another_width_is_named_in_a_file_without_header(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("\n".join([criteo_line(0), criteo_line(1) + "\t"]))
    with pytest.raises(InputError, match=r"train.tsv line 2: 41 values, expected 40 separated by '\\t'"):
        prepared("criteo", path, tmp_path / "data")


def test_a_wrong_label_is_named_by_line_in_a_file_without_header(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("\n".join([criteo_line(0), criteo_line(1), criteo_line(3)]))
    with pytest.raises(InputError, match=r"train.tsv line 3: label is '3'"):
        prepared("criteo", path, tmp_path / "data")


def test_avazu_has_a_header_in_one_file_only(tmp_path):
    folder = tmp_path / "avazu"
    folder.mkdir()
    (folder / "train.csv").write_text("\n".join([",".join(COLUMNS), avazu_line(click="0"), avazu_line()]))
    (folder / "dev.csv").write_text(avazu_line(device="y"))
    (folder / "test.csv").write_text(avazu_line(hour="14102200"))
    dataset = prepared("avazu", folder, tmp_path / "data")
    assert dataset.manifest.rows == {"train": 2, "valid": 1, "test": 1}
    rows = train(dataset)
    assert "id" not in rows.column_names
    assert rows["click"].to_pylist() == [0, 1]
    assert rows["hour_of_day"][0].as_py() == id_of("hour_of_day", "13")
    assert rows["weekday"][0].as_py() == id_of("weekday", "1")  # 21 October 2014 was a Tuesday
    assert dataset.split_table("test")["hour_of_day"][0].as_py() == id_of("hour_of_day", "0")
    assert dataset.split_table("valid")["device_id"][0].as_py() == id_of("device_id", "y")


def test_avazu_is_divided_by_hour(tmp_path):
    path = tmp_path / "train"
    hours = [f"141021{hour:02}" for hour in range(10)]
    path.write_text("\n".join([",".join(COLUMNS), *(avazu_line(hour) for hour in reversed(hours))]))
    dataset = prepared("avazu", path, tmp_path / "data")
    assert dataset.split_table("test")["hour_of_day"].to_pylist() == [id_of("hour_of_day", "9")]


def test_a_wrong_hour_is_refused(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("\n".join([",".join(COLUMNS), avazu_line(), avazu_line("2014-10-21")]))
    with pytest.raises(InputError, match=r"train.csv line 3: hour is '2014-10-21'; expected YYMMDDHH"):
        prepared("avazu", path, tmp_path / "data")


def test_the_samples_of_both(tmp_path):
    criteo = prepared("criteo", real_data("ctr-criteo-8k"), tmp_path / "criteo", min_count=10)
    assert criteo.manifest.rows == {"train": 7200, "valid": 409, "test": 391}
    assert criteo.manifest.positives["label"] == {"train": 1549, "valid": 93, "test": 86}
    assert (criteo.num_ids["C1"], criteo.manifest.num_rare["C1"]) == (25, 123)
    avazu = prepared("avazu", real_data("ctr-avazu-8k"), tmp_path / "avazu")
    assert avazu.manifest.rows == {"train": 8087, "valid": 480, "test": 432}
    assert avazu.manifest.positives["click"] == {"train": 1397, "valid": 86, "test": 80}
    assert avazu.num_ids["hour_of_day"] == 1
