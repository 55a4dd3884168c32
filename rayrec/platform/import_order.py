"""TensorFlow and Triton in one process, whichever comes first.

Both bring an LLVM of their own, and TensorFlow makes its symbols everybody's. Triton, loaded behind it, takes
those instead of its own and ends the process with a segmentation fault, in its very import; and PyTorch
imports it where nobody would think of it, to count FLOPs. Loaded before TensorFlow, or told to prefer its own
symbols, it is fine.

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
