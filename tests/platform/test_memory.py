import pytest

from rayrec.platform import memory
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


def test_a_container_has_what_its_limit_says(tmp_path, monkeypatch):
    unlimited, limited = tmp_path / "v2", tmp_path / "v1"
    unlimited.write_text("max\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(unlimited), str(limited)))
    whole = machine_bytes()
    limited.write_text("123456789\n")

    assert machine_bytes() == 123456789 < whole
