"""Tensors to bytes and back, and that whatever comes is a tensor or a sentence."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rayrec.serve.protocols.tensor_codec import (
    DTYPES,
    NamedTensor,
    decode_binary,
    decode_json,
    encode_binary,
    encode_json,
    read_call,
    write_answer,
)
from rayrec.serve.wire.errors import RequestError
from tests.helpers.examples import examples

TEXTS = st.binary(max_size=6) | st.sampled_from([b" a\n", b"\0", b"\x01\0\0\0"])
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw, texts=TEXTS, allow_nan=True):
    datatype = draw(st.sampled_from(sorted(DTYPES)))
    if datatype == "BYTES":
        shape = draw(SHAPES)
        values = np.empty(int(np.prod(shape, dtype=int)), dtype=object)
        values[:] = [draw(texts) for _ in range(values.size)]
        return datatype, values.reshape(shape)
    elements = {"allow_nan": allow_nan, "allow_infinity": allow_nan} if datatype.startswith("FP") else None
    return datatype, draw(arrays.arrays(DTYPES[datatype], SHAPES, elements=elements))


def same(left, right):
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f")


@given(tensors())
def test_binary_data_comes_back(tensor):
    datatype, values = tensor
    same(decode_binary(datatype, values.shape, encode_binary(datatype, values)), values)


@given(tensors(texts=st.text(max_size=6).map(str.encode), allow_nan=False))
def test_json_comes_back_flat_and_nested(tensor):
    datatype, values = tensor
    if datatype == "FP16":
        with pytest.raises(RequestError, match="FP16 has no form in JSON"):
            decode_json(datatype, values.shape, encode_json(datatype, values))
        return
    flat = json.loads(json.dumps(encode_json(datatype, values)))
    same(decode_json(datatype, values.shape, flat), values)
    if values.ndim and values.size:
        nested = values.tolist()
        if datatype == "BYTES":
            nested = np.vectorize(bytes.decode, otypes=[object])(values).tolist()
        same(decode_json(datatype, values.shape, json.loads(json.dumps(nested))), values)


def test_bytes_are_those_of_the_protocol():
    texts = np.array([b"ab", b""], dtype=object)
    assert encode_binary("BYTES", texts) == b"\x02\0\0\0ab\0\0\0\0"
    assert encode_binary("INT32", np.array([1, -2])) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert encode_binary("BOOL", np.array([True, False])) == b"\x01\0"
    assert encode_binary("FP16", np.array([1.0])) == b"\0\x3c"


@st.composite
def calls(draw):
    """A request of several inputs, each in JSON or binary, and what it is of."""
    inputs, tail, wanted = [], b"", {}
    for place, (datatype, values) in enumerate(draw(st.lists(tensors(allow_nan=False), max_size=4))):
        described = {"name": f"t{place}", "datatype": datatype, "shape": list(values.shape)}
        content = encode_binary(datatype, values)
        is_text = datatype == "BYTES" and any(not _is_utf8(text) for text in values.flat)
        if datatype == "FP16" or is_text or draw(st.booleans()):
            described["parameters"] = {"binary_data_size": len(content)}
            tail += content
        else:
            described["data"] = encode_json(datatype, values)
        inputs.append(described)
        wanted[f"t{place}"] = values
    return json.dumps({"inputs": inputs}).encode(), tail, wanted


def _is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(calls())
def test_a_message_is_read_as_it_was_written(call):
    head, tail, wanted = call
    inputs = read_call(head + tail, str(len(head)), "m").inputs
    assert list(inputs) == list(wanted)
    for name, values in wanted.items():
        same(inputs[name].values, values)


def test_an_answer_is_read_by_who_knows_the_protocol():
    outputs = [
        NamedTensor("a", "INT32", np.array([[1, 2]], dtype=np.int32)),
        NamedTensor("b", "BYTES", np.array([b"x"], dtype=object)),
    ]
    body, length = write_answer({"id": "7"}, outputs, {"a": False, "b": True})
    assert json.loads(body[:length]) == {
        "id": "7",
        "outputs": [
            {"name": "a", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
            {"name": "b", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
        ],
    }
    assert body[length:] == b"\x01\0\0\0x"
    assert write_answer({}, outputs[:1], {"a": False})[1] is None


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3), st.binary(max_size=40))
def test_random_bytes_are_a_tensor_or_a_sentence(datatype, shape, content):
    try:
        values = decode_binary(datatype, shape, content)
    except RequestError:
        return
    assert encode_binary(datatype, values) == content


KEYS = st.sampled_from(
    ["name", "datatype", "shape", "data", "parameters", "binary_data_size", "inputs", "outputs", "id"]
)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([*DTYPES, "history", "\ud800", 2**62, -1])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), some, max_size=4),
    max_leaves=12,
)
INPUTS = st.fixed_dictionaries(
    {"name": st.text(max_size=2) | VALUES, "datatype": st.sampled_from(sorted(DTYPES)) | VALUES},
    optional={
        "shape": st.lists(st.integers(-1, 3) | st.just(2**62), max_size=3) | VALUES,
        "data": st.lists(VALUES, max_size=4) | VALUES,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 9) | VALUES}),
    },
)
MESSAGES = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=3) | VALUES},
    optional={"outputs": VALUES, "parameters": VALUES, "id": VALUES},
)


@examples(300)
@given(
    message=MESSAGES | VALUES, tail=st.binary(max_size=12), length=st.none() | st.integers(-1, 60) | st.text()
)
def test_whatever_message_comes_it_is_read_or_refused(message, tail, length):
    head = json.dumps(message).encode()
    for header in (str(len(head)), None if length is None else str(length)):
        try:
            read_call(head + tail, header, "m")
        except RequestError:
            continue


@given(st.binary(max_size=60), st.none() | st.integers(0, 60).map(str))
def test_random_bodies_are_refused(body, header):
    with pytest.raises(RequestError):
        read_call(body, header, "m")


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({"shape": [2**40, 2**40]}, "is none; expected up to 8 sizes from 0 to 2147483647"),
        ({"shape": [2**31 - 1, 2**31 - 1, 0]}, "more elements than a request can bring"),
        ({"shape": [-1]}, "is none; expected"),
        ({"shape": [True]}, "is none; expected"),
        ({"shape": [3]}, "2 elements for the shape \\[3\\]; expected 3"),
        ({"data": [[1, 2]]}, "nested, and not as the shape \\[2\\] is"),
        ({"data": [1, 2**31]}, "2147483648 is no element of INT32"),
        ({"data": [1, True]}, "true is no element of INT32"),
        ({"datatype": "FP32", "data": [1, 1e39]}, "1e\\+39 is no element of FP32"),
        ({"datatype": "BYTES", "data": ["a", 1]}, "1 is no element of BYTES"),
        ({"datatype": "BYTES", "data": ["a", "\ud800"]}, "expected text that UTF-8 can encode"),
        ({"datatype": "BF16"}, 'there is no datatype "BF16" here'),
        ({"parameters": {"shared_memory_region": "r"}}, '"shared_memory_region" is not known here'),
        ({"parameters": {"binary_data_size": 8}}, "has both data and a binary_data_size"),
        ({"data": None}, "data: expected an array"),
    ],
)
def test_what_is_wrong_with_an_input_is_said(described, sentence):
    good = {"name": "t", "datatype": "INT32", "shape": [2], "data": [1, 2]}
    body = json.dumps({"inputs": [{**good, **described}]}).encode()
    with pytest.raises(RequestError, match=f"^t.*: .*{sentence}"):
        read_call(body, None, "m")


@pytest.mark.parametrize(
    ("size", "tail", "header", "sentence"),
    [
        (8, b"\0" * 7, True, "binary_data_size is 8, and 7 bytes are left"),
        (8, b"\0" * 9, True, "9 bytes follow the JSON object, and the inputs take 8"),
        (7, b"\0" * 7, True, "7 bytes for 2 elements of INT32; expected 8"),
        (-1, b"", True, "binary_data_size is -1"),
        (8, b"", None, "binary data needs the header Inference-Header-Content-Length"),
        (8, b"", "1e3", "is '1e3'; expected a number up to"),
        (8, b"", "999999", "is '999999'; expected a number up to"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(size, tail, header, sentence):
    described = {"name": "t", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [described]}).encode()
    with pytest.raises(RequestError, match=sentence):
        read_call(head + tail, str(len(head)) if header is True else header, "m")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"inputs": [], "inputs": []}', "'inputs' stands in one object twice"),
        (b'{"inputs": [NaN]}', "NaN is no number of JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"inputs": [], "mode": 1}', '"mode" is not known here'),
        (b'{"inputs": [], "outputs": [{"name": "a"}, {"name": "a"}]}', "'a' stands there twice"),
        (b"[" * 10_000, "not valid JSON"),
        (b"[" * 100_000, "the body has more than 20000 arrays and objects"),
    ],
)
def test_messages_that_are_none_are_refused(body, sentence):
    with pytest.raises(RequestError, match=sentence):
        read_call(body, None, "m")


def test_texts_that_end_behind_the_data_are_refused():
    for content, sentence in (
        (b"\xff\xff\xff\xffab", "ends at byte 4294967299, and there are 6 bytes"),
        (b"\x01\0\0\0ab", "1 bytes follow the 1 elements"),
        (b"\0\0\0", "too few"),
    ):
        with pytest.raises(RequestError, match=sentence):
            decode_binary("BYTES", (1,), content)
