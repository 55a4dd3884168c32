"""What the project claims of itself in figures, and how each of them is measured."""

from benchmarks import beauty, spine
from benchmarks.harness import Bench

BENCHES: dict[str, Bench] = {
    "spine": spine.bench,
    "beauty-sasrec": beauty.sasrec,
    "beauty-generative": beauty.generative,
}
