"""The record of a run: what it says of schemes and of rows in 8 bits."""

import json

import pytest

from benchmarks import quantization
from tests.helpers.runs import make_run


@pytest.mark.slow
def test_a_record_says_what_schemes_and_rows_lose(tmp_path):
    run = make_run(tmp_path, "sasrec", item_matrix="sparse", snapshots_after=(0,))

    quantization.main([str(run), str(tmp_path / "record.json"), "--scheme", "w8a8", "--max-users", "16"])

    record = json.loads((tmp_path / "record.json").read_text())
    assert set(record["schemes"]) == {"w8a8"}
    assert record["model"]["name"] == "sasrec"
    rows = record["rows_in_8_bits"]
    assert rows["num_users"] == 16
    assert rows["bytes"]["int8_row"] < rows["bytes"]["float32"] * 1.5  # small tables are headers for the most
    assert rows["overlap@10"]["value"] > 0.8
