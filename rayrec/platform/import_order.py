"""Importing TensorFlow and Triton into one process, in either order.

Each contains its own LLVM, and TensorFlow exports its symbols to the whole process. Triton, imported after
it, binds to those symbols instead of its own and crashes with a segmentation fault; and PyTorch imports
Triton in unexpected places, for example to count FLOPs. Imported before TensorFlow, or with RTLD_DEEPBIND,
it works.

This module imports neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys


def load_triton_apart() -> None:
    """Import Triton, if it is installed, so that TensorFlow may be there already or may come later."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is None:
        return
    if not hasattr(os, "RTLD_DEEPBIND"):  # not Linux: libraries keep to themselves
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("triton")
    finally:
        sys.setdlopenflags(flags)
