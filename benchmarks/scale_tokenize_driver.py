"""The process that tokenizes a catalog, or loads it, while `benchmarks.scale_tokenize` looks at it.

    python -m benchmarks.scale_tokenize_driver prepare LOG DATA
    python -m benchmarks.scale_tokenize_driver one|ray DATA OUT [resume]
    python -m benchmarks.scale_tokenize_driver made|mapped IDS

Its last line is JSON: of the codes, and seconds until Ray was there and until they were; or the memory of its
own that the process takes for registry and trie.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.decoding.trie_file import TRIE_FILE, TrieFile
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.semantic_ids.large_catalog import CatalogSizes
from rayrec.pipelines.semantic_ids.tokenization import LargeCatalog, TokenizeConfig, tokenize
from rayrec.platform.cluster import ClusterConfig, ray_cluster
from rayrec.platform.ray_tasks import run_tasks_on_ray
from rayrec.platform.tasks import run_tasks_locally
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.distributed.run import prepare_distributed

OBJECT_STORE_BYTES = 512 << 20
"""As the command has it."""
OTHER_SIZES = CatalogSizes(
    blocks_per_task=5, piece_events=300_000, entries_of_part=1_000_000, parts_per_task=3
)


def main(way: str, *arguments: str) -> None:
    if way == "prepare":
        answer = _prepare(*arguments)
    elif way in ("one", "ray"):
        answer = _tokenize(way, *arguments)
    else:
        answer = _load(way, Path(*arguments))
    print(json.dumps(answer))


def _cluster() -> contextlib.AbstractContextManager[None]:
    return ray_cluster(ClusterConfig(dashboard=False, object_store_bytes=OBJECT_STORE_BYTES), 1)


def _prepare(source: str, out: str) -> dict[str, Any]:
    with _cluster():
        report = prepare_distributed(source, out, PrepareConfig(clean=True), run_tasks_on_ray)
    return {"fingerprint": report.manifest.fingerprint}


def _tokenize(way: str, data: str, out: str, *more: str) -> dict[str, Any]:
    started_s = time.perf_counter()
    stages: dict[str, float] = {}
    ended_s = started_s

    def show(stage: str, done: int, total: int) -> None:
        nonlocal ended_s
        now_s = time.perf_counter()
        stages[stage] = stages.get(stage, 0.0) + now_s - ended_s
        ended_s = now_s
        print(f"{now_s - started_s:.1f} {stage} {done} {total}", file=sys.stderr, flush=True)

    is_ray = way == "ray"
    with _cluster() if is_ray else contextlib.nullcontext():
        began_s = ended_s = time.perf_counter()
        large = LargeCatalog(
            run_tasks_on_ray if is_ray else run_tasks_locally,
            show,
            "resume" in more,
            sizes=CatalogSizes() if is_ray else OTHER_SIZES,
        )
        config = TokenizeConfig(large_catalog=1, codebook_size=256)
        report = tokenize(data, out, config, overwrite=True, large=large).report
        done_s = time.perf_counter()
    return {
        "version": report["version"],
        "start_s": round(began_s - started_s, 1),
        "tokenize_s": round(done_s - began_s, 1),
        "stages_s": {stage: round(seconds, 1) for stage, seconds in stages.items()},
        "collisions": report["collisions"],
        "reconstruction_error": report["reconstruction_error"],
        "next_items": report["next_items"],
    }


def _load(way: str, folder: Path) -> dict[str, Any]:
    before, started_s = _own_bytes(), time.process_time()
    registry = SemanticIdRegistry.load(folder)
    if way == "made":
        trie = CodeTrie.from_codes(registry.codes_IL)
    else:
        found = TrieFile(folder / TRIE_FILE, registry.version).load()
        assert found is not None, "tokenize writes the trie of a large catalog"
        trie = found
    processor_s = time.process_time() - started_s
    assert trie.num_items == registry.num_items
    return {"own_bytes": max(_own_bytes() - before, 1), "processor_s": processor_s}


def _own_bytes() -> int:
    """Memory that no other process shares."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.findall(r"^Anonymous: +(\d+) kB", text, re.MULTILINE)
    return 1024 * sum(map(int, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
