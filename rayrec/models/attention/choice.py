"""Who computes an attention: a fixed rule, a measurement that is kept, or a name.

A run's bits must not depend on a stopwatch, so measuring is not the default:

* `auto` goes by a fixed rule of device, scoring, mask and lengths. Where a file of recorded choices is
  given, what it says comes first.
* `measured` times every backend that can compute a call, once for each class of calls, and goes by that
  from then on. With a file, a choice is written there before it is used for the first time; kept with a
  run, it makes the resumed run, or another one that is given a copy, go the same way.
* the name of a backend demands it, and a call it cannot compute is refused.

A class of calls is a device, a torch, a dtype and powers of two of the sizes (`shape_class`).
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rayrec.models.attention import ascend, bucketed, flex, grouped, reference, sdpa, triton_backend
from rayrec.models.attention.call import AttentionCall, Backend, Softmax
from rayrec.models.attention.masks import Causal
from rayrec.models.base.shape_classes import power_of_two
from rayrec.platform.devices import device_of, hardware_name, synchronize
from rayrec.platform.files import written_whole

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        reference.BACKEND,
        sdpa.BACKEND,
        flex.BACKEND,
        bucketed.BACKEND,
        grouped.BACKEND,
        triton_backend.BACKEND,
        ascend.BACKEND,
    )
}
PADDED_LONGEST = 50
"""On a CPU, softmax attention that is not a history's to itself is padded over rows up to this length."""
PADDED_WASTE = 1.75
"""The same where padding does not make more than this many pairs out of one: the padded kernel is faster."""

ROUNDS = 5
"""Measurements of each backend that count."""

Clock = Callable[[], float]


class Choice(Protocol):
    def __call__(self, call: AttentionCall) -> Backend:
        """Choose the backend that computes a call.

        Raises:
            ValueError: a backend was demanded that cannot compute the call.
        """
        ...


class Named:
    """Always the one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, call: AttentionCall) -> Backend:
        if (reason := self._backend.why_not(call)) is not None:
            raise ValueError(
                f"attention backend {self._backend.name!r} cannot compute this call: {reason}; "
                "choose 'auto', or another backend"
            )
        return self._backend


class Auto:
    """The rule, after what a file has recorded.

    Raises:
        ValueError: the file is not one of recorded choices.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._recorded = {} if path is None else _read(path)

    def __call__(self, call: AttentionCall) -> Backend:
        if self._recorded and (name := self._recorded.get(shape_class(call))) is not None:
            return Named(BACKENDS[name])(call)
        return by_rule(call)


