"""The Open Inference Protocol (KServe's V2, Triton's) beside `/v1/recommend`: lists as tensors.

    message ─► a codec ─► `InferenceCall` ─► a `RecommendRequest` per row ─► the batcher ─► outputs ─► message

The same over HTTP (`open_inference_routes`, `tensor_codec`) and over gRPC (`serve.rpc`).

    history         BYTES, INT64  [B, T]         item ids, oldest first; "" fills rows up, on the right
    history_length  INT32, INT64  [B]            items of each row, instead of filling up with ""
    user_id         BYTES, INT64  [B] or [B, 1]  "" is nobody
    timestamps      INT64         [B, T]         UNIX seconds, as filled up as the history
    candidates      BYTES, INT64  [B, C]         item ids to score, and no others; "" fills rows up

    item_id         BYTES         [B, K]         best first, then ""
    score           FP32          [B, K]         as in `/v1/recommend`, then the lowest finite number
    num_items       INT32         [B]            items found
    source          BYTES         [B]            "model", "neighbors", "merged", "popular" or "none"
    item_source     BYTES         [B, K]         what named each item, then ""

Either `history` or `user_id` is needed; all other inputs may be left out, and mean what they mean in
`/v1/recommend`: a history replaces the stored one, even where it is empty. Ids may be integers of 32 or 64
bits, too: 12 is the id "12", and rows of different lengths need `history_length`. Parameters of a request
are `k`, `exclude_seen`, `rank`, `filter`, `quotas`, `diversity`, `beams` and `beam_margin` from there; K is
`k`, however few items there are. Of Triton's parameters, `timeout` (microseconds) is as the header
`X-Request-Timeout-Ms`, and `priority` orders what waits for the model: 1 comes first, 0 and none are as 2.
Among equals, the earliest deadline goes first. What waits is not made late by others: they are refused
instead, as everywhere.

Where something was lowered of an answer, or the events of users could not be read, the parameter `degraded`
of the message says what, of all its rows together: names of `/v1/recommend` with commas between them. Where
there was a filter, or candidates, `allowed_items` and `unknown_filter_items` are parameters as well: a
number that all rows have, or a JSON array of what each of them has. Where there were quotas, diversity
or candidates, `control` is such an array.

Positions without an item have the lowest finite score, not an infinite one or NaN: JSON can write neither.

Axes: B rows (users) of a request, T events of the longest history, K items asked for.

The configuration of a model and its statistics are those of Triton's extensions of these names: each row
counts as a request, and what was refused before it was admitted is in the metrics alone.

A service may have several models (`web/models.py`): a message is answered by the one that it names, with the
limits, the batcher and the counts of that one.

Sources: github.com/kserve/open-inference-protocol, specification/protocol; Triton's extensions
`binary_tensor_data`, `model_configuration` and `statistics`, and of `model_repository` the index: models are
neither loaded nor unloaded by messages, so that one is not named in the server's metadata. Its other ones
(shared memory) are neither named nor there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rayrec import __version__
from rayrec.serve.admission.control import AdmissionControl
from rayrec.serve.admission.request_info import RequestInfo
from rayrec.serve.config.models import MODEL_NAME
from rayrec.serve.engine.batching import DEFAULT_PRIORITY
from rayrec.serve.engine.current import Service
from rayrec.serve.engine.inference_statistics import Lasted, Statistics
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.protocols.rows import answers_of_all
from rayrec.serve.protocols.tensor_codec import DTYPES, InferenceCall, NamedTensor
from rayrec.serve.wire.errors import RequestError, explain
from rayrec.serve.wire.request_body import LARGE_ITEMS, json_object, strict_json
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest, fields_of

IDS = ("BYTES", "INT64", "INT32", "UINT64", "UINT32")
INPUTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "history": (IDS, (-1, -1)),
    "history_length": (("INT32", "INT64"), (-1,)),
    "user_id": (IDS, (-1,)),
    "timestamps": (("INT64",), (-1, -1)),
    "candidates": (IDS, (-1, -1)),
}
"""Datatypes, the first of which the metadata name, and shape; -1 is any size."""
OUTPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "item_id": ("BYTES", (-1, -1)),
    "score": ("FP32", (-1, -1)),
    "num_items": ("INT32", (-1,)),
    "source": ("BYTES", (-1,)),
    "item_source": ("BYTES", (-1, -1)),
}
PARAMETERS = ("k", "exclude_seen", "rank", "filter", "quotas", "diversity", "beams", "beam_margin")
"""Parameters are texts, numbers and truth values: a filter, quotas and a list of beams are the JSON of those
of `/v1/recommend`."""

MESSAGE_PARAMETERS = ("timeout", "priority")
"""Of the message and not of its rows; see above."""
NO_SCORE = float(np.finfo(np.float32).min)
"""Score of a position without an item."""

EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")


@dataclass(frozen=True)
class Asked:
    """A call that was understood."""

    call: InferenceCall
    is_binary: dict[str, bool]
    """By wanted output, in the order of the answer."""
    requests: list[RecommendRequest]
    """Of its rows."""


@dataclass(frozen=True)
class Answered:
    """What comes of a call."""

    version: str
    parameters: dict[str, str | int]
    answers: list[RecommendAnswer]
    k: int

    @property
    def is_large(self) -> bool:
        """Whether to write it takes so long that others should not wait for it: positions without an item
        are written, too."""
        return len(self.answers) * self.k > LARGE_ITEMS

    def outputs(self, names: Sequence[str]) -> list[NamedTensor]:
        found = outputs_of(self.answers, self.k)
        return [found[name] for name in names]


class OpenInference:
    """Answers calls to one model, whichever way they come; on the event loop of the admission control."""

    def __init__(self, service: Service, admission: AdmissionControl, name: str = MODEL_NAME) -> None:
        self.name = name
        self.beside: Sequence[OpenInference] = ()
        """The other models of the service, where this is its first: what is asked of all is answered here."""
        self._service, self._admission = service, admission

    def server(self) -> dict[str, Any]:
        """The server's name and extensions."""
        return {"name": "rayrec", "version": __version__, "extensions": list(EXTENSIONS)}

    def named(self, name: str, version: str | None = None) -> RecommendationService | None:
        """The model that a message names by its version; None: it names none. Raises as `asked`."""
        found = self.asked(name, version)
        return None if version is None else found

    def asked(self, name: str, version: str | None = None) -> RecommendationService:
        """The model that is asked.

        Args:
            version: of a canary, too; None: the one that answers.

        Raises:
            RequestError: there is no such model or version (404).
        """
        if name != self.name:
            names = ", ".join(each.name for each in (self, *self.beside))
            here = f"those here are {names}" if self.beside else f"the one here is {names!r}"
            raise RequestError(f"there is no model {name!r}; {here}", 404)
        if version is None:
            return self._service.pinned
        if (found := self._service.version(version)) is None:
            own = self._service.pinned.model.label
            raise RequestError(f"there is no version {version!r} of {name!r}; the one here is {own!r}", 404)
        return found

    def metadata(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Names, datatypes and shapes of inputs and outputs; raises as `asked`."""
        return model_metadata(self.name, self.asked(name, version).model.label)

    def config(self, name: str, version: str | None = None) -> dict[str, Any]:
        """What Triton calls the configuration of a model; raises as `asked`."""
        self.asked(name, version)
        return model_config(self.name, self._admission.most_at_once)

    def statistics(self, name: str = "", version: str | None = None) -> dict[str, Any]:
        """What was computed since the service began, by whatever version; raises as `asked`.

        Args:
            name: of the model; empty: of all.
        """
        if not name:
            counted = [each.statistics(each.name) for each in (self, *self.beside)]
            return {"model_stats": [stats for one in counted for stats in one["model_stats"]]}
        label = self.asked(name, version).model.label
        return {"model_stats": [model_statistics(name, label, self._admission.statistics.read())]}

    def index(self) -> list[dict[str, str]]:
        """The models of the service: it answers once all are loaded."""
        return [
            {"name": each.name, "version": each.asked(each.name).model.label, "state": "READY", "reason": ""}
            for each in (self, *self.beside)
        ]

    def understood(self, call: InferenceCall) -> Asked:
        """What a call asks; its size says for how long this takes.

        Raises:
            RequestError: an input, output or parameter is none of the model's, or a row is no request.
        """
        return Asked(call, _wanted_outputs(call), rows_of(call, self._admission.most_at_once))

    async def answered(
        self, named: RecommendationService | None, asked: Asked, info: RequestInfo, request_id: str
    ) -> Answered:
        """Recommend to all rows; either all are answered or none.

        Args:
            named: of `named`.
            info: of the message; its parameters are added to it.

        Raises:
            RequestError: a row is refused.
            CallerLimitError, ServiceLimitError, TooManyWaitingError, DeadlineError: as `answers_of_all`.
        """
        parameters, requests = asked.call.parameters, asked.requests
        if (timeout_s := timeout_in(parameters)) is not None:
            info.expires_at = min(info.expires_at, info.began_at + timeout_s)
        info.priority = parameters.get("priority") or DEFAULT_PRIORITY
        pinned = named
        if pinned is None:
            pinned = self._admission.draw([request.user_id for request in requests], info)
        answers = await answers_of_all(self._admission, pinned, requests, info, _of_row, request_id)
        return Answered(pinned.model.label, _said_of(answers), answers, requests[0].k)


def _said_of(answers: Sequence[RecommendAnswer]) -> dict[str, str | int]:
    """Parameters of an answer."""
    said: dict[str, str | int] = {}
    if degraded := dict.fromkeys(name for answer in answers for name in answer.degraded):
        said["degraded"] = ",".join(degraded)
    first = answers[0]
    for name in ("allowed_items", "unknown_filter_items"):
        if getattr(first, name) is not None:
            # A filter is that of all rows; candidates are of each.
            of_rows = [getattr(answer, name) for answer in answers]
            said[name] = of_rows[0] if len(set(of_rows)) == 1 else json.dumps(of_rows)
    if first.control is not None:
        said["control"] = json.dumps([each.control and each.control.model_dump() for each in answers])
    return said


def model_config(model_name: str, max_rows: int) -> dict[str, Any]:
    """What Triton calls the configuration of a model: dimensions are those of one row, and an input with one
    value per row has none.

    Args:
        max_rows: of a message.
    """
    return {
        "name": model_name,
        "platform": "rayrec",
        "backend": "rayrec",
        "max_batch_size": max_rows,
        "input": [
            {
                "name": name,
                "data_type": _config_type(datatypes[0]),
                "dims": list(shape[1:]),
                "optional": True,
            }
            for name, (datatypes, shape) in INPUTS.items()
        ],
        "output": [
            {"name": name, "data_type": _config_type(datatype), "dims": list(shape[1:])}
            for name, (datatype, shape) in OUTPUTS.items()
        ],
        "dynamic_batching": {"default_priority_level": DEFAULT_PRIORITY},
    }


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def model_statistics(model_name: str, version: str, counted: Statistics) -> dict[str, Any]:
    """As Triton's extension writes them."""
    outcomes = {name: counted.outcomes.get(name, Lasted()) for name in ("success", "fail", "cache_hit")}
    parts = outcomes | {
        "queue": counted.waited,
        "compute_input": Lasted(),
        "compute_infer": counted.computed,
        "compute_output": Lasted(),
        "cache_miss": Lasted(),
    }
    return {
        "name": model_name,
        "version": version,
        "last_inference": int(counted.last_at * 1e3),
        "inference_count": counted.computed.count,
        "execution_count": counted.num_batches,
        "inference_stats": {name: _lasted(each) for name, each in parts.items()},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _lasted(Lasted()),
                "compute_infer": _lasted(each),
                "compute_output": _lasted(Lasted()),
            }
            for size, each in counted.batches.items()
        ],
    }


