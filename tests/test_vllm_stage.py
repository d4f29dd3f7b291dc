"""The vLLM stage without an engine: what reaches `add_request`, and under which keys media do."""

from __future__ import annotations

import asyncio
import threading
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from omni_grpc import types as t
from omni_grpc.config import MediaPolicy
from omni_grpc.errors import (
    InvalidField,
    InvalidMedia,
    LoraNotFound,
    NotSupported,
    PromptTooLong,
)
from omni_grpc.ipc import StageSpec, Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # vLLM's import alone takes ten seconds

if TYPE_CHECKING:
    from omni_grpc.stages.vllm import VllmStage
    from omni_grpc.stages.vllm.media import Item

LIMITS = {"image": 2, "audio": 1, "video": 1}


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    """Imports it, here and not while tests are collected: tests beside these need not wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import omni_grpc.stages.vllm  # noqa: F401


def spec(replica: int = 0, **fields: Any) -> StageSpec:
    """A stage `eye`."""
    return StageSpec(
        "p", "eye", replica, "vllm", "model", "cpu", media=MediaPolicy().model_dump(), **fields
    )


def tensor(shape: tuple[int, ...], dtype: t.DataType = t.DataType.UINT8, fill: int = 1) -> t.Tensor:
    """A decoded medium."""
    size = int(np.prod(shape)) * dtype.itemsize
    return t.Tensor(bytes([fill]) * size, dtype, shape)


def picture(fill: int = 1, uuid: str = "") -> t.Media:
    """A grey picture."""
    return t.Media(t.Modality.IMAGE, tensor=tensor((4, 4, 3), fill=fill), uuid=uuid)


def film(uuid: str = "", mime_type: str = "") -> t.Media:
    """Three frames."""
    return t.Media(t.Modality.VIDEO, tensor=tensor((3, 4, 4, 3)), uuid=uuid, mime_type=mime_type)


def sound(rate: int = 16000) -> t.Media:
    """A second of silence."""
    silence = t.Tensor(bytes(4 * rate), t.DataType.FLOAT32, (rate,))
    return t.Media(t.Modality.AUDIO, tensor=silence, mime_type=f"audio/x-raw;rate={rate}")


async def read(*media: t.Media, replica: int = 0, tenant: str = "", **more: Any) -> list[Item]:
    """The media as that replica takes them."""
    from omni_grpc.stages.vllm.media import MediaReader

    reader = MediaReader(spec(replica), LIMITS, **more)
    return await reader.read(t.Prompt(t.Text("x"), media), tenant)


async def keys(*media: t.Media, **more: Any) -> list[str]:
    """Their keys."""
    return [item.key for item in await read(*media, **more)]


# ---------------------------------------------------------------- keys of media


async def test_one_picture_has_one_key_per_replica() -> None:
    first, again = await keys(picture(), picture())
    (elsewhere,) = await keys(picture(), replica=1)
    assert first == again
    assert first.startswith("eye:rep0:sha256-")
    assert elsewhere == first.replace("rep0", "rep1")
    assert (await keys(picture(fill=2)))[0] != first


async def test_a_callers_name_is_its_key_on_each_replica() -> None:
    assert await keys(picture(uuid="a")) == ["eye:rep0:/image/a"]
    assert await keys(picture(uuid="a"), replica=3) == ["eye:rep3:/image/a"]
    assert await keys(picture(fill=2, uuid="a")) == await keys(picture(uuid="a"))


async def test_no_name_reaches_anothers_content() -> None:
    """Tenants, modalities, and what was counted here are never one key."""
    (counted,) = await keys(picture())
    hashed = counted.removeprefix("eye:rep0:")
    names = [
        await keys(picture(uuid=hashed)),
        await keys(film(uuid=hashed)),
        await keys(picture(uuid=hashed), tenant="a"),
        await keys(picture(uuid=f"image/{hashed}"), tenant="a"),
        await keys(picture(uuid=hashed), tenant="a/image"),
        await keys(picture()),
    ]
    assert len({key for (key,) in names}) == len(names)


async def test_a_kind_of_media_that_looks_alike_has_another_hash() -> None:
    from PIL import Image

    from omni_grpc.stages.media import DecodedAudio, DecodedImage, DecodedVideo
    from omni_grpc.stages.vllm.media import content_name

    frames = np.ones((4, 4, 3), np.uint8)
    samples = frames.ravel().view(np.float32)
    names = {
        content_name(DecodedImage(Image.fromarray(frames))),
        content_name(DecodedImage(Image.fromarray(frames.reshape(2, 8, 3)))),
        content_name(DecodedVideo(frames[None], 0.0)),
        content_name(DecodedVideo(frames[None], 25.0)),
        content_name(DecodedAudio(samples, 8000)),
        content_name(DecodedAudio(samples, 16000)),
    }
    assert len(names) == 6


async def test_hashing_is_not_done_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_grpc.stages.vllm.media import content_name

    threads: list[threading.Thread] = []

    def watched(decoded: Any) -> str:
        threads.append(threading.current_thread())
        return content_name(decoded)

    monkeypatch.setattr("omni_grpc.stages.vllm.media.content_name", watched)
    await keys(picture(), picture())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


# ---------------------------------------------------------------- what vLLM is handed


async def test_sound_comes_at_the_models_rate() -> None:
    ((samples, rate),) = [item.data for item in await read(sound(24000), sample_rate=16000)]
    assert (rate, samples.dtype, samples.shape) == (16000, np.float32, (16000,))
    ((samples, rate),) = [item.data for item in await read(sound(24000))]
    assert (rate, len(samples)) == (24000, 24000)


async def test_a_film_comes_with_its_times() -> None:
    (item,) = await read(film(mime_type="video/x-raw;fps=2"))
    frames, facts = item.data
    assert (item.modality, frames.shape) == ("video", (3, 4, 4, 3))
    assert (facts["fps"], facts["duration"], facts["total_num_frames"]) == (2.0, 1.5, 3)
    assert facts["do_sample_frames"]
    from omni_grpc.stages.media import DecodedVideo
    from omni_grpc.stages.vllm.media import engine_data

    _, untimed = engine_data(DecodedVideo(frames, 0.0), None)
    assert not untimed["do_sample_frames"], "frames are chosen by time, where there is one"


async def test_one_too_many_and_an_unknown_kind_are_named() -> None:
    from omni_grpc.stages.vllm.media import MediaReader

    with pytest.raises(InvalidField) as caught:
        await read(picture(), picture(), picture())
    assert [v.field for v in caught.value.violations] == ["prompt.media[2]"]
    with pytest.raises(NotSupported) as refused:
        await MediaReader(spec(), {}).read(t.Prompt(None, (picture(),)))
    assert [v.field for v in refused.value.violations] == ["prompt.media[0]"]


async def test_the_first_bad_item_is_the_one_that_is_named() -> None:
    slow = t.Media(t.Modality.IMAGE, data=b"no picture either" * 100_000)
    with pytest.raises(InvalidMedia) as caught:
        await read(slow, t.Media(t.Modality.IMAGE, data=b"no"))
    assert [v.field for v in caught.value.violations] == ["prompt.media[0]"]
    left = [task.get_coro() for task in asyncio.all_tasks()]
    assert not [coroutine for coroutine in left if "MediaReader" in repr(coroutine)]


async def test_parts_of_messages_keep_their_places() -> None:
    from omni_grpc.stages.vllm.media import MediaReader
    from omni_grpc.stages.vllm.prompt import _turns

    parts = (t.Text("a"), picture(1), t.Text("b"), film(), picture(2))
    prompt = t.Prompt(
        t.Messages((t.Message("user", parts), t.Message("assistant", (t.Text("c"),))))
    )
    items = await MediaReader(spec(), LIMITS).read(prompt)
    first, second = _turns(prompt.content.messages, items)  # type: ignore[union-attr]
    assert [part.get("text", part.get("uuid")) for part in first["content"]] == [
        "a",
        items[0].key,
        "b",
        items[1].key,
        items[2].key,
    ]
    assert second == {"role": "assistant", "content": "c"}


# ---------------------------------------------------------------- what goes with a prompt


class Recorder:
    """In the place of an engine: remembers what it is asked."""

    def __init__(self, policy: str = "fcfs") -> None:
        self.calls: list[dict[str, Any]] = []
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(policy=policy),
            parallel_config=SimpleNamespace(data_parallel_size=2),
        )

    async def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> str:
        self.calls.append({"request_id": request_id, "prompt": prompt, "params": params, **more})
        return "collector"

    @property
    def short_cut(self) -> Recorder:
        """It has none."""
        return self

    def close(self, request_id: str) -> None: ...


class Rendered:
    """In the place of a renderer: five tokens."""

    forgotten = 0

    async def render(self, prompt: t.Prompt, options: Any, tenant: str) -> dict[str, Any]:
        return {"type": "token", "prompt_token_ids": [1, 2, 3, 4, 5]}

    def forget(self, prompt: Any) -> None:
        self.forgotten += 1


def stage_over(engine: Recorder) -> VllmStage:
    """A stage that is loaded, but for the model."""
    from omni_grpc.stages.vllm import VllmStage

    stage = VllmStage(spec(lora_adapters={"odd": "/adapters/odd", "even": "/adapters/even"}))
    stage._engine = engine  # type: ignore[assignment]
    stage._prompts = Rendered()  # type: ignore[assignment]
    stage._context, stage._defaults, stage._plugins = 100, {}, False
    return stage


def task(options: t.RequestOptions, **sampling: Any) -> Task:
    """A task with these options."""
    return Task(1, "r", t.SamplingParams(**sampling), 9.0, t.Prompt(t.Text("x")), options=options)


async def test_every_option_reaches_the_engine() -> None:
    from omni_grpc.stages.vllm.answer import Submitted

    engine = Recorder(policy="priority")
    options = t.RequestOptions(
        lora="odd",
        priority=-7,
        data_parallel_rank=1,
        arrival_time=1700000000.5,
        reasoning_ended=False,
        cache_salt="salt",
        trace_headers={"traceparent": "00-1-2-01"},
    )
    submitted = await stage_over(engine).prepare(task(options))
    (call,) = engine.calls
    assert call["request_id"] == "r"
    assert (call["lora_request"].lora_name, call["lora_request"].lora_path) == (
        "odd",
        "/adapters/odd",
    )
    assert call["priority"] == -7
    assert call["data_parallel_rank"] == 1
    assert call["arrival_time"] == 1700000000.5
    assert call["reasoning_ended"] is False
    assert call["trace_headers"] == {"traceparent": "00-1-2-01"}
    assert call["prompt"]["cache_salt"] == "salt"
    assert call["params"].max_tokens == 95, "the room left"
    assert isinstance(submitted, Submitted)
    assert (submitted.collector, submitted.prompt_tokens) == ("collector", 5)


async def test_unset_options_are_unset_at_the_engine() -> None:
    engine = Recorder()
    await stage_over(engine).prepare(task(t.RequestOptions()))
    (call,) = engine.calls
    unset = ("lora_request", "data_parallel_rank", "arrival_time", "reasoning_ended")
    assert [call[name] for name in (*unset, "trace_headers")] == [None] * 5
    assert call["priority"] == 0
    assert "cache_salt" not in call["prompt"]


@pytest.mark.parametrize(
    ("options", "error", "fields"),
    [
        (t.RequestOptions(priority=1), NotSupported, ["priority"]),
        (t.RequestOptions(data_parallel_rank=2), InvalidField, ["data_parallel_rank"]),
        (t.RequestOptions(lora="nobody"), LoraNotFound, []),
    ],
)
async def test_options_that_cannot_be_honoured_are_refused(
    options: t.RequestOptions, error: type[Any], fields: list[str]
) -> None:
    engine = Recorder()
    with pytest.raises(error) as caught:
        await stage_over(engine).prepare(task(options))
    assert [v.field for v in caught.value.violations] == fields
    assert not engine.calls


async def test_arguments_of_plugins_need_a_plugin() -> None:
    stage = stage_over(engine := Recorder())
    wanted = task(t.RequestOptions(), extra_args={"knob": 1.0})
    with pytest.raises(InvalidField) as caught:
        await stage.prepare(wanted)
    assert [v.field for v in caught.value.violations] == ["params.extra_args"]
    stage._plugins = True
    await stage.prepare(wanted)
    assert engine.calls[0]["params"].extra_args == {"knob": 1.0}


class Said:
    """In the place of a collector: these outputs."""

    request_id = "internal"

    def __init__(self, *outputs: SimpleNamespace) -> None:
        self._outputs = list(outputs)

    def get_nowait(self) -> SimpleNamespace:
        return self._outputs.pop(0)

    def close(self) -> None: ...


def said(token: int, reason: str | None) -> SimpleNamespace:
    """An output of one token, or of none where the engine gave up."""
    tokens = [] if reason == "error" else [token]
    completion = SimpleNamespace(
        index=0, text="x", token_ids=tokens, logprobs=None, finish_reason=reason, stop_reason=None
    )
    return SimpleNamespace(
        outputs=[completion],
        finished=reason is not None,
        num_cached_tokens=0,
        prompt_logprobs=None,
        prompt_token_ids=[1],
    )


@pytest.mark.parametrize(
    ("media", "first", "expected"),
    [
        (True, [said(0, "error")], [7]),
        (True, [said(3, None), said(0, "error")], "raises"),
        (False, [said(0, "error")], "raises"),
    ],
    ids=["before a word", "after a word", "without media"],
)
async def test_media_that_the_engine_forgot_are_sent_again(
    monkeypatch: pytest.MonkeyPatch, media: bool, first: list[Any], expected: Any
) -> None:
    from omni_grpc.stages.base import Inputs
    from omni_grpc.stages.vllm.answer import Submitted
    from omni_grpc.stages.vllm.outputs import EngineGaveUp

    stage, wanted = stage_over(Recorder()), task(t.RequestOptions())

    async def begin(again: Task) -> Submitted:
        assert again is wanted
        return Submitted(Said(said(7, "stop")), 5)

    monkeypatch.setattr(stage, "_begin", begin)
    outputs = stage.run(wanted, Submitted(Said(*first), 5, media), Inputs())
    if expected == "raises":
        with pytest.raises(EngineGaveUp):
            _ = [output async for output in outputs]
        return
    texts = [o.payload for o in [o async for o in outputs] if isinstance(o.payload, t.TextDelta)]
    assert [token for delta in texts for token in delta.token_ids] == expected


async def test_a_form_that_cannot_be_compiled_is_the_callers_fault() -> None:
    """The engine says no more than that it gave up, and only after the request was taken."""
    from omni_grpc.stages.base import Inputs
    from omni_grpc.stages.vllm.answer import Submitted

    form = t.StructuredOutputs(regex="(a|b)" * 10000)
    wanted = task(t.RequestOptions(), structured_outputs=form)
    prepared = Submitted(Said(said(0, "error")), 5, form=form)
    with pytest.raises(InvalidField) as caught:
        _ = [output async for output in stage_over(Recorder()).run(wanted, prepared, Inputs())]
    assert [v.field for v in caught.value.violations] == ["params.structured_outputs.regex"]


async def test_a_refusal_after_rendering_is_undone() -> None:
    stage = stage_over(Recorder())
    stage._context = 5
    with pytest.raises(PromptTooLong):
        await stage.prepare(task(t.RequestOptions()))
    assert stage._prompts.forgotten == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("special", [True, False, None])
async def test_special_tokens_are_added_as_asked(special: bool | None) -> None:
    from vllm.renderers.params import TokenizeParams

    from omni_grpc.stages.vllm.media import MediaReader
    from omni_grpc.stages.vllm.prompt import PromptRenderer

    renderer = SimpleNamespace(
        default_cmpl_tok_params=TokenizeParams(100, add_special_tokens=True),
        default_chat_tok_params=TokenizeParams(100, add_special_tokens=False),
    )
    model = SimpleNamespace(get_vocab_size=lambda: 9, max_model_len=100)
    prompts = PromptRenderer(renderer, model, MediaReader(spec(), {}), chat=True)
    options = t.Tokenization(add_special_tokens=special)
    plain = prompts._tokenize_params(options, chat=False).add_special_tokens
    chat = prompts._tokenize_params(options, chat=True).add_special_tokens
    assert plain is (special is not False)
    assert chat is (special is True)
