"""Which shapes are ranked by compiled programs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from rayrec.models.compiled_ranking.buckets import geometric
from rayrec.platform.config import Config


class CompileConfig(Config):
    """Batches up to these sizes are padded to the next of few shapes, each of which has a program."""

    max_rows: int = Field(8, ge=1)
    """Requests of a batch; larger ones are ranked eagerly, for on a CPU little is saved there."""
    min_length: int = Field(32, ge=1)
    """Events of a row that the smallest shape holds."""
    max_length: int = Field(1024, ge=1)
    """Events of a row that the largest shape holds, those included that an answer only leaves out."""
    growth: int = Field(2, ge=2)
    """Each size is so many times the one before."""
    ks: tuple[int, ...] = ()
    """Numbers of items that requests ask for beside those that the service looks for by default: their shapes
    are there from the start, too, those of more items than the model has beams included."""
    most: int = Field(64, ge=1)
    """Programs that are ordered while a process lives; shapes beyond are ranked eagerly."""
    wait_s: float = Field(900.0, ge=0)
    """Readiness waits so long for the first programs; what is not there then comes while requests are
    answered. Recordings are all made before."""
    graphs: bool = False
    """Record the kernels of every shape when the service starts, and start them all at once from then on
    (CUDA graphs), instead of compiling. Of devices that have graphs; refused on others."""
    folder: str | None = None
    """Where packages are kept; None: `compiled` in the run's folder, or the user's cache where that cannot be
    written to."""

    @field_validator("ks")
    @classmethod
    def _are_numbers_of_items(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if any(k < 1 for k in ks):
            raise ValueError(f"compile.ks: numbers of items are at least 1, got {list(ks)}")
        return ks

    @property
    def row_counts(self) -> list[int]:
        return geometric(1, self.max_rows, self.growth)

    @property
    def lengths(self) -> list[int]:
        return geometric(min(self.min_length, self.max_length), self.max_length, self.growth)

    def folders(self, run: Path | None) -> list[Path]:
        """Where packages are looked for.

        Args:
            run: folder of the run, or of versions; None where it is not on this machine.
        """
        cache = Path.home() / ".cache" / "rayrec" / "compiled"
        if self.folder is not None:
            return [Path(self.folder)]
        return [cache] if run is None else [run / "compiled", cache]