def _lasted(each: Lasted) -> dict[str, int]:
    return {"count": each.count, "ns": int(each.seconds * 1e9)}


def model_metadata(model_name: str, version: str) -> dict[str, Any]:
    """What the protocol calls the metadata of a model."""
    return {
        "name": model_name,
        "versions": [version],
        "platform": "rayrec",
        "inputs": [
            {"name": name, "datatype": datatypes[0], "shape": list(shape)}
            for name, (datatypes, shape) in INPUTS.items()
        ],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": list(shape)}
            for name, (datatype, shape) in OUTPUTS.items()
        ],
    }


def rows_of(call: InferenceCall, max_rows: int) -> list[RecommendRequest]:
    """A request for each row of the inputs.

    Raises:
        RequestError: an input or parameter is unknown or of another type or shape, or a row is no request;
            names it.
    """
    inputs = _checked_inputs(call.inputs)
    first = inputs.get("history", inputs.get("user_id"))
    if first is None:
        raise RequestError("inputs: neither history nor user_id is there; give one, or both")
    num_rows = first.shape[0]
    if not 1 <= num_rows <= max_rows:
        raise RequestError(f"{num_rows} rows in one request; send from 1 to {max_rows}")
    for name, values in inputs.items():
        if values.shape[0] != num_rows:
            raise RequestError(f"{name}: has {values.shape[0]} rows, where others have {num_rows}")
    for name in call.parameters:
        if name not in (*PARAMETERS, *MESSAGE_PARAMETERS):
            known = ", ".join((*PARAMETERS, *MESSAGE_PARAMETERS))
            raise RequestError(f"parameters: {name!r} is not known; known are {known}")
    parameters = {name: value for name, value in call.parameters.items() if name in PARAMETERS}
    for name, parse in (("filter", json_object), ("quotas", strict_json), ("beams", strict_json)):
        if isinstance(given := parameters.get(name), str):
            try:
                parameters[name] = parse(given.encode())
            except RequestError as error:
                raise RequestError(f"parameters: {name}: {error}") from error
    return [_row(row, inputs, parameters) for row in range(num_rows)]


