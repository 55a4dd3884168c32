"""Ranking by recordings of a device's kernels (`rayrec.platform.graphs`), one for each bucket.

    start:   buckets ─► tensors that stay ─► `recommend` of the padded batch is recorded ─► frozen
    batch:   padded ─► copied to those tensors ─► one replay: history, beam search and filters ─► items

After the start nothing is recorded any more, so no batch waits for it: one without a bucket is ranked
eagerly. A recording is of one version of a model, since it reads the weights where they were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rayrec.models.base.made_of_weights import made_of_weights
from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.inputs import Signature
from rayrec.models.compiled_ranking.job import RankingModel
from rayrec.models.compiled_ranking.ranking import CompiledPrograms, CompiledRanking
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.platform.devices import fixed_shapes
from rayrec.platform.graphs import Graphs

logger = logging.getLogger(__name__)


class CapturedRun:
    """The recorded `recommend` of a bucket."""

    def __init__(
        self,
        model: SequenceModel,
        signature: Signature,
        bucket: Bucket,
        device: torch.device,
        graphs: Graphs,
    ) -> None:
        """Record it.

        Args:
            model: in evaluation; its weights stay where they are.

        Raises:
            RuntimeError: the model does what cannot be recorded, such as waiting for the device.
        """
        self._inputs = [
            torch.full(each.shape, each.fill, dtype=each.dtype, device=device)
            for each in signature.inputs(bucket)
        ]
        self._ranked: tuple[Tensor, Tensor] | None = None
        self._lock = threading.Lock()

        def work() -> None:
            with fixed_shapes():
                batch, excluded_BE = signature.batch(bucket, self._inputs)
                beams_B = [bucket.width] * bucket.num_rows
                found = model.recommend(batch, bucket.width, excluded_BE, beams_B)
            self._ranked = found.items_BK, found.scores_BK

        self._replay = graphs.capture(work)
        # Kernels were recorded where these are, and the model may come to keep others.
        self._made = [each.kept for each in made_of_weights(model)]

    def __call__(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """([B, width] items, [B, width] scores) of other inputs; weights are those that it was recorded
        with."""
        assert self._ranked is not None, "recorded"
        with self._lock:
            for kept, given in zip(self._inputs, inputs, strict=True):
                kept.copy_(given, non_blocking=True)
            self._replay()
            items, scores = self._ranked
            return items.clone(), scores.clone()


def captured_programs(model: RankingModel, buckets: Buckets, device: torch.device) -> CompiledPrograms:
    """Programs of one version that are recorded by `capture`, and never ordered."""
    return CompiledPrograms(model, buckets, _nobody, device, threads=1, most=0)


def _nobody(programs: CompiledPrograms, bucket: Bucket) -> None:
    raise AssertionError("no bucket is ordered: `most` is 0")


@torch.inference_mode()
def capture(ranking: CompiledRanking, graphs: Graphs, buckets: Sequence[Bucket]) -> int:
    """Record buckets: those of the usual widths first, so that no wider one can cost them.

    Then come those of each wider one. Of each, the largest is first, whose memory the smaller ones use again.

    Args:
        ranking: of `captured_programs`; it has seen a batch.

    Returns:
        How many were recorded. When one cannot be, that is said, and it and all after it are ranked
        eagerly: a recording that has failed may still hold memory that the next one would take.
    """
    programs = ranking.programs
    assert programs.signature is not None, "a batch tells what the inputs are"
    started, num_recorded = time.monotonic(), 0
    usual = ranking.model.num_beams(1)

    def turn(bucket: Bucket) -> tuple[int, int]:
        wider = bucket.width if usual and bucket.width > usual else 0
        return wider, -bucket.num_rows * bucket.length * bucket.width

    for bucket in sorted(buckets, key=turn):
        try:
            run = CapturedRun(ranking.model, programs.signature, bucket, programs.device, graphs)
            programs.add(bucket, run)
        except Exception as error:  # torch has no class of its own for it
            logger.warning(
                "%s cannot be recorded, and it and those after it are ranked eagerly: %s", bucket, error
            )
            break
        num_recorded += 1
    logger.info("recorded %d shapes in %.1f s", num_recorded, time.monotonic() - started)
    return num_recorded
