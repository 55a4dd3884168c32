"""What the process that answers does with compiled programs: it pads, runs, and never compiles.

    recommend(batch) ─► bucket ─► its program, if it is here ─► answer
                     └ not here: `order(bucket)`, once; None, and the caller ranks eagerly

    another thread: programs.add(bucket, program), when it has come
    a program that fails at a batch: given up, said once; None, and so for all batches of the bucket

Axes: B rows of a batch, E excluded items, K items of an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.inputs import Signature
from rayrec.models.compiled_ranking.job import Job, RankingModel
from rayrec.models.compiled_ranking.packages import Run
from rayrec.models.compiled_ranking.program import MadeVectors, weights_of
from rayrec.models.decoding.beam_policy import Beams
from rayrec.models.program.program import RankedItems, Rows
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.sequence.tensor_batch import Features

logger = logging.getLogger(__name__)

SCORED_WIDTHS = (16, 128, 1024)
"""Of models that score every item: a program gives so many, of which an answer is the first."""


class CompiledPrograms:
    """The programs of a model, for all versions that differ in weights alone. For any thread."""

    def __init__(
        self,
        model: RankingModel,
        buckets: Buckets,
        order: Callable[[CompiledPrograms, Bucket], None],
        device: torch.device,
        threads: int,
        most: int = 64,
    ) -> None:
        """
        Args:
            order: called once for each bucket that a batch needed and that is not here; must return at once.
            most: buckets that are ordered at all.
        """
        self.model = model
        self.buckets = buckets
        self.device = device
        self.threads = threads
        self.most = most
        self.signature: Signature | None = None
        """Of the first batch; no program can be ordered before."""
        self.weight_shapes: tuple[tuple[str, torch.Size, torch.dtype], ...] | None = None
        self.declared: set[int] = set()
        """Widths that there are programs of although they are above the model's beams."""
        self.newest: CompiledRanking | None = None
        """The version that was asked last."""
        self._order = order
        self._programs: dict[Bucket, Run] = {}
        self.asked_at: dict[Bucket, float] = {}
        """UNIX seconds when a batch last was of a bucket."""
        self._ordered: set[Bucket] = set()
        self._changes = threading.Lock()

    def of(self, bucket: Bucket) -> Run | None:
        return self._programs.get(bucket)

    @property
    def ready(self) -> list[Bucket]:
        """Buckets whose program is here."""
        return sorted(self._programs)

    def want(self, bucket: Bucket) -> bool:
        """Order a bucket, unless it was before or there are as many as there may be.

        Returns:
            Whether it is ordered, now or before.
        """
        if bucket in self._ordered:
            return True
        with self._changes:
            if bucket in self._ordered:
                return True
            if len(self._ordered) >= self.most:
                return False
            self._ordered.add(bucket)
        self._order(self, bucket)
        return True

    def job(self, bucket: Bucket) -> Job:
        assert self.signature is not None, "a batch came before it was ordered"
        return Job(self.model, self.signature, bucket, str(self.device), self.threads)

    def add(self, bucket: Bucket, program: Run) -> None:
        """Run the program once, of no meaning; from then on batches of the bucket go to it.

        Raises:
            Exception: the program fails; it is not taken.
        """
        assert self.signature is not None
        assert self.newest is not None, "a batch of it has ordered the program"
        with torch.inference_mode():
            program(
                self.newest.weights,
                [
                    torch.full(each.shape, each.fill, dtype=each.dtype, device=self.device)
                    for each in self.signature.inputs(bucket)
                ],
            )
        self._programs[bucket] = program

    def give_up(self, bucket: Bucket, error: Exception) -> None:
        """Have the bucket ranked eagerly from now on: what failed at one batch fails at the next, too."""
        with self._changes:
            if self._programs.pop(bucket, None) is None:
                return
        logger.warning("%s are ranked eagerly from now on, its program failed: %s", bucket, error)