def timeout_in(parameters: Mapping[str, Any]) -> float | None:
    """Seconds in which the answer is wanted, by Triton's parameter; None: it says nothing, as 0 does.

    Raises:
        RequestError: it, or the priority, is no whole number of at least 0.
    """
    for name in MESSAGE_PARAMETERS:
        value = parameters.get(name, 0)
        if type(value) is not int or value < 0:
            raise RequestError(f"parameters: {name}: expected a whole number of at least 0, got {value!r}")
    return parameters["timeout"] / 1e6 if parameters.get("timeout") else None


def outputs_of(answers: Sequence[RecommendAnswer], k: int) -> dict[str, NamedTensor]:
    """All outputs by name, of answers with up to k items."""
    shape = (len(answers), k)
    item_ids_BK: NDArray[Any] = np.full(shape, b"", dtype=object)
    sources_BK: NDArray[Any] = np.full(shape, b"", dtype=object)
    scores_BK = np.full(shape, NO_SCORE, dtype=np.float32)
    for row, answer in enumerate(answers):
        for position, item in enumerate(answer.items):
            item_ids_BK[row, position], scores_BK[row, position] = item.item_id.encode(), item.score
            sources_BK[row, position] = item.source.encode()
    arrays = {
        "item_id": item_ids_BK,
        "score": scores_BK,
        "num_items": np.array([len(answer.items) for answer in answers], dtype=np.int32),
        "source": np.array([answer.source.encode() for answer in answers], dtype=DTYPES["BYTES"]),
        "item_source": sources_BK,
    }
    return {name: NamedTensor(name, OUTPUTS[name][0], values) for name, values in arrays.items()}


