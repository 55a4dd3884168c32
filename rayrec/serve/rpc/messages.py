"""Messages of the Open Inference Protocol over gRPC, from a table of their fields.

    SCHEMA: message -> field -> (number, type) ─► descriptors in a pool of our own ─► classes

Built when it is imported instead of generated: no compiler is needed to build the package, nothing generated
is in the repository, and the clients' own stubs, which define the same names, can be in one process with it:
each pool of descriptors may define a name once.

Sources: github.com/kserve/open-inference-protocol, specification/protocol/inference_grpc.md, and, for
`ModelStreamInfer`, `ModelConfig`, `ModelStatistics` and `RepositoryIndex`, Triton's extensions in
github.com/triton-inference-server/common, protobuf/grpc_service.proto and model_config.proto. What is not in
the table is skipped where it comes; a test compares every number with those of Triton's client.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {
        "name": (1, "string"),
        "version": (2, "string"),
        "extensions": (3, "repeated string"),
    },
    "ModelMetadataRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelMetadataResponse.TensorMetadata": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
    },
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "repeated string"),
        "platform": (3, "string"),
        "inputs": (4, "repeated ModelMetadataResponse.TensorMetadata"),
        "outputs": (5, "repeated ModelMetadataResponse.TensorMetadata"),
    },
    "InferParameter": {
        "bool_param": (1, "oneof bool"),
        "int64_param": (2, "oneof int64"),
        "string_param": (3, "oneof string"),
        "double_param": (4, "oneof double"),
        "uint64_param": (5, "oneof uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "repeated bool"),
        "int_contents": (2, "repeated int32"),
        "int64_contents": (3, "repeated int64"),
        "uint_contents": (4, "repeated uint32"),
        "uint64_contents": (5, "repeated uint64"),
        "fp32_contents": (6, "repeated float"),
        "fp64_contents": (7, "repeated double"),
        "bytes_contents": (8, "repeated bytes"),
    },
    "ModelInferRequest.InferInputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (4, "map InferParameter"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferRequest.InferRequestedOutputTensor": {
        "name": (1, "string"),
        "parameters": (2, "map InferParameter"),
    },
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "inputs": (5, "repeated ModelInferRequest.InferInputTensor"),
        "outputs": (6, "repeated ModelInferRequest.InferRequestedOutputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "ModelInferResponse.InferOutputTensor": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "repeated int64"),
        "parameters": (4, "map InferParameter"),
        "contents": (5, "InferTensorContents"),
    },
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map InferParameter"),
        "outputs": (5, "repeated ModelInferResponse.InferOutputTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
    "ModelStreamInferResponse": {
        "error_message": (1, "string"),
        "infer_response": (2, "ModelInferResponse"),
    },
    "ModelConfigRequest": {"name": (1, "string"), "version": (2, "string")},
    "ModelInput": {
        "name": (1, "string"),
        "data_type": (2, "enum DataType"),
        "dims": (4, "repeated int64"),
        "optional": (8, "bool"),
    },
    "ModelOutput": {
        "name": (1, "string"),
        "data_type": (2, "enum DataType"),
        "dims": (3, "repeated int64"),
    },
    "ModelDynamicBatching": {
        "preferred_batch_size": (1, "repeated int32"),
        "max_queue_delay_microseconds": (2, "uint64"),
        "priority_levels": (4, "uint64"),
        "default_priority_level": (5, "uint64"),
    },
    "ModelConfig": {
        "name": (1, "string"),
        "platform": (2, "string"),
        "backend": (17, "string"),
        "max_batch_size": (4, "int32"),
        "input": (5, "repeated ModelInput"),
        "output": (6, "repeated ModelOutput"),
        # One of several in the original, of which this is the only one here: on the wire it is the same.
        "dynamic_batching": (11, "ModelDynamicBatching"),
    },
    "ModelConfigResponse": {"config": (1, "ModelConfig")},
    "ModelStatisticsRequest": {"name": (1, "string"), "version": (2, "string")},
    "StatisticDuration": {"count": (1, "uint64"), "ns": (2, "uint64")},
    "InferStatistics": {
        "success": (1, "StatisticDuration"),
        "fail": (2, "StatisticDuration"),
        "queue": (3, "StatisticDuration"),
        "compute_input": (4, "StatisticDuration"),
        "compute_infer": (5, "StatisticDuration"),
        "compute_output": (6, "StatisticDuration"),
        "cache_hit": (7, "StatisticDuration"),
        "cache_miss": (8, "StatisticDuration"),
    },
    "InferBatchStatistics": {
        "batch_size": (1, "uint64"),
        "compute_input": (2, "StatisticDuration"),
        "compute_infer": (3, "StatisticDuration"),
        "compute_output": (4, "StatisticDuration"),
    },
    "ModelStatistics": {
        "name": (1, "string"),
        "version": (2, "string"),
        "last_inference": (3, "uint64"),
        "inference_count": (4, "uint64"),
        "execution_count": (5, "uint64"),
        "inference_stats": (6, "InferStatistics"),
        "batch_stats": (7, "repeated InferBatchStatistics"),
    },
    "ModelStatisticsResponse": {"model_stats": (1, "repeated ModelStatistics")},
    "RepositoryIndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "RepositoryIndexResponse.ModelIndex": {
        "name": (1, "string"),
        "version": (2, "string"),
        "state": (3, "string"),
        "reason": (4, "string"),
    },
    "RepositoryIndexResponse": {"models": (1, "repeated RepositoryIndexResponse.ModelIndex")},
}
"""Messages, inner ones before those that have them: number and type of each field."""

DATA_TYPES = (
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
)
"""Of the enum `DataType`, by number."""

_Field = descriptor_pb2.FieldDescriptorProto
_ONEOF = "choice"


def _file() -> descriptor_pb2.FileDescriptorProto:
    """What a compiler makes of the table as a file of proto3."""
    file = descriptor_pb2.FileDescriptorProto(name="rayrec.proto", package=PACKAGE, syntax="proto3")
    of_enum = file.enum_type.add(name="DataType")
    for number, name in enumerate(DATA_TYPES):
        of_enum.value.add(name=name, number=number)
    outer: dict[str, descriptor_pb2.DescriptorProto] = {
        name: file.message_type.add(name=name) for name in SCHEMA if "." not in name
    }
    for name, fields in SCHEMA.items():
        parent, _, inner = name.rpartition(".")
        message = outer[parent].nested_type.add(name=inner) if parent else outer[name]
        for field, (number, kind) in fields.items():
            _add_field(message, f".{PACKAGE}.{name}", field, number, kind)
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, path: str, name: str, number: int, kind: str) -> None:
    label, _, type_name = kind.rpartition(" ")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = _Field.LABEL_REPEATED
    elif label == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name=_ONEOF)
        field.oneof_index = 0
    if label == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, path, "key", 1, "string")
        _add_field(entry, path, "value", 2, type_name)
        field.type, field.type_name = _Field.TYPE_MESSAGE, f"{path}.{entry.name}"
    elif label == "enum":
        field.type, field.type_name = _Field.TYPE_ENUM, f".{PACKAGE}.{type_name}"
    elif type_name in SCHEMA:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{type_name}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{type_name.upper()}")


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def message_class(name: str) -> Any:
    """The class of a message, such as "ModelInferRequest"."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