class Measured:
    """The fastest when a class of calls was first met. One that fails meanwhile, for want of memory say, is
    not taken for that class.

    Args:
        path: where choices are read from and written to; None keeps them in the process.
        backends: those that may be chosen. The reference is not among them: it is what to compute, and is
            taken only where nothing else can.
        clock: seconds.

    Raises:
        ValueError: the file is not one of recorded choices.
    """

    def __init__(
        self,
        path: Path | None = None,
        backends: Iterable[Backend] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._path = path
        self._recorded = {} if path is None else _read(path)
        self._backends = tuple(
            (b for b in BACKENDS.values() if b.name != "reference") if backends is None else backends
        )
        self._clock = clock

    def __call__(self, call: AttentionCall) -> Backend:
        key = shape_class(call)
        if key not in self._recorded:
            self._recorded[key] = self._fastest(call).name
            if self._path is not None:
                _write(self._path, self._recorded)
        backend = next((b for b in self._backends if b.name == self._recorded[key]), None)
        return Named(backend or BACKENDS[self._recorded[key]])(call)

    def _fastest(self, call: AttentionCall) -> Backend:
        able = [backend for backend in self._backends if backend.why_not(call) is None]
        if len(able) < 2:
            return able[0] if able else by_rule(call)
        times: dict[str, list[float]] = {backend.name: [] for backend in able}
        failure: RuntimeError | None = None
        # In turns, and the shortest of each: what else the machine does meets all of them alike.
        for _ in range(1 + ROUNDS):
            for backend in tuple(able):
                try:
                    times[backend.name].append(seconds(backend, call, self._clock))
                except RuntimeError as error:
                    logger.warning("attention backend %r is not taken: %s", backend.name, error)
                    # Its frames hold what it had computed, which is memory that the others need.
                    traceback.clear_frames(error.__traceback__)
                    able.remove(backend)
                    failure = error
        if not able:
            assert failure is not None
            raise failure
        return min(able, key=lambda backend: min(times[backend.name][1:]))  # the first was to warm up


AUTO = Auto()


def choice_named(name: str, path: Path | None = None) -> Choice:
    """What a config's `attention` says: `auto`, `measured`, or the name of a backend.

    Args:
        path: JSON file of recorded choices, for the first two; need not exist yet.

    Raises:
        ValueError: there is no such backend.
    """
    if name == "auto":
        return Auto(path)
    if name == "measured":
        return Measured(path)
    if name not in BACKENDS:
        raise ValueError(
            f"attention must be 'auto', 'measured' or one of {', '.join(BACKENDS)}; got {name!r}"
        )
    return Named(BACKENDS[name])


def by_rule(call: AttentionCall) -> Backend:
    """What is taken without a measurement; depends on nothing but the call."""
    names = device_of(call.query_NHC.device).attention_backends
    is_little_padded = {"bucketed": _is_even, "triton": _is_one_row}.get(names[0])
    if (
        is_little_padded
        and isinstance(call.scoring, Softmax)
        and call.bias is None
        and is_little_padded(call)
    ):
        names = ("sdpa", *names)
    for name in names:
        if BACKENDS[name].why_not(call) is None:
            return BACKENDS[name]
    raise ValueError(
        "no attention backend can compute this call: "
        + "; ".join(f"{name}: {BACKENDS[name].why_not(call)}" for name in names)
    )


def shape_class(call: AttentionCall) -> str:
    """Calls of one class are computed by one backend: which is fastest should not differ within it."""
    query, queries, keys = call.query_NHC, call.queries, call.keys
    scoring = type(call.scoring).__name__
    parts: list[tuple[str, Any]] = [
        ("torch", torch.__version__),
        ("device", hardware_name(query.device)),
        ("dtype", str(query.dtype).removeprefix("torch.")),
        ("scoring", scoring),
        ("mask", call.mask.kind),
        ("bias", call.bias.kind if call.bias is not None else "none"),
        ("gradients", call.needs_gradients),
        ("rows", power_of_two(queries.num_rows)),
        ("queries", _sizes(queries.longest, queries.num_tokens, queries.num_rows)),
        ("keys", "same" if call.is_self else _sizes(keys.longest, keys.num_tokens, keys.num_rows)),
        ("heads", query.shape[1]),
        ("width", f"{query.shape[2]}/{call.value_MHE.shape[2]}"),
    ]
    return " ".join(f"{name}={value}" for name, value in parts)


def seconds(backend: Backend, call: AttentionCall, clock: Clock) -> float:
    """Time of the call, with its gradients where it needs them."""
    tensors = [tensor.detach() for tensor in call.inputs]
    if call.needs_gradients:
        tensors = [
            tensor.requires_grad_(before.requires_grad)
            for tensor, before in zip(tensors, call.inputs, strict=True)
        ]
    copy = call.with_inputs(tensors)
    synchronize(call.query_NHC.device)
    started = clock()
    out_NHE = backend.attend(copy)
    if call.needs_gradients:
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        torch.autograd.grad(out_NHE, wanted, torch.ones_like(out_NHE))
    synchronize(call.query_NHC.device)
    return clock() - started


def _is_one_row(call: AttentionCall) -> bool:
    """A history alone, or rows of one length for the host: nothing is padded any more, and PyTorch's fused
    kernels are made for that."""
    is_rectangle = call.queries.num_rows == 1 or call.queries.is_padded
    return is_rectangle and call.is_self and isinstance(call.mask, Causal)


def _is_even(call: AttentionCall) -> bool:
    """Whether padding the rows costs little."""
    queries, keys = call.queries, call.keys
    if bucketed.why_not(call) is None:
        return bool((queries.lengths_B == queries.longest).all())
    if max(queries.longest, keys.longest) <= PADDED_LONGEST:
        return True
    padded_pairs = queries.num_rows * queries.longest * keys.longest
    return padded_pairs <= PADDED_WASTE * float(np.dot(queries.lengths_B, keys.lengths_B))


def _sizes(longest: int, num_tokens: int, num_rows: int) -> str:
    return f"{power_of_two(longest)}/{power_of_two(num_tokens // max(num_rows, 1))}"


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        recorded = json.loads(path.read_text())["backends"]
        unknown = set(recorded.values()) - set(BACKENDS)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold recorded attention backends: {error!r}") from error
    if unknown:
        raise ValueError(f"{path} names attention backends that there are none of: {sorted(unknown)}")
    return dict(recorded)


def _write(path: Path, recorded: dict[str, str]) -> None:
    """In one go, so that a run that dies meanwhile leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps({"backends": dict(sorted(recorded.items()))}, indent=2) + "\n")
