"""What has ended a training: the settings of its trial, or the machine that it ran on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rayrec.models.program.program import DivergedError
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.errors import InputError, MachineError, NoRoomError, UnavailableError
from rayrec.platform.files import no_room

Fault = Literal["settings", "machine", "unknown"]


def fault_of(cause: BaseException, config: RunConfig) -> Fault:
    """Whose fault the end of a training is.

    `settings`: they diverge, take too much memory or are refused. `machine`: a disk, a mount, a device or a
    cluster is away or too small, which says nothing about settings. `unknown`: all else, such as an actor
    that died or an error of a library.
    """
    if isinstance(cause, DivergedError) or _is_out_of_memory(cause):
        return "settings"
    if isinstance(cause, MachineError | NoRoomError | UnavailableError) or no_room(cause) is not None:
        return "machine"
    if _comes_from_system(cause) or not _data_are_there(config):
        return "machine"
    return "settings" if isinstance(cause, InputError) else "unknown"


def _is_out_of_memory(cause: BaseException) -> bool:
    """Torch has a class for devices alone, and Ray one of the same name."""
    if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
        return True
    said = str(cause)
    return isinstance(cause, RuntimeError) and any(words in said for words in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def _comes_from_system(cause: BaseException) -> bool:
    """Whether it is an error of the operating system, or a sentence that was made of one."""
    each: BaseException | None = cause
    while each is not None:
        if isinstance(each, OSError):
            return True
        each = each.__cause__
    return False


def _data_are_there(config: RunConfig) -> bool:
    """A search begins only where they are, so that folders that are missing have gone since."""
    data = config.data
    paths = (data.path, data.semantic_ids, data.samples)
    return all(path is None or "://" in path or Path(path).exists() for path in paths)
