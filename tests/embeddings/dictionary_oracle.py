"""What an embedding table means: a dictionary of rows, changed one step after another, one row at a time.

Shares with the engine the compiled equation of a single row (`apply_row`, itself held to PyTorch and the
papers) and nothing else: no index, blocks, shards, modes or caches; other code for initial values,
16-bit rounding, admission and eviction.
"""

from dataclasses import dataclass

import numpy as np

from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.optim.optimizers import make_optimizer
from rayrec.embeddings.optim.row_kernels import apply_row
from rayrec.platform.compiled import kernel_input
from rayrec.platform.hashing import combine64, mix64


@dataclass
class Row:
    weights_D: np.ndarray
    state_S: np.ndarray
    step: int = -1
    count: int = 0

    def as_bytes(self) -> tuple:
        return self.weights_D.tobytes(), self.state_S.tobytes(), self.step, self.count


class DictionaryTable:
    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self.rows: dict[int, Row] = {}
        self.sightings: dict[int, tuple[int, int]] = {}
        """Count and last step by id."""
        self.evicted: dict[int, int] = {}
        """Step of the last eviction by id."""
        self._optimizer = make_optimizer(config.optimizer, config.schedule)
        self._newest = None
        self._times: list[tuple[int, int]] = []
        """(step, newest event until then) of evictions."""

    def lookup(self, i: int) -> np.ndarray:
        return (self.rows[i] if i in self.rows else self._new_row(i)).weights_D

    def commit(self, step: int, grads: dict[int, np.ndarray], newest_event: int | None = None) -> None:
        rates = self._optimizer.rates(step)
        for i, grad_D in grads.items():
            if i not in self.rows and not self._is_admitted(i, step):
                continue
            row = self.rows.setdefault(i, self._new_row(i))
            apply_row(
                self._optimizer.kernel, row.weights_D, row.state_S, kernel_input(grad_D, np.float32), rates
            )
            row.weights_D = self._rounded(row.weights_D, i, step)
            row.step, row.count = step, row.count + 1
        self._forget(step)
        if newest_event is not None:
            self._newest = newest_event if self._newest is None else max(self._newest, newest_event)
        self._evict(step)

    def everything(self) -> dict[int, tuple]:
        return {i: row.as_bytes() for i, row in self.rows.items()}

    def _new_row(self, i: int) -> Row:
        dim = self.config.dim
        hashed_D = combine64(self.config.seed, i, np.arange(dim))
        uniform_D = (hashed_D >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        weights_D = np.float32(self.config.init_scale) * uniform_D
        state_S = np.full(self._optimizer.state_size(dim), self._optimizer.initial_state, np.float32)
        return Row(self._rounded(weights_D, i, -1), state_S)

    def _rounded(self, weights_D: np.ndarray, i: int, step: int) -> np.ndarray:
        """To one of the two neighbors among the 16-bit numbers, the farther one the less likely."""
        dtype = self.config.weight_dtype
        if dtype == "float32":
            return weights_D
        random_D = combine64(self.config.seed, i, step, np.arange(len(weights_D))) >> np.uint64(48)
        if dtype == "bfloat16":
            bits_D = (weights_D.view(np.uint32).astype(np.uint64) + random_D) & np.uint64(0xFFFF0000)
            return bits_D.astype(np.uint32).view(np.float32)
        rounded = []
        for value, random in zip(weights_D.astype(np.float64), random_D, strict=True):
            size = min(abs(value), 65504.0)
            spacing = 2.0 ** (max(np.floor(np.log2(size)) if size else -14, -14) - 10)
            steps = size / spacing
            below = np.floor(steps)
            if size < 2.0**-14:
                up = float(random) / 2**16 < steps - below
            else:  # 13 of the random bits against the 13 that are dropped
                up = (int(random) & 0x1FFF) + round((steps - below) * 2**13) >= 2**13
            rounded.append(np.copysign((below + up) * spacing, value))
        return np.array(rounded, dtype=np.float32)

    def _is_admitted(self, i: int, step: int) -> bool:
        count = self.sightings.pop(i, (0, 0))[0] + 1
        if count < self.config.admission.min_sightings:
            self.sightings[i] = (count, step)
            return False
        return True

    def _forget(self, step: int) -> None:
        config = self.config.admission
        if config.forget_after_steps is not None and (step + 1) % config.every_steps == 0:
            self.sightings = {
                i: (count, last)
                for i, (count, last) in self.sightings.items()
                if step - last <= config.forget_after_steps
            }

    def _evict(self, step: int) -> None:
        config = self.config.eviction
        if config is None or (step + 1) % config.every_steps:
            return
        victims = set()
        if config.max_age_steps is not None:
            victims = {i for i, row in self.rows.items() if step - row.step > config.max_age_steps}
        if config.ttl_hours is not None and self._newest is not None:
            self._times.append((step, self._newest))
            victims |= {i for i, row in self.rows.items() if self._lived_until(row.step)}
        if config.min_score is not None:
            victims |= {i for i in self.rows if self._score(i, step) < config.min_score}
        if config.max_rows_per_bucket is not None or config.max_rows is not None:
            buckets: dict[int, list[int]] = {}
            for i in self.rows.keys() - victims:
                buckets.setdefault(int(mix64(i)) % 65_536, []).append(i)
            for bucket, members in buckets.items():
                members.sort(key=lambda i: self._worth(i, step), reverse=True)
                most = [] if config.max_rows_per_bucket is None else [config.max_rows_per_bucket]
                if config.max_rows is not None:  # the first buckets have what is left over, one row each
                    most.append(config.max_rows // 65_536 + (bucket < config.max_rows % 65_536))
                victims.update(members[min(most) :])
        for i in victims:
            del self.rows[i]
            self.evicted[i] = step

    def _lived_until(self, step: int) -> bool:
        """Whether a row of that last change is too old, by the eviction that followed the change."""
        ttl_s = 3600 * self.config.eviction.ttl_hours
        then = next((time for of_step, time in self._times if of_step >= step), self._newest)
        return then <= self._newest - ttl_s

    def _score(self, i: int, step: int) -> float:
        row = self.rows[i]
        return row.count / 2.0 ** ((step - row.step) // self.config.eviction.half_life_steps)

    def _worth(self, i: int, step: int) -> tuple:
        row, keep = self.rows[i], self.config.eviction.keep
        marks = {
            "recent": (row.step, row.count),
            "frequent": (row.count, row.step),
        }
        return (*(marks[keep] if keep in marks else (self._score(i, step), row.step)), int(mix64(i)))
