"""Errors that crossed processes, back in the form in which they were raised."""

from __future__ import annotations

from ray.exceptions import RayError, RayTaskError


def root_cause(error: BaseException) -> BaseException:
    """The exception behind Ray's wrappers, however many actors it passed through."""
    while isinstance(error, RayTaskError) and error.cause is not None and error.cause is not error:
        error = error.cause
    return error


__all__ = ["RayError", "RayTaskError", "root_cause"]
