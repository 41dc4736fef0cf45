"""The generated gRPC code, on whatever protobuf and grpc are installed."""

import os
import pathlib
import subprocess
from concurrent import futures

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from engram_sglang._pb.engram.v1 import engram_pb2, engram_pb2_grpc

FILE = engram_pb2.DESCRIPTOR
MESSAGES = sorted(FILE.message_types_by_name)

SAMPLES = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_STRING: "tür",
    FieldDescriptor.TYPE_BYTES: b"\0\xff",
}


def sample(descriptor, choice: int):
    """A message with every field set; of a oneof, field number `choice`."""
    message = getattr(engram_pb2, descriptor.name)()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[choice % len(oneof.fields)] is not field:
            continue
        where = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            where["schlüssel"] = "wert"
            continue
        if field.message_type is not None:
            value = sample(field.message_type, choice)
        elif field.enum_type is not None:
            value = field.enum_type.values[-1].number
        else:
            value = SAMPLES[field.type]
        try:
            where.extend([value, value])
        except AttributeError:
            if field.message_type is not None:
                where.CopyFrom(value)
            else:
                setattr(message, field.name, value)
    return message


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("choice", range(3))
def test_every_message_is_built_and_parsed(name, choice):
    message = sample(FILE.message_types_by_name[name], choice)
    data = message.SerializeToString(deterministic=True)
    parsed = type(message).FromString(data)
    assert parsed == message
    assert parsed.SerializeToString(deterministic=True) == data
    assert len(data) > 0 or not FILE.message_types_by_name[name].fields


def test_modules_know_where_they_live():
    assert engram_pb2.AttachRequest.__module__ == "engram_sglang._pb.engram.v1.engram_pb2"
    assert FILE.package == "engram.v1"


class Worker(engram_pb2_grpc.WorkerServicer):
    def Attach(self, request, context):  # noqa: N802
        refusal = engram_pb2.Refusal(
            reason=engram_pb2.Refusal.Reason.NOT_READY, message=request.model.display_name
        )
        return engram_pb2.AttachResponse(refusal=refusal)

    def Session(self, requests, context):  # noqa: N802
        for event in requests:
            beat = engram_pb2.DaemonBeat(beats=event.beat.ticks)
            yield engram_pb2.DaemonEvent(beat=beat)


def test_calls_go_through(tmp_path):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    engram_pb2_grpc.add_WorkerServicer_to_server(Worker(), server)
    address = f"unix:{tmp_path}/grpc"
    server.add_insecure_port(address)
    server.start()
    with grpc.insecure_channel(address) as connection:
        worker = engram_pb2_grpc.WorkerStub(connection)
        model = engram_pb2.ModelIdentity(display_name="ein Modell")
        response = worker.Attach(engram_pb2.AttachRequest(model=model), timeout=30)
        assert response.WhichOneof("result") == "refusal"
        assert response.refusal.message == "ein Modell"
        beats = (engram_pb2.WorkerEvent(beat=engram_pb2.WorkerBeat(ticks=n)) for n in range(3))
        events = worker.Session(beats, timeout=30)
        assert [event.beat.beats for event in events] == [0, 1, 2]
        with pytest.raises(grpc.RpcError) as refused:
            engram_pb2_grpc.AdminStub(connection).Status(engram_pb2.StatusRequest(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    server.stop(None).wait()


def test_what_is_committed_is_what_is_generated(root: pathlib.Path):
    generator = os.environ.get("ENGRAM_GENERATOR")
    if generator is None:
        pytest.skip("ENGRAM_GENERATOR names no interpreter with the pinned generator")
    run = subprocess.run(
        [generator, "-B", root / "proto/generate.py", "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
