"""The driver script, as a user starts it."""

from functools import partial

import rayrec
from examples import driver
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, tokenize
from rayrec.pipelines.training.placements import in_process
from tests.helpers.data import small_dataset


def test_the_driver_trains_and_evaluates(tmp_path, monkeypatch, capsys):
    dataset = small_dataset(tmp_path / "data")
    tokenize(dataset.root, config=TokenizeConfig(num_levels=2, codebook_size=4))
    run = tmp_path / "run"
    monkeypatch.setattr(rayrec, "train", partial(rayrec.train, cluster=in_process))
    monkeypatch.setattr("sys.argv", ["driver.py", str(dataset.root), str(run), "--epochs", "1"])

    driver.main()

    printed = capsys.readouterr().out
    assert "recall@10" in printed
    assert "popularity" in printed
    assert RunFolder.open(run).state["state"] == "finished"
