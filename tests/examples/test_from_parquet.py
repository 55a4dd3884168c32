"""The example of the training read alone, as a user starts it."""

import re

import pytest

from examples import from_parquet


@pytest.mark.slow
def test_the_example_learns_from_a_folder_that_it_draws(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["from_parquet.py", "--epochs", "2"])

    from_parquet.main()

    steps, first, last = re.search(
        r"(\d+) steps, loss ([\d.]+) at first, ([\d.]+) at the end", capsys.readouterr().out
    ).groups()
    assert int(steps) == 2 * 4 * 4096 / from_parquet.BATCH_SIZE
    assert float(last) < 0.8 * float(first)
