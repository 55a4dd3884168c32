import pytest

from rayrec.platform import control_groups
from rayrec.platform.memory import human_size, machine_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (8 * 2**30, "8.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit(num_bytes, text):
    assert human_size(num_bytes) == text


@pytest.mark.parametrize(
    ("own", "file", "other"),
    [
        ("0::/\n", "memory.max", "max\n"),
        ("0::/job/step\n", "job/memory.max", "max\n"),
        ("5:memory:/job\n", "memory/job/memory.limit_in_bytes", "9223372036854771712\n"),
    ],
)
def test_a_container_or_a_job_has_what_its_limit_says(tmp_path, monkeypatch, own, file, other):
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    limited = tmp_path / file
    limited.parent.mkdir(parents=True, exist_ok=True)
    limited.write_text(other)
    whole = machine_bytes()
    limited.write_text("123456789\n")

    assert machine_bytes() == 123456789 < whole