def _of_row(row: int, sentence: str, status: int = 400) -> RequestError:
    return RequestError(f"row {row}: {sentence}", status)


def _wanted_outputs(call: InferenceCall) -> dict[str, bool]:
    """Whether each wanted output is binary, in the order of the answer."""
    if call.is_binary is None:
        return dict.fromkeys(OUTPUTS, call.binary_by_default)
    for name in call.is_binary:
        if name not in OUTPUTS:
            raise RequestError(f"outputs: there is no {name!r}; known are {', '.join(OUTPUTS)}")
    return call.is_binary


def _checked_inputs(inputs: Mapping[str, NamedTensor]) -> dict[str, NDArray[Any]]:
    """Values by name, of the datatypes and numbers of dimensions that they have to have."""
    checked = {}
    for name, tensor in inputs.items():
        if name not in INPUTS:
            raise RequestError(f"inputs: there is no {name!r}; known are {', '.join(INPUTS)}")
        datatypes, shape = INPUTS[name]
        if tensor.datatype not in datatypes:
            raise RequestError(f"{name}: is {tensor.datatype}; expected {' or '.join(datatypes)}")
        values = tensor.values
        if datatypes is IDS and tensor.datatype != "BYTES":
            values = np.array([str(each).encode() for each in values.ravel().tolist()], dtype=object).reshape(
                values.shape
            )
        if name == "user_id" and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != len(shape):
            raise RequestError(
                f"{name}: has the shape {list(values.shape)}; expected {len(shape)} dimension"
                f"{'s' * (len(shape) > 1)}, the first of rows"
            )
        checked[name] = values
    if "history" in checked:
        if "timestamps" in checked and checked["timestamps"].shape != checked["history"].shape:
            shapes = [list(checked[name].shape) for name in ("timestamps", "history")]
            raise RequestError(f"timestamps: have the shape {shapes[0]}, and the history {shapes[1]}")
    else:
        for name in ("history_length", "timestamps"):
            if name in checked:
                raise RequestError(f"{name}: is there without a history; give it, or leave this out")
    return checked


