"""Messages are those of the protocol: as Triton's own client has them, which was generated from its files."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from rayrec.serve.rpc.messages import DATA_TYPES, SCHEMA, SERVICE, message_class
from rayrec.serve.rpc.service import METHODS


def of_client(name: str):
    outer, _, inner = name.partition(".")
    for file in (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR):
        if found := file.message_types_by_name.get(outer):
            return found.nested_types_by_name[inner] if inner else found
    raise AssertionError(f"the client has no {name}")


@pytest.mark.parametrize("name", SCHEMA)
def test_fields_have_the_numbers_and_types_of_the_protocol(name):
    theirs = declared(of_client(name))
    for field, ours in declared(message_class(name).DESCRIPTOR).items():
        assert ours == theirs[field], field


def declared(message):
    """Number, type and label of each field, as a file declares them: descriptors themselves have other
    attributes for these in protobuf 5 than in 7."""
    proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(proto)
    return {
        field.name: (field.number, field.type, field.label, field.type_name.removeprefix("."))
        for field in proto.field
    }


def test_data_types_have_the_numbers_of_the_protocol():
    theirs = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: theirs[name].number for name in DATA_TYPES} == {
        name: number for number, name in enumerate(DATA_TYPES)
    }


def test_methods_are_of_the_protocol():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert service.full_name == SERVICE
    assert set(METHODS) <= {method.name for method in service.methods}


def test_a_message_survives_the_client():
    request = message_class("ModelInferRequest")(model_name="recommend", id="7")
    request.parameters["k"].int64_param = 3
    request.inputs.add(name="history", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"a")
    theirs = service_pb2.ModelInferRequest.FromString(request.SerializeToString())
    assert message_class("ModelInferRequest").FromString(theirs.SerializeToString()) == request
