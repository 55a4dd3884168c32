"""The process that prepares a log while `benchmarks.scale_prepare` looks at it.

    python -m benchmarks.scale_prepare_driver WAY SOURCE OUT SPILL [resume]

WAY is `one` for one process or `ray`. Its last line is JSON: the fingerprint, a checksum of the manifest, and
seconds until Ray was there and until the data set was.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.ray_tasks import run_tasks_on_ray
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.distributed.run import prepare_distributed
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.prepare.report import PrepareReport

OBJECT_STORE_BYTES = 512 << 20
"""As the command has it."""


def main(way: str, source: str, out: str, spill: str, *more: str) -> None:
    config = PrepareConfig(clean=True, split="time", overwrite=True)
    started_s = began_s = time.perf_counter()
    if way == "one":
        report = prepare(source, out, config)
    else:
        with ray_cluster(ClusterConfig(dashboard=False, object_store_bytes=OBJECT_STORE_BYTES), 1):
            began_s = time.perf_counter()
            report = prepare_distributed(
                source, out, config, run_tasks_on_ray, _show, resume="resume" in more, spill=Path(spill)
            )
    ended_s = time.perf_counter()
    print(
        json.dumps(
            {
                "fingerprint": report.manifest.fingerprint,
                "content": _content(report),
                "start_s": began_s - started_s,
                "prepare_s": ended_s - began_s,
            }
        )
    )


def _content(report: PrepareReport) -> str:
    described = report.manifest.model_dump(mode="json", exclude={"source"})
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _show(phase: str, done: int, total: int) -> None:
    print(f"{time.perf_counter():.1f} {phase} {done} {total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
