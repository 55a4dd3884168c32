"""MFU: model FLOPs that were trained, as a share of what the device could have multiplied meanwhile."""

from __future__ import annotations


class Utilization:
    """One trainer's account."""

    def __init__(self, matrix_rate: float) -> None:
        """
        Args:
            matrix_rate: FLOP/s, see `rayrec.platform.health.burn_in.matrix_rate`.
        """
        self.matrix_rate = matrix_rate
        self.total_flops = 0.0
        self._asked_at = (0.0, 0.0)

    def measured(self, matrix_rate: float) -> None:
        """Note another measurement: the best counts, since other work on the machine can only lower it."""
        self.matrix_rate = max(self.matrix_rate, matrix_rate)

    def add(self, flops: float) -> None:
        self.total_flops += flops

    def since_last(self, running_s: float) -> float:
        """MFU since this was asked before; 0 where no time has passed.

        Args:
            running_s: seconds of training so far, with all waiting.
        """
        (flops, before_s), self._asked_at = self._asked_at, (self.total_flops, running_s)
        seconds = running_s - before_s
        return (self.total_flops - flops) / (seconds * self.matrix_rate) if seconds > 0 else 0.0