class CompiledRanking:
    """One version of a model, ranked by programs. As thread-safe as they are: for one thread."""

    def __init__(self, programs: CompiledPrograms, model: SequenceModel) -> None:
        """
        Raises:
            ValueError: the model has other weights than those that the programs are for.
        """
        weights = weights_of(model)
        # A program trusts what it gets: other shapes or strides would be read as if they were its own.
        for name, weight in weights.items():
            if not weight.is_contiguous():
                raise ValueError(f"weight {name!r} is not contiguous: programs take those that are")
        shapes = tuple((name, weight.shape, weight.dtype) for name, weight in weights.items())
        if programs.weight_shapes is None:
            programs.weight_shapes = shapes
        if shapes != programs.weight_shapes:
            raise ValueError("a version whose weights have other shapes needs programs of its own")
        self.programs = programs
        self._weights = list(weights.values())
        self._made = MadeVectors(model)
        self.answered = Counter[str]()
        """Batches by who ranked them: `compiled`, `eager`."""
        self.model = model

    @property
    def weights(self) -> list[Tensor]:
        """What programs take: the model's weights, and what it has made of them."""
        return self._weights + self._made.tensors

    def recommend(
        self,
        features: Features,
        rows: Rows,
        k: int,
        excluded_BE: np.ndarray | None,
        beams_B: Sequence[Beams] | None = None,
    ) -> RankedItems | None:
        """As `RecommendingProgram.recommend`; None for a batch without a program, or whose program fails."""
        found = self._rank(features, rows, k, excluded_BE, beams_B)
        self.answered["eager" if found is None else "compiled"] += 1
        return found

    def _rank(
        self,
        features: Features,
        rows: Rows,
        k: int,
        excluded_BE: np.ndarray | None,
        beams_B: Sequence[Beams] | None,
    ) -> RankedItems | None:
        programs = self.programs
        if programs.signature is None:
            parts = programs.model.instruction_parts
            programs.signature = Signature.of(features, rows, programs.model.max_length, parts)
        if programs.newest is None or self._made.are_there:
            programs.newest = self
        if not self._made.are_there:  # eager ranking of this batch makes them
            return None
        width = self.width(k, beams_B)
        lengths_B = np.diff(features.offsets_B1)
        num_excluded = 0 if excluded_BE is None else excluded_BE.shape[1]
        longest = max(int(lengths_B.max()), num_excluded)
        bucket = None if width is None else programs.buckets.of(len(lengths_B), longest, width)
        if bucket is None:
            return None
        programs.asked_at[bucket] = time.time()
        program = programs.of(bucket)
        if program is None:
            programs.want(bucket)
            return None
        inputs = programs.signature.padded(bucket, features, rows, excluded_BE)
        if inputs is None:
            return None
        num_rows = len(lengths_B)
        try:
            items, scores = program(self.weights, [each.to(programs.device) for each in inputs])
            return RankedItems(items[:num_rows, :k].cpu().numpy(), scores[:num_rows, :k].cpu().numpy())
        except Exception as error:  # torch has no class of its own for it
            programs.give_up(bucket, error)
            return None

    def width(self, k: int, beams_B: Sequence[Beams] | None = None) -> int | None:
        """Of the bucket for k items; None where no program is made for so many, or for rows that differ.

        Beams hang on k where it is larger than their number. So any k would be a program of its own; k above
        the model's beams is left to eager ranking, unless its width was declared.
        """
        usual = self.model.num_beams(1)
        if usual:
            of_rows = {self.model.num_beams(k)} if beams_B is None else set(beams_B)
            beams = next(iter(of_rows))
            # A program keeps as many at every level.
            if len(of_rows) > 1 or not isinstance(beams, int):
                return None
            return beams if beams <= usual or beams in self.programs.declared else None
        num_items = self.programs.model.catalog.num_items
        return next((min(width, num_items) for width in SCORED_WIDTHS if k <= width), None)
