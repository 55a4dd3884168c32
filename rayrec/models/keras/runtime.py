"""Starts Keras and TensorFlow in a process that has PyTorch.

The order in which these are imported does not matter (see `rayrec.platform.import_order`). What does: Keras
chooses its backend once in a process, and TensorFlow its threads and the memory of an accelerator when it
first computes.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any, Literal

import torch

from rayrec.platform.devices import HOST, device_of
from rayrec.platform.errors import InputError
from rayrec.platform.import_order import load_triton_apart

logger = logging.getLogger(__name__)

Backend = Literal["tensorflow", "torch"]

QUIET = "2"
"""Of what TensorFlow says at start-up only errors are of use; whoever wants more has set another level."""


def load_keras(backend: Backend) -> Any:
    """The package `keras` on this backend.

    Raises:
        InputError: Keras is not installed, or runs on another backend already.
    """
    if importlib.util.find_spec("keras") is None:
        raise InputError(
            "the model is written in Keras, which is not installed; install the extra: "
            "pip install 'rayrec[tensorflow]'"
        )
    # Keras imports TensorFlow where there is one, on every backend.
    load_triton_apart()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
    if "keras" not in sys.modules:
        # The only way to tell Keras; an earlier value or its settings file may say otherwise.
        os.environ["KERAS_BACKEND"] = backend
    keras = importlib.import_module("keras")
    if (active := keras.backend.backend()) != backend:
        raise InputError(
            f"model.backend is {backend!r}, but Keras was imported on {active!r} in this process, and it has "
            f"one backend for all models; set KERAS_BACKEND={backend} before anything imports keras"
        )
    return keras


def load_tensorflow(num_threads: int, device: torch.device) -> Any:
    """The package `tensorflow`, with as many threads as PyTorch has and no more of the device than it needs.

    Threads and memory are set when it is first loaded in a process; later calls get what there is.

    Args:
        num_threads: of one operation. Operations run one after the other: those of a ranking model are either
            large or not worth another thread.
        device: where the models will run. On the CPU, TensorFlow does not see accelerators, whose memory it
            would take; on a GPU it takes memory as it needs it, since PyTorch has its share.

    Raises:
        InputError: TensorFlow is not installed, or has no such device.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise InputError(
            "the model runs on TensorFlow, which is not installed; install the extra: "
            "pip install 'rayrec[tensorflow]'"
        )
    load_triton_apart()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", QUIET)
    tensorflow = importlib.import_module("tensorflow")
    _limit_threads(tensorflow, num_threads)
    _limit_devices(tensorflow, device)
    return tensorflow


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


def _limit_devices(tensorflow: Any, device: torch.device) -> None:
    kind = device_of(device)
    config = tensorflow.config
    accelerators = [found for found in config.list_physical_devices() if found.device_type != "CPU"]
    if not kind.has_own_memory:
        if accelerators:
            config.set_visible_devices(config.list_physical_devices("CPU"))
        return
    # TensorFlow names its kinds of devices as Ray does.
    usable = [found for found in accelerators if found.device_type == kind.ray_resource]
    if not usable:
        raise InputError(
            f"device is {device.type!r}, and this TensorFlow has no device {kind.ray_resource!r}; install a "
            f"build that has (rayrec doctor says which), or set device to {HOST.kind!r}"
        )
    for found in usable:
        config.experimental.set_memory_growth(found, True)
