import subprocess
import sys

import pyarrow.parquet as pq

from benchmarks import scale_prepare
from benchmarks.scale_prepare import Peaks

MEGABYTES = 100
HOLDS = f"held = bytearray({MEGABYTES} << 20)\nprint('done', flush=True)\ninput()"


def test_the_memory_of_a_process_below_this_one_is_seen():
    with Peaks(0.05) as peaks:
        child = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        # Looks may come while the child still takes its memory: the one behind has all of it.
        while peaks.of_processes.get(child.pid, 0) <= MEGABYTES << 20:
            assert child.poll() is None
        child.communicate(b"\n", timeout=60)
    assert peaks.of_processes[child.pid] > MEGABYTES << 20
    assert max(peaks.by_name().values()) >= peaks.of_processes[child.pid]


def test_the_log_is_the_same_each_time_and_has_a_busy_user(tmp_path):
    for name in ("one", "other"):
        scale_prepare._write_part(tmp_path / name, 3, 20_000, 1_000)
    first, second = (pq.read_table(tmp_path / name) for name in ("one", "other"))
    assert first == second
    share = first["user_id"].to_pylist().count(0) / len(first)
    assert abs(share - 1 / scale_prepare.BUSIEST) < 0.003
