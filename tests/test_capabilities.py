"""GetServerInfo's capabilities are true: what is supported works, what is not is refused."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from omni_grpc.config import load_pipeline
from omni_grpc.v1 import common_pb2, info_pb2, service_pb2
from tests.conftest import Serve
from tests.support import RichError, rich_error

CAPTION = "a large red circle on a white background"
PIXEL = {"data": bytes(3), "dtype": common_pb2.DATA_TYPE_UINT8, "shape": [1, 1, 3]}
EMBEDS = {"data": bytes(8), "dtype": common_pb2.DATA_TYPE_FLOAT32, "shape": [1, 2]}
MODALITIES = {name[9:].lower(): number for name, number in common_pb2.Modality.items()}

FORMS: dict[str, dict[str, Any]] = {
    "prompt.text": {"text": CAPTION},
    "prompt.token_ids": {"token_ids": {"ids": [1, 2, 3]}},
    "prompt.messages": {"messages": {"messages": [{"role": "user", "parts": [{"text": CAPTION}]}]}},
    "prompt.embeds": {"embeds": EMBEDS},
    "prompt.media": {"media": [{"modality": common_pb2.MODALITY_IMAGE, "tensor": PIXEL}]},
    "guidance": {"text": CAPTION, "negative_text": "a small blue ring on a black background"},
}


SAMPLING: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "structured_outputs": {"structured_outputs": {"regex": "a+"}},
}


def request(name: str, pipeline: str, entry: str) -> service_pb2.AddRequestRequest | None:
    """A request that needs the capability; None where none can ask for it alone."""
    fields: dict[str, Any] = {"prompt": FORMS.get(name, {"text": CAPTION}), "pipeline": pipeline}
    kind, _, modality = name.partition(".")
    if kind == "output":
        fields["output_modalities"] = [MODALITIES[modality]]
    elif kind == "input":
        if modality == "text":
            return None
        media = {"modality": MODALITIES[modality], "tensor": PIXEL}
        fields["prompt"] = {"text": CAPTION, "media": [media]}
    elif name == "resumable":
        fields["resumable"] = True
    elif name in SAMPLING:
        fields["stage_params"] = [{"stage": entry, "sampling": SAMPLING[name]}]
    elif name == "lora":
        fields["lora"] = "anything"
    return service_pb2.AddRequestRequest(**fields)


async def accepted(stub: Any, message: service_pb2.AddRequestRequest) -> RichError | None:
    """None if the request is accepted, else its refusal."""
    call = stub.AddRequest(message)
    try:
        assert (await call.read()).HasField("accepted")
    except grpc.aio.AioRpcError as error:
        return rich_error(error)
    call.cancel()
    return None


async def interacts(stub: Any, pipeline: str) -> bool:
    """Whether an event is taken, and not rejected."""
    message = service_pb2.SubmitInteractionRequest
    call = stub.SubmitInteraction()
    params = [{"stage": "text", "custom": {"outputs": 50, "interval_ms": 20}}]
    opened: dict[str, Any] = {"pipeline": pipeline, "prompt": {"text": CAPTION}}
    if pipeline == "echo":
        opened["stage_params"] = params
    await call.write(message(setup={"open": opened}))
    await call.write(message(event={"event_id": "e", "prompt": CAPTION}))
    async for answer in call:
        if answer.HasField("event_state"):
            call.cancel()
            return bool(answer.event_state.state != service_pb2.EventState.STATE_REJECTED)
    raise AssertionError("no word on the event")


@pytest.mark.parametrize("pipeline", ["echo", "shapes"])
async def test_capabilities_are_what_happens(serve: Serve, pipeline: str) -> None:
    served = await serve(load_pipeline(pipeline))
    info = await served.stub.GetServerInfo(service_pb2.GetServerInfoRequest())
    (told,) = info.pipelines
    assert len(told.capabilities) > 12
    wrong: list[tuple[str, bool, RichError | None]] = []
    for name, capability in told.capabilities.items():
        supported = capability == info_pb2.CAPABILITY_SUPPORTED
        assert supported or capability == info_pb2.CAPABILITY_UNSUPPORTED
        if name == "interaction":
            if await interacts(served.stub, pipeline) != supported:
                wrong.append((name, supported, None))
            continue
        message = request(name, pipeline, told.stages[0].name)
        if message is None:
            continue
        refusal = await accepted(served.stub, message)
        if (refusal is None) != supported:
            wrong.append((name, supported, refusal))
        if refusal is not None:
            assert refusal.reason in ("NOT_SUPPORTED", "LORA_NOT_FOUND", "INVALID_FIELD"), refusal
    assert not wrong
