"""The example for users of torchrec, as they start it."""

import re

import pytest

pytest.importorskip(
    "torchrec",
    exc_type=ImportError,
    reason="torchrec is missing: pip install 'rayrec[torchrec]', then pip install --no-deps torchrec==1.8.0",
)

from examples import torchrec_model


@pytest.mark.slow
def test_the_example_learns_and_says_what_the_shards_hold(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["torchrec_model.py", "--steps", "120"])

    torchrec_model.main()

    printed = capsys.readouterr().out
    first, last = map(float, re.search(r"loss ([\d.]+) at first, ([\d.]+) at the end", printed).groups())
    assert last < 0.9 * first
    users, items = (
        sum(int(count.replace(",", "")) for count in re.findall(rf"([\d,]+) of '{table}'", printed))
        for table in ("t_user", "t_item")
    )
    assert (users, items) == (torchrec_model.NUM_USERS, torchrec_model.NUM_ITEMS)
