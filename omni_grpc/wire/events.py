"""Events: from our types to the contract's messages."""

from __future__ import annotations

from omni_grpc import types as t
from omni_grpc.cutter import PART_BYTES
from omni_grpc.outbox import Numbered
from omni_grpc.v1 import common_pb2, output_pb2, service_pb2
from omni_grpc.wire.values import DATA_TYPE_OUT, ENCODING_OUT, MODALITY_OUT, REASON_OUT


class EventEncoder:
    """One stream's events as they are written. Tokens share a message that is filled anew for each:
    what `encode` gave holds until it is called again."""

    def __init__(self) -> None:
        self._response = service_pb2.AddRequestResponse()
        self._output = self._response.output
        self._text = self._output.text
        # An empty delta is still a text: the oneof must be set.
        self._text.SetInParent()

    def encode(self, numbered: Numbered) -> service_pb2.AddRequestResponse:
        """An event as it is written."""
        output = numbered.event
        if not isinstance(output, t.Output):
            return encode_event(numbered)
        delta = output.content
        if not isinstance(delta, t.TextDelta) or delta.logprobs or delta.prompt_logprobs:
            return encode_event(numbered)
        response, message, text = self._response, self._output, self._text
        response.seq, response.epoch = numbered.seq, numbered.epoch
        message.stage, message.index, message.segment = output.stage, output.index, output.segment
        text.text = delta.text
        text.token_ids[:] = delta.token_ids
        return response


def encode_event(numbered: Numbered) -> service_pb2.AddRequestResponse:
    """An event as it is written."""
    response = service_pb2.AddRequestResponse(seq=numbered.seq, epoch=numbered.epoch)
    match numbered.event:
        case t.Output() as output:
            _fill_output(response.output, output)
        case t.Accepted() as accepted:
            _fill_accepted(response.accepted, accepted)
        case t.StageProgress() as event:
            response.progress.stage = event.stage
            response.progress.step = event.progress.step
            response.progress.total_steps = event.progress.total_steps
            preview = event.progress.preview
            # One that no message could carry is left out: previews are a courtesy.
            if preview is not None and len(preview.data) <= PART_BYTES:
                response.progress.preview.CopyFrom(
                    output_pb2.ImageChunk(
                        data=preview.data,
                        mime_type=preview.mime_type,
                        width=preview.width,
                        height=preview.height,
                        last=True,
                    )
                )
        case t.SegmentEnd() as event:
            response.segment_end.segment = event.segment
            response.segment_end.stage = event.stage
            response.segment_end.reason = REASON_OUT[event.reason]
        case t.Finished() as finished:
            _fill_finished(response.finished, finished)
    return response


# Every request has these two. To fill a message in its place costs a third of copying it in.


def _fill_accepted(message: output_pb2.Accepted, event: t.Accepted) -> None:
    message.request_id, message.pipeline = event.request_id, event.pipeline
    message.stages.extend(event.stages)
    for output in event.outputs:
        _fill_output_format(message.outputs.add(), output)


def _fill_finished(message: output_pb2.Finished, event: t.Finished) -> None:
    for entry in event.finish_reasons:
        _fill_stage_finish(message.finish_reasons.add(), entry)
    usage, used = message.usage, event.usage
    usage.prompt_tokens, usage.cached_tokens = used.prompt_tokens, used.cached_tokens
    usage.completion_tokens, usage.steps = used.completion_tokens, used.steps
    usage.audio_samples, usage.frames = used.audio_samples, used.frames
    timings, took = message.timings, event.timings
    # All zeros: they are there all the same.
    usage.SetInParent()
    timings.SetInParent()
    timings.preprocess_ms, timings.transform_ms = took.preprocess_ms, took.transform_ms
    timings.queue_wait_ms, timings.total_ms = took.queue_wait_ms, took.total_ms
    # One by one: protobuf's `update` is slower.
    for stage, spent in took.stage_ms.items():
        timings.stage_ms[stage] = spent
    for modality, spent in took.first_output_ms.items():
        timings.first_output_ms[modality] = spent


def _fill_stage_finish(message: output_pb2.StageFinish, entry: t.StageFinish) -> None:
    message.stage, message.index = entry.stage, entry.index
    message.reason = REASON_OUT[entry.finish.reason]
    match entry.finish.stopped_by:
        case str() as text:
            message.stop_text = text
        case int() as token:
            message.stop_token_id = token


def encode_output_format(output: t.OutputFormat) -> output_pb2.OutputFormat:
    """The form of a final output."""
    message = output_pb2.OutputFormat()
    _fill_output_format(message, output)
    return message


def _fill_output_format(message: output_pb2.OutputFormat, output: t.OutputFormat) -> None:
    message.stage, message.modality = output.stage, MODALITY_OUT[output.modality]
    match output.format:
        case t.AudioFormat() as audio:
            message.audio.CopyFrom(_audio_format(audio))
        case t.ImageFormat(mime_type, width, height):
            message.image.CopyFrom(
                output_pb2.ImageFormat(mime_type=mime_type, width=width, height=height)
            )
        case t.VideoFormat(mime_type, width, height, fps):
            message.video.CopyFrom(
                output_pb2.VideoFormat(mime_type=mime_type, width=width, height=height, fps=fps)
            )


def _audio_format(audio: t.AudioFormat) -> common_pb2.AudioFormat:
    return common_pb2.AudioFormat(
        encoding=ENCODING_OUT[audio.encoding],
        sample_rate_hz=audio.sample_rate_hz,
        channels=audio.channels,
    )


def _fill_output(message: output_pb2.Output, output: t.Output) -> None:
    message.stage, message.index, message.segment = output.stage, output.index, output.segment
    match output.content:
        case t.TextDelta() as delta:
            text = message.text
            text.text = delta.text
            text.token_ids.extend(delta.token_ids)
            if delta.logprobs:
                text.logprobs.extend(_logprobs(entry) for entry in delta.logprobs)
            if delta.prompt_logprobs:
                text.prompt_logprobs.extend(_logprobs(entry) for entry in delta.prompt_logprobs)
            # An empty delta is still a text: the oneof must be set.
            text.SetInParent()
        case t.AudioChunk(data, start_sample, form):
            message.audio.data, message.audio.start_sample = data, start_sample
            message.audio.format.CopyFrom(_audio_format(form))
        case t.ImageChunk() as image:
            message.image.CopyFrom(
                output_pb2.ImageChunk(**{f: getattr(image, f) for f in image.__struct_fields__})
            )
        case t.VideoChunk() as video:
            message.video.CopyFrom(
                output_pb2.VideoChunk(**{f: getattr(video, f) for f in video.__struct_fields__})
            )
        case t.TensorChunk() as tensor:
            message.tensor.CopyFrom(
                output_pb2.TensorChunk(
                    name=tensor.name,
                    data=tensor.data,
                    dtype=DATA_TYPE_OUT[tensor.dtype],
                    shape=tensor.shape,
                    offset=tensor.offset,
                    last=tensor.last,
                )
            )


def _logprobs(entry: t.TokenLogprobs) -> output_pb2.TokenLogprobs:
    return output_pb2.TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        candidates=[
            output_pb2.CandidateLogprob(
                token_id=c.token_id, logprob=c.logprob, rank=c.rank, text=c.text
            )
            for c in entry.candidates
        ],
    )
