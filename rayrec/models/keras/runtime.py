"""Starts Keras and TensorFlow in a process that has PyTorch.

The order in which these are imported does not matter (see `rayrec.platform.import_order`). What does: Keras
chooses its backend once in a process, and TensorFlow its threads and devices when it first computes.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any, Literal

from rayrec.platform.devices import HOST, Device
from rayrec.platform.errors import InputError
from rayrec.platform.frameworks import FRAMEWORKS, why_it_fails, why_too_old
from rayrec.platform.import_order import load_triton_apart

logger = logging.getLogger(__name__)

Backend = Literal["tensorflow", "torch"]

QUIET = "2"
"""Of what TensorFlow says at start-up only errors are of use; users who want more set another level."""


def check_device(device: Device) -> None:
    """Refuse devices that Keras models do not run on.

    Raises:
        InputError: no model of Keras has ever run on such a device.
    """
    # Not known there: whether both frameworks share a device's memory and wait for each other's streams, and
    # whether what Keras does not train, which is no parameter of PyTorch's, comes along.
    if device.has_own_memory:
        raise InputError(
            f"device is {device.kind!r}, and Keras models have been run on the CPU alone so far; set device "
            f"to {HOST.kind!r}, or take a ranking model of PyTorch"
        )


def load_keras(backend: Backend) -> Any:
    """The package `keras` on this backend.

    Raises:
        InputError: Keras is not installed or does not fit, or runs on another backend already.
    """
    if "keras" not in sys.modules:
        # The only way to tell Keras; an earlier value or its settings file may say otherwise.
        os.environ["KERAS_BACKEND"] = backend
    keras = _imported("keras", "Keras")
    if (reason := why_too_old("Keras", keras.__version__)) is not None:
        raise InputError(f"the model is written in Keras: {reason}")
    if (active := keras.backend.backend()) != backend:
        raise InputError(
            f"model.backend is {backend!r}, but Keras was imported on {active!r} in this process, and it has "
            f"one backend for all models; set KERAS_BACKEND={backend} before anything imports keras"
        )
    return keras


def load_tensorflow(num_threads: int) -> Any:
    """The package `tensorflow`, with as many threads as PyTorch has, and on the CPU alone.

    Threads and devices are set when it is first loaded in a process; later calls get what there is.

    Args:
        num_threads: of one operation. Operations run one after the other: those of a ranking model are either
            large or not worth another thread.

    Raises:
        InputError: TensorFlow is not installed or does not fit, or has an accelerator in use.
    """
    tensorflow = _imported("tensorflow", "TensorFlow")
    _limit_threads(tensorflow, num_threads)
    hide_accelerators(tensorflow)
    return tensorflow


def _imported(package: str, name: str) -> Any:
    # Keras imports TensorFlow where there is one, on every backend.
    load_triton_apart()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
    try:
        return importlib.import_module(package)
    # Whatever it is: of another NumPy an ImportError, of another protobuf a TypeError, of Keras 2 either.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise InputError(
                f"the model needs {name}, which is not installed; install the extra: "
                f"pip install '{FRAMEWORKS[name].requirement}'"
            ) from error
        message = " ".join(str(error).split())
        raise InputError(
            f"the model needs {name}: {why_it_fails(name, f'{type(error).__name__}: {message}')}"
        ) from error


def _limit_threads(tensorflow: Any, num_threads: int) -> None:
    threading = tensorflow.config.threading
    wanted = (num_threads, 1)
    try:
        threading.set_intra_op_parallelism_threads(num_threads)
        threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:  # it has computed already
        has = (threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads())
        if has != wanted:
            logger.warning(
                "TensorFlow computes with %d threads for an operation and %d operations at once (0: as many "
                "as there are cores) instead of %d and 1: something in this process has used it before",
                *has,
                num_threads,
            )


def hide_accelerators(tensorflow: Any) -> None:
    """TensorFlow would take all of their memory, and compute there with what lies in the host's.

    Raises:
        InputError: it has computed in this process, and sees one.
    """
    hosts = tensorflow.config.list_physical_devices(HOST.ray_resource)  # both name kinds of devices alike
    try:
        tensorflow.config.set_visible_devices(hosts)
    except RuntimeError as error:
        raise InputError(
            "TensorFlow computes on an accelerator in this process already, and Keras models run on the CPU; "
            "call tensorflow.config.set_visible_devices with the CPU before anything else uses TensorFlow"
        ) from error
