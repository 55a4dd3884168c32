"""Compiles one program, as a process of its own: tracing holds Python's lock, and a compiler may die.

    python -m rayrec.models.compiled_ranking.compiler_process JOB_FOLDER PACKAGE PARENT

It has one thread and what priority it is given, and ends with the process that started it.

    job ─► network with weights of no meaning ─► traced ─► compiled ─► run beside eager ranking ─► package

Exit codes: 0, the package is there; else the last line of standard error says why not: `NEVER`, which holds
for every program of the model on this machine, or `CANNOT`.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.jagged import JaggedLayout
from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.models.compiled_ranking.inputs import Signature
from rayrec.models.compiled_ranking.job import Job, environment
from rayrec.models.compiled_ranking.packages import PackageFolders, load, publish
from rayrec.models.compiled_ranking.program import MadeVectors, PaddedRanking, first_difference, weights_of
from rayrec.models.sequence.sequence_model import SequenceModel, TopItems
from rayrec.models.sequence.sequence_program import build_model
from rayrec.models.sequence.tensor_batch import TensorBatch

NEVER, CANNOT = 3, 4
TOLERANCE = 1e-4
"""Of scores, relative to the largest: what another order of sums may make of float32."""


class CannotCompileError(RuntimeError):
    """This program cannot be had; the message says why."""


class NeverCompiledError(CannotCompileError):
    """Nor could any other of the model."""


def main(job_folder: Path, package: Path, parent: int) -> int:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        with open(package.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another replica may be compiling the same
            if PackageFolders([package.parent]).find(package.stem) is None:
                compile_package(Job.load(job_folder), package)
        return 0
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return NEVER if isinstance(error, NeverCompiledError) else CANNOT


def compile_package(job: Job, package: Path) -> None:
    """Compile a model's recommending program in a process of its own.

    Raises:
        NeverCompiledError: the run is quantized, there is no compiler, the model cannot be traced, or it
            reads lengths of rows where padding cannot tell them.
        CannotCompileError: what came of it does not rank as eager ranking does.
    """
    if job.model.config.quantization is not None:
        raise NeverCompiledError(
            "the run is quantized: programs take weights as they are saved, and its kernels take them packed"
        )

    import torch._inductor
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise NeverCompiledError("there is no C++ compiler; install g++, or name one by CXX") from error
    started = time.monotonic()
    device = torch.device(job.device)
    model = network(job).to(device).eval()
    if model.table_of_catalog is not None:
        width = next(table.width for table in job.signature.tables if table.name == model.table_of_catalog)
        num_rows = len(model.catalog_ids(np.arange(job.model.catalog.num_items)))
        model.set_catalog(torch.randn(num_rows, width, device=device))
    if model.reads_rows:
        raise NeverCompiledError(
            "rows of long prefixes are read while items are generated; hold all of them (model.held_prefixes)"
        )
    name = f".{package.stem}.{secrets.token_hex(6)}"
    unfinished = package.with_name(f"{name}.pt2")
    with torch.no_grad(), config.patch({"cpp.threads": job.threads}):
        examples = [example(job, seed) for seed in range(3)]
        inputs = [each.to(device) for each in examples[0]]
        rank_eagerly(job, model, inputs)  # makes what is made once, which is not to be a part of the program
        program = PaddedRanking(model, job.signature, job.bucket)
        weights = [*weights_of(model).values(), *MadeVectors(model).tensors]
        padded = program(weights, inputs)
        if (what := difference(job, model, padded, inputs)) is not None:
            raise NeverCompiledError(f"padding changes what the model ranks: {what}")
        try:
            traced = torch.export.export(program, (weights, inputs), strict=False)
        except Exception as error:
            raise NeverCompiledError(f"the model cannot be traced: {error}") from error
        try:
            torch._inductor.aoti_compile_and_package(traced, package_path=str(unfinished))
            facts = {
                "bucket": str(job.bucket),
                "model": job.model.settings["name"],
                "compiled_in_s": round(time.monotonic() - started, 1),
                **environment(job.device),
            }
            candidate = package.with_name(f"{name}.candidate.pt2")
            os.replace(unfinished, candidate)
            publish(candidate, unfinished, facts)  # loaded as it will be, under a name that nobody looks for
            run = load(unfinished)
            for each in examples:
                on_device = [tensor.to(device) for tensor in each]
                if (what := difference(job, model, run(weights, on_device), on_device)) is not None:
                    raise CannotCompileError(f"the program ranks otherwise than eager ranking: {what}")
            publish(unfinished, package, facts)
        finally:
            for left in (unfinished, unfinished.with_suffix(".json")):
                left.unlink(missing_ok=True)


def network(job: Job) -> SequenceModel:
    """The model with weights large enough for its parts to matter."""
    settings = job.model.config
    if settings.name == "hstu":  # whose backend for eager batches groups rows by what their lengths are
        settings = settings.model_copy(update={"attention": "reference"})
    model = build_model(settings, job.model.catalog, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def example(job: Job, seed: int) -> list[Tensor]:
    """Inputs as they could come: rows of all lengths, one without any events where there are several."""
    generator, signature, bucket = np.random.default_rng(seed), job.signature, job.bucket
    catalog, num_read = job.model.catalog, bucket.num_read(signature.max_length)
    lengths_B = generator.integers(1, num_read + 1, bucket.num_rows)
    lengths_B[0] = num_read if seed == 0 else lengths_B[0]
    if bucket.num_rows > 1:
        lengths_B[-1] = 0
    values: dict[str, Any] = {
        "lengths": lengths_B,
        "items": generator.integers(0, catalog.num_items, (bucket.num_rows, num_read)),
        "excluded": generator.integers(-1, catalog.num_items, (bucket.num_rows, bucket.length)),
        "times": generator.integers(0, 10**8, (bucket.num_rows, num_read)).cumsum(1),
    }
    named: dict[str, tuple[str, ...]] = {str(label): names for label, names in catalog.labels.items()}
    for name in signature.labels:
        values[f"label {name}"] = generator.integers(-1, len(named[name]), (bucket.num_rows, num_read))
    for name in signature.parts:
        most = len(named[name]) if name in named else catalog.num_items
        values[f"part {name}"] = generator.integers(-1, most, bucket.num_rows)
    for table in signature.tables:
        rows, inverse = f"rows {table.name}", f"inverse {table.name}"
        shapes = {each.name: each.shape for each in signature.inputs(bucket)}
        values[rows] = generator.normal(size=shapes[rows])
        values[inverse] = generator.integers(0, shapes[rows][0], shapes[inverse])
    return [
        torch.from_numpy(np.asarray(values[each.name])).to(each.dtype)
        for each in signature.inputs(job.bucket)
    ]


def difference(
    job: Job, model: SequenceModel, ranked: tuple[Tensor, Tensor], inputs: list[Tensor]
) -> str | None:
    """What eager ranking of the same rows without their padding says otherwise; None if nothing."""
    eager, lengths_B = rank_eagerly(job, model, inputs)
    there_B = torch.from_numpy(lengths_B > 0)  # of other rows nothing is said
    compared = [each.cpu()[there_B] for each in (*ranked, *eager)]
    return first_difference(compared[0], compared[1], compared[2], compared[3], TOLERANCE)


def rank_eagerly(job: Job, model: SequenceModel, inputs: list[Tensor]) -> tuple[TopItems, np.ndarray]:
    """(What the model recommends for the rows without their padding, [B] their lengths)."""
    batch, excluded_BE = unpadded(job.signature, job.bucket, inputs)
    width = job.bucket.width
    return model.recommend(batch, width, excluded_BE, [width] * batch.layout.num_rows), batch.lengths_B


def unpadded(signature: Signature, bucket: Bucket, inputs: list[Tensor]) -> tuple[TensorBatch, Tensor]:
    """The jagged batch that padded inputs are of."""
    padded, excluded_BE = signature.batch(bucket, inputs)
    lengths_B = padded.layout.lengths_on_device_B()
    layout = JaggedLayout.from_offsets(
        np.concatenate([[0], lengths_B.cpu().numpy().cumsum()]), lengths_B.device
    )
    is_event_N = padded.layout.place_N < lengths_B[padded.layout.row_N]
    per_event = {table.name for table in signature.tables if table.axis == "event"}
    batch = TensorBatch(
        layout=layout,
        keys_N=padded.keys_N[is_event_N],
        items_N=padded.items_N[is_event_N],
        targets_N=None,
        negatives_S=None,
        inverse={
            name: each[is_event_N] if name in per_event else each for name, each in padded.inverse.items()
        },
        rows=padded.rows,
        times_N=None if padded.times_N is None else padded.times_N[is_event_N],
        labels={name: each[is_event_N] for name, each in padded.labels.items()},
        instruction=padded.instruction,
    )
    return batch, excluded_BE


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
