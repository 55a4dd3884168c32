import subprocess
import sys

from benchmarks.processes import ProcessorTime

BUSY = "import time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\ninput()"


def test_the_time_of_processes_that_were_started_counts_and_that_before_does_not():
    deadline_s = 60
    with ProcessorTime(interval_s=0.05) as idle:
        pass
    with ProcessorTime(interval_s=0.05) as spent:
        child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        with ProcessorTime(interval_s=0.05) as later:
            pass
    child.communicate(b"\n", timeout=deadline_s)

    assert spent.seconds > 0.35
    assert idle.seconds < 0.35
    assert later.seconds < 0.35