def _row(row: int, inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]) -> RecommendRequest:
    try:
        fields: dict[str, Any] = dict(parameters)
        if "history" in inputs:
            history_T = inputs["history"][row]
            length = _length(history_T, inputs["history_length"][row] if "history_length" in inputs else None)
            fields["history"] = [item.decode() for item in history_T[:length]]
            if "timestamps" in inputs:
                fields["timestamps"] = inputs["timestamps"][row, :length].tolist()
        if "candidates" in inputs:
            candidates_C = inputs["candidates"][row]
            fields["candidates"] = [item.decode() for item in candidates_C if item]
        if "user_id" in inputs and inputs["user_id"][row]:
            fields["user_id"] = inputs["user_id"][row].decode()
        return RecommendRequest(**fields)
    except UnicodeDecodeError as error:
        raise _of_row(row, "an id is not UTF-8; ids are texts") from error
    except RequestError as error:
        raise _of_row(row, str(error)) from error
    except ValidationError as error:
        raise _of_row(row, explain(error.errors(), fields_of(error.errors()))) from error


def _length(history_T: NDArray[Any], given: Any) -> int:
    """Items of a row."""
    is_item_T = np.array([len(item) > 0 for item in history_T], dtype=bool)
    if given is None:
        positions = np.flatnonzero(is_item_T)
        length = int(positions[-1]) + 1 if len(positions) else 0
    else:
        length = int(given)
        if not 0 <= length <= len(history_T):
            raise RequestError(f"history_length is {length}; expected from 0 to {len(history_T)}")
    if not is_item_T[:length].all():
        position = int(np.argmin(is_item_T[:length]))
        raise RequestError(f'history.{position} is "" and items follow; fill rows up on the right')
    return length
