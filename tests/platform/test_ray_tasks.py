"""Tasks on the cluster: how they end."""

import signal

import pytest

from rayrec.platform.ray_tasks import interruptible


def test_a_task_can_be_interrupted_where_its_process_was_started_to_ignore_that():
    """As processes are that a shell started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.raise_signal(signal.SIGINT)  # as nothing
        with pytest.raises(KeyboardInterrupt):
            interruptible(signal.raise_signal)(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
