"""What the project claims of itself in figures, and how each of them is measured."""

from benchmarks import (
    attention,
    ctr,
    decode,
    dense_optimizer,
    disk_stores,
    index,
    pipeline,
    quality,
    samples,
    scaling,
    serve,
    serve_proxy,
    snapshot,
    sparse,
    spine,
    stores,
    tiers,
    transport,
)
from benchmarks.harness import Bench

BENCHES: dict[str, Bench] = {
    "attention": attention.bench,
    "ctr": ctr.bench,
    "decode": decode.bench,
    "dense-optimizer": dense_optimizer.bench,
    "disk-stores": disk_stores.bench,
    "index": index.bench,
    "pipeline": pipeline.bench,
    "samples": samples.bench,
    "scaling": scaling.bench,
    "serve": serve.bench,
    "serve-proxy": serve_proxy.bench,
    "spine": spine.bench,
    "snapshot": snapshot.bench,
    "sparse": sparse.bench,
    "stores": stores.bench,
    "transport": transport.bench,
    "tiers": tiers.bench,
    **{name: quality.quality_bench(name) for name in quality.CONFIGS},
}
