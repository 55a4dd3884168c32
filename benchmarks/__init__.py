"""What the project claims of itself in figures, and how each of them is measured."""

from benchmarks import quality, sparse, spine
from benchmarks.harness import Bench

BENCHES: dict[str, Bench] = {
    "spine": spine.bench,
    "sparse": sparse.bench,
    **{name: quality.quality_bench(name) for name in quality.CONFIGS},
}
