"""The Open Inference Protocol over gRPC, spoken by Triton's own client."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time

import grpc
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
    service_pb2,
    service_pb2_grpc,
)
from tritonclient.utils import InferenceServerException

from rayrec.platform.errors import UnavailableError
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.protocols.open_inference import OUTPUTS
from rayrec.serve.rpc.calls import Call, address_of_peer, is_loopback
from rayrec.serve.rpc.service import METHODS, RpcService
from rayrec.serve.wire.request_body import MAX_BODY_BYTES
from tests.helpers.examples import examples
from tests.serve.certificates import make_certificate
from tests.serve.fake_recommender import FakeRecommender, HeldService, api_of
from tests.serve.rpc.answering import answering

TOKEN = "s3cret-of-enough-letters"


@pytest.fixture(scope="module")
def recommender():
    return FakeRecommender()


@pytest.fixture(scope="module")
def addresses(recommender):
    with answering(api_of(RecommendationService(recommender, max_k=50), max_waiting=8)) as addresses:
        yield addresses


@pytest.fixture
def triton(addresses):
    with InferenceServerClient(addresses.grpc) as client:
        yield client


@pytest.fixture
def stub(addresses):
    with grpc.insecure_channel(addresses.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(name, values, datatype="BYTES"):
    values = np.array(values, dtype=object if datatype == "BYTES" else np.dtype(datatype.lower()))
    given = InferInput(name, list(values.shape), datatype)
    given.set_data_from_numpy(values)
    return given


def request_of(*inputs, model="recommend", raw=(), **parameters):
    """A message with typed contents, as a client of KServe sends it.

    Args:
        inputs: (name, datatype, shape, field of contents, elements).
    """
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=raw)
    for name, datatype, shape, field, elements in inputs:
        added = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if field:
            getattr(added.contents, field).extend(elements)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


ANN = ("user_id", "BYTES", [1], "bytes_contents", [b"ann"])


def refused(call, *args, **more):
    """Status and sentence."""
    with pytest.raises((grpc.RpcError, InferenceServerException)) as caught:
        call(*args, **more)
    error = caught.value
    if isinstance(error, InferenceServerException):
        return error.status().removeprefix("StatusCode."), error.message()
    return error.code().name, error.details()


def test_a_client_finds_what_it_asks_for(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("recommend")
    assert triton.is_model_ready("recommend", "100")
    assert not triton.is_model_ready("other")
    assert not triton.is_model_ready("recommend", "7")
    assert triton.get_server_metadata().name == "rayrec"
    model = triton.get_model_metadata("recommend", "100")
    assert (model.name, list(model.versions)) == ("recommend", ["100"])
    assert list(model.outputs[0].shape) == [-1, -1]
    assert [each.name for each in model.outputs] == list(OUTPUTS)


def test_configuration_and_statistics_are_those_of_http(triton, addresses):
    triton.infer("recommend", [tensor("user_id", ["ann", "42"])])
    with httpx.Client(base_url=f"http://{addresses.http}/v2/models", trust_env=False) as http:
        config = triton.get_model_config("recommend", as_json=True)["config"]
        by_http = http.get("/recommend/config").json()
        assert [each["name"] for each in config["input"]] == [each["name"] for each in by_http["input"]]
        assert config["max_batch_size"] == by_http["max_batch_size"] == 8
        assert config["input"][0]["data_type"] == by_http["input"][0]["data_type"] == "TYPE_STRING"
        (counted,) = http.get("/recommend/stats").json()["model_stats"]
        (of_all,) = http.get("/stats").json()["model_stats"]
        assert http.get("/other/stats").status_code == 404
    (statistics,) = triton.get_inference_statistics("recommend").model_stats
    assert (statistics.name, statistics.version) == ("recommend", "100")
    assert statistics.inference_count == counted["inference_count"] == of_all["inference_count"] >= 2
    assert statistics.inference_stats.success.count == counted["inference_stats"]["success"]["count"]
    assert statistics.inference_stats.compute_infer.ns > 0
    assert sum(each.compute_infer.count for each in statistics.batch_stats) == statistics.execution_count
    assert time.time() * 1e3 - statistics.last_inference < 60_000


def test_rows_are_answered_as_over_http(triton, recommender):
    recommender.asked.clear()
    names = ("item_id", "score", "num_items", "source")
    answer = triton.infer(
        "recommend",
        [
            tensor("history", [["alien", "7"], ["brazil", ""]]),
            tensor("user_id", [["ann"], [""]]),
            tensor("timestamps", [[5, 6], [7, 0]], "INT64"),
        ],
        request_id="r1",
        parameters={"k": 2, "exclude_seen": False},
        outputs=[InferRequestedOutput(name) for name in names],
    )
    assert recommender.asked == [([11, 12], 0, 2, False), ([13], None, 2, False)]
    assert answer.as_numpy("item_id").tolist() == [[b"m0", b"m1"]] * 2
    assert answer.as_numpy("score").tolist() == [[-0.5, -1.5]] * 2
    assert answer.as_numpy("num_items").tolist() == [2, 2]
    assert answer.as_numpy("source").tolist() == [b"model", b"model"]
    head = answer.get_response()
    assert (head.model_name, head.model_version, head.id) == ("recommend", "100", "r1")


def test_typed_contents_are_answered_with_typed_contents(stub):
    message = request_of(
        ("history", "INT64", [1, 2], "int64_contents", [7, 7]),
        ("history_length", "INT32", [1], "int_contents", [1]),
        k=2,
    )
    answer = stub.ModelInfer(message)
    assert not answer.raw_output_contents
    assert list(answer.outputs[0].contents.bytes_contents) == [b"m0", b"m1"]
    assert list(answer.outputs[1].contents.fp32_contents) == [-0.5, -1.5]
    assert list(answer.outputs[2].contents.int_contents) == [2]


def test_the_size_of_raw_contents_may_be_said_again(stub):
    message = request_of(("user_id", "BYTES", [1], None, []), raw=[b"\x03\0\0\0ann"], k=2)
    message.inputs[0].parameters["binary_data_size"].int64_param = 7
    assert stub.ModelInfer(message).raw_output_contents
    message.inputs[0].parameters["other"].int64_param = 7
    assert refused(stub.ModelInfer, message) == (
        "INVALID_ARGUMENT",
        "user_id: the parameter 'other' is not known here",
    )


def test_the_answer_has_the_id_of_the_request(stub):
    answer, call = stub.ModelInfer.with_call(request_of(ANN), metadata=[("x-request-id", "mine")])
    assert answer.model_name == "recommend"
    assert dict(call.trailing_metadata())["x-request-id"] == "mine"


BAD = {
    "no model": (request_of(ANN, model="other"), "NOT_FOUND", "there is no model 'other'"),
    "no version": (
        service_pb2.ModelInferRequest(model_name="recommend", model_version="7"),
        "INVALID_ARGUMENT",
        "neither history nor user_id",
    ),
    "datatype": (
        request_of(("user_id", "FP32", [1], "fp32_contents", [1.0])),
        "INVALID_ARGUMENT",
        "user_id: is FP32; expected BYTES",
    ),
    "strange datatype": (
        request_of(("user_id", "TEXT", [1], "bytes_contents", [b"ann"])),
        "INVALID_ARGUMENT",
        "there is no datatype 'TEXT' here",
    ),
    "other field": (
        request_of(("user_id", "BYTES", [1], "int64_contents", [1])),
        "INVALID_ARGUMENT",
        "has int64_contents; elements of BYTES are bytes_contents",
    ),
    "shape": (
        request_of(("user_id", "BYTES", [3], "bytes_contents", [b"ann"])),
        "INVALID_ARGUMENT",
        "1 elements for the shape [3]; expected 3",
    ),
    "negative shape": (
        request_of(("user_id", "BYTES", [-1], "bytes_contents", [b"ann"])),
        "INVALID_ARGUMENT",
        "the shape [-1] is none",
    ),
    "dimensions": (
        request_of(("history", "BYTES", [1], "bytes_contents", [b"alien"])),
        "INVALID_ARGUMENT",
        "expected 2 dimensions",
    ),
    "FP16": (
        request_of(("user_id", "FP16", [1], "fp32_contents", [1.0])),
        "INVALID_ARGUMENT",
        "FP16 has no field of its own",
    ),
    "range": (
        request_of(
            ("history", "BYTES", [1, 1], "bytes_contents", [b"a"]),
            ("history_length", "INT32", [1], "int64_contents", [2**40]),
        ),
        "INVALID_ARGUMENT",
        "elements of INT32 are int_contents",
    ),
    "both": (
        request_of(ANN, raw=[b"\x03\0\0\0ann"]),
        "INVALID_ARGUMENT",
        "has both contents and raw_input_contents",
    ),
    "number of raw": (
        request_of(("user_id", "BYTES", [1], "", []), raw=[b"", b""]),
        "INVALID_ARGUMENT",
        "2 for 1 inputs",
    ),
    "raw that is cut off": (
        request_of(("user_id", "BYTES", [1], "", []), raw=[b"\x09\0\0\0ann"]),
        "INVALID_ARGUMENT",
        "element 0 of BYTES ends at byte 13",
    ),
    "twice": (request_of(ANN, ANN), "INVALID_ARGUMENT", "stands there twice"),
    "rows": (
        request_of(("user_id", "BYTES", [9], "bytes_contents", [b"ann"] * 9)),
        "INVALID_ARGUMENT",
        "9 rows in one request; send from 1 to 8",
    ),
    "parameter": (request_of(ANN, width=3), "INVALID_ARGUMENT", "'width' is not known"),
    "k": (request_of(ANN, k=51), "INVALID_ARGUMENT", "51 items are more than the 50"),
    "utf-8": (
        request_of(("user_id", "BYTES", [1], "bytes_contents", [b"\xff"])),
        "INVALID_ARGUMENT",
        "an id is not UTF-8",
    ),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_requests_get_one_sentence(stub, which):
    message, code, sentence = BAD[which]
    said = refused(stub.ModelInfer, message)
    assert said[0] == code
    assert sentence in said[1]


def test_an_unknown_version_is_not_found(triton):
    said = refused(triton.infer, "recommend", [tensor("user_id", ["ann"])], model_version="7")
    assert said == ("NOT_FOUND", "there is no version '7' of 'recommend'; the one here is '100'")
    assert refused(triton.get_model_config, "other")[0] == "NOT_FOUND"


@pytest.mark.parametrize("num_bytes", [MAX_BODY_BYTES + 1, 4 * MAX_BODY_BYTES])
def test_a_message_that_is_too_large_is_refused(stub, num_bytes):
    """By the service, which says it in its words, or by gRPC itself."""
    message = request_of(("user_id", "BYTES", [1], "bytes_contents", [b"a" * num_bytes]))
    code, sentence = refused(stub.ModelInfer, message)
    assert code == "RESOURCE_EXHAUSTED"
    assert "larger than" in sentence


def test_unknown_methods_are_not_implemented(stub):
    assert refused(stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest())[0] == "UNIMPLEMENTED"


def test_with_a_token_probes_alone_are_open(recommender):
    api = api_of(RecommendationService(recommender, max_k=50))
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    with (
        answering(api, token_sha256=digest) as addresses,
        InferenceServerClient(addresses.grpc) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        inputs = [tensor("user_id", ["ann"])]
        for headers in ({}, {"authorization": f"Bearer {TOKEN}x"}, {"authorization": TOKEN}):
            code, sentence = refused(client.infer, "recommend", inputs, headers=headers)
            assert code == "UNAUTHENTICATED"
            assert "needs its token" in sentence
            assert refused(client.get_model_metadata, "recommend", headers=headers)[0] == "UNAUTHENTICATED"
        answer = client.infer("recommend", inputs, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.as_numpy("num_items").tolist() == [3]


def test_over_tls(recommender, tmp_path):
    certificate, key = make_certificate(tmp_path)
    api = api_of(RecommendationService(recommender, max_k=50))
    tls = {"certificate": str(certificate), "key": str(key)}
    with (
        answering(api, tls=tls) as addresses,
        InferenceServerClient(
            addresses.grpc.replace("127.0.0.1", "localhost"), ssl=True, root_certificates=str(certificate)
        ) as client,
    ):
        assert client.is_model_ready("recommend")
        with InferenceServerClient(addresses.grpc) as plain:
            assert refused(plain.is_model_ready, "recommend")[0] == "UNAVAILABLE"


class TestOverload:
    @pytest.fixture
    def held(self):
        service = HeldService()
        yield service
        service.let.set()

    def test_requests_of_both_protocols_are_computed_together(self, held):
        with (
            answering(api_of(held, max_waiting=8, max_batch=8)) as addresses,
            InferenceServerClient(addresses.grpc) as client,
            held.asking(addresses.http, "/v1/recommend", {"user_id": "ann"}) as answers,
        ):
            assert held.begun.wait(20)
            calls = [calling(client, tensor("user_id", ["ann"])) for _ in range(2)]
            with held.asking(addresses.http, "/v1/recommend", {"user_id": "42"}) as others:
                held.wait_until_asked(addresses.http, 4)
                held.let.set()
            assert [call.result(20).as_numpy("num_items").tolist() for call in calls] == [[3], [3]]
            held.let.set()
        assert held.batches == [1, 3]
        assert [answer.status_code for answer in (*answers, *others)] == [200, 200]

    def test_a_cancelled_call_frees_its_place(self, held):
        with (
            answering(api_of(held, max_waiting=2)) as addresses,
            InferenceServerClient(addresses.grpc) as client,
        ):
            first = calling(client, tensor("user_id", ["ann"]))
            assert held.begun.wait(20)
            second = calling(client, tensor("user_id", ["42"]))
            held.wait_until_asked(addresses.http, 2)
            # Both places are taken.
            assert refused(client.infer, "recommend", [tensor("user_id", ["ann"])])[0] == "UNAVAILABLE"
            second.call.cancel()
            third = None
            for _ in range(200):  # until the server has heard of it
                third = calling(client, tensor("user_id", ["42"]))
                if not third.is_refused_within(0.1):
                    break
            held.let.set()
            assert first.result(20).as_numpy("num_items").tolist() == [3]
            assert third.result(20).as_numpy("num_items").tolist() == [3]
            assert held.batches == [1, 1], "what was cancelled was not computed"

    def test_a_deadline_that_passes_frees_the_place(self, held):
        with (
            answering(api_of(held, max_waiting=2)) as addresses,
            InferenceServerClient(addresses.grpc) as client,
        ):
            first = calling(client, tensor("user_id", ["ann"]))
            assert held.begun.wait(20)
            inputs = [tensor("user_id", ["42"])]
            code, _ = refused(client.infer, "recommend", inputs, client_timeout=0.2)
            assert code == "DEADLINE_EXCEEDED"
            held.let.set()
            assert first.result(20).as_numpy("num_items").tolist() == [3]
            assert held.batches == [1]

    def test_a_deadline_in_the_past_is_not_computed(self, held):
        api = api_of(held)
        service = RpcService.of(api, ServeConfig(grpc_port=1))
        call = Call({}, "127.0.0.1", left_s=-1.0)

        async def ask():
            return await service.answer("ModelInfer", request_of(ANN).SerializeToString(), call)

        reply = asyncio.run(ask())
        assert reply.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert held.batches == []

    def test_tritons_timeout_is_a_deadline_too(self, held):
        with (
            answering(api_of(held, max_waiting=4)) as addresses,
            InferenceServerClient(addresses.grpc) as client,
        ):
            first = calling(client, tensor("user_id", ["ann"]))
            assert held.begun.wait(20)
            second = calling(client, tensor("user_id", ["ann"]), timeout=1000)
            held.wait_until_asked(addresses.http, 2)
            time.sleep(0.01)
            held.let.set()
            assert first.result(20).as_numpy("num_items").tolist() == [3]
            assert refused(second.result, 20)[0] == "DEADLINE_EXCEEDED"


def test_limits_are_those_of_http(recommender):
    admission = AdmissionConfig.parse({"callers": {"header": "X-Api-Key", "rate": 0.1, "burst": 1}})
    api = api_of(RecommendationService(recommender, max_k=50), admission=admission)
    with answering(api) as addresses, grpc.insecure_channel(addresses.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        mine, other = [("x-api-key", "mine")], [("x-api-key", "other")]
        stub.ModelInfer(request_of(ANN), metadata=mine)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request_of(ANN), metadata=mine)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of this caller" in caught.value.details()
        assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 1000
        stub.ModelInfer(request_of(ANN), metadata=other)
        long = [("x-api-key", "k" * 300)]
        assert refused(stub.ModelInfer, request_of(ANN), metadata=long)[0] == "INVALID_ARGUMENT"


class Recorded:
    def __init__(self):
        self.requests = []

    def request(self, route, status, seconds):
        self.requests.append((route, status))

    def batch(self, num_requests, seconds):
        pass

    def watch(self, metrics):
        pass


def rpc_of(service, meters=(), **more):
    return RpcService([api_of(service, meters=meters).state.answering], **more)


def ask(service, method, message, address="127.0.0.1"):
    async def call():
        return await service.answer(method, message, Call({}, address))

    return asyncio.run(call())


def test_failures_are_internal_and_what_it_needs_is_unavailable(recommender):
    class Failing(RecommendationService):
        def recommend_all(self, requests):
            return [self.error for _ in requests]

    service = Failing(recommender, 50)
    for error, code in (
        (UnavailableError("redis://events", 1, "refused"), grpc.StatusCode.UNAVAILABLE),
        (KeyError("ours"), grpc.StatusCode.INTERNAL),
    ):
        service.error = error
        reply = ask(rpc_of(service), "ModelInfer", request_of(ANN).SerializeToString())
        assert reply.code is code
        assert "ours" not in reply.details


def test_calls_are_measured_as_requests_are(recommender):
    meter = Recorded()
    service = rpc_of(RecommendationService(recommender, 50), meters=[meter])
    ask(service, "ModelInfer", request_of(ANN).SerializeToString())
    ask(service, "ModelInfer", request_of(ANN, model="other").SerializeToString())
    route = "/inference.GRPCInferenceService/ModelInfer"
    assert meter.requests == [(route, 200), (route, 404)]


def test_a_service_of_one_machine_answers_no_other(recommender):
    service = rpc_of(RecommendationService(recommender, 50), only_here=True)
    assert ask(service, "ServerLive", b"").code is grpc.StatusCode.OK
    reply = ask(service, "ServerLive", b"", address="10.1.2.3")
    assert reply.code is grpc.StatusCode.PERMISSION_DENIED


def test_peers_are_addresses():
    assert address_of_peer("ipv4:127.0.0.1:50210") == "127.0.0.1"
    assert address_of_peer("ipv6:%5B::1%5D:50210") == "::1"
    assert address_of_peer("unix:/tmp/socket") is None
    assert [is_loopback(each) for each in ("127.0.0.5", "::1", "::ffff:127.0.0.1", "10.0.0.1")] == [
        *([True] * 3),
        False,
    ]


@pytest.fixture(scope="module")
def rpc(recommender):
    return rpc_of(RecommendationService(recommender, 50))


@given(st.sampled_from(METHODS), st.binary(max_size=200))
@examples(200)
def test_no_bytes_are_a_failure_of_ours(rpc, method, content):
    assert ask(rpc, method, content).code in (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    )


class calling:  # noqa: N801  # reads as a verb
    """A call of Triton's client that is under way."""

    def __init__(self, client, *inputs, **more):
        self._done = threading.Event()
        self._found = None
        self.call = client.async_infer("recommend", list(inputs), self._take, **more)

    def _take(self, result, error):
        self._found = (result, error)
        self._done.set()

    def is_refused_within(self, seconds):
        return self._done.wait(seconds) and self._found[1] is not None

    def result(self, timeout):
        assert self._done.wait(timeout)
        result, error = self._found
        if error is not None:
            raise error
        return result
