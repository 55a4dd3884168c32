from benchmarks import BENCHES
from benchmarks.harness import BenchOptions


def test_without_the_data_set_the_bars_are_not_measured(tmp_path, capsys):
    bars = BENCHES["beauty-sasrec"](BenchOptions(data=tmp_path / "beauty"))

    assert [bar.name for bar in bars] == ["beauty-sasrec-recall@10", "beauty-sasrec-over-popularity"]
    assert all((bar.value, bar.low, bar.ok) == (None, None, None) for bar in bars)
    assert "is missing" in " ".join(capsys.readouterr().err.split())  # the console wraps long paths
