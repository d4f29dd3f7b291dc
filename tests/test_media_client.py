"""Media from a caller's side: the typed client's requests, and what the command line makes of
files."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_grpc.cli.call import CommandError
from omni_grpc.cli.generate import Wish
from omni_grpc.cli.plan import plan_call
from omni_grpc.v1.prompt_pb2 import Media, Prompt
from omni_grpc_client import (
    Modality,
    PipelineInfo,
    PromptLike,
    ServerInfo,
    ServerLimits,
    make_media,
)
from omni_grpc_client.request import build_request
from tests.support import AUDIO, IMAGE
from tests.test_cli import omni

SOUND = Media(modality=AUDIO, data=b"sound")


def test_a_file_is_read_and_a_uri_is_left_to_the_server(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"picture")
    for source in (path, str(path)):
        assert make_media(source, "image") == Media(modality=IMAGE, data=b"picture")
    for uri in ("https://example.com/a.png", "data:,x", "FILE:///a.png"):
        assert make_media(uri, Modality.IMAGE, "image/png") == Media(
            modality=IMAGE, uri=uri, mime_type="image/png"
        )
    with pytest.raises(FileNotFoundError):
        make_media(tmp_path / "absent.png", "image")


def test_media_stand_beside_text_or_alone_or_in_the_last_turn() -> None:
    beside = build_request("What is it?", media=[SOUND]).prompt
    assert (beside.text, list(beside.media)) == ("What is it?", [SOUND])
    alone = build_request("", media=[SOUND]).prompt
    assert alone.WhichOneof("content") is None and list(alone.media) == [SOUND]
    assert build_request("").prompt.WhichOneof("content") == "text"
    turns = [("system", "Be brief."), ("user", "What is it?")]
    first, last = build_request(turns, media=[SOUND]).prompt.messages.messages
    assert [part.WhichOneof("part") for part in first.parts] == ["text"]
    assert [part.WhichOneof("part") for part in last.parts] == ["text", "media"]
    _, last = build_request([turns[0], ("user", "")], media=[SOUND]).prompt.messages.messages
    assert [part.WhichOneof("part") for part in last.parts] == ["media"]
    prompts: tuple[PromptLike, ...] = (Prompt(text="x"), [])
    for prompt in prompts:
        with pytest.raises(ValueError, match="media"):
            build_request(prompt, media=[SOUND])


def pipeline(name: str, *inputs: Modality) -> PipelineInfo:
    """A pipeline that takes these."""
    return PipelineInfo(name, "", (), inputs, (), {}, 60.0, 60.0)


def server(*pipelines: PipelineInfo) -> ServerInfo:
    """What a server tells; the first pipeline is its default."""
    limits = ServerLimits(1 << 20, 1 << 20, 1)
    return ServerInfo("", 1, 1, {}, pipelines[0].name, pipelines, limits, "")


def wish(*media: tuple[str, str], name: str = "") -> Wish:
    """What the command line asks for."""
    return Wish("", None, name, ("text",), (), None, None, None, (), "", None, media)


def test_the_first_pipeline_that_takes_the_media_is_asked() -> None:
    voice, ear, eye = (
        pipeline("voice", Modality.TEXT),
        pipeline("ear", Modality.AUDIO),
        pipeline("eye", Modality.TEXT, Modality.IMAGE, Modality.AUDIO),
    )
    sound, picture = ("audio", "data:,x"), ("image", "data:,y")
    info = server(voice, ear, eye)
    assert plan_call(info, wish(sound), []).pipeline == "ear"
    assert plan_call(info, wish(sound, picture), []).pipeline == "eye"
    assert [m.modality for m in plan_call(info, wish(sound, picture), []).media] == [AUDIO, IMAGE]
    assert plan_call(info, wish(picture, name="voice"), []).pipeline == "voice"
    assert plan_call(info, wish(), []).pipeline == ""
    assert plan_call(server(eye, ear), wish(sound), []).pipeline == "", "the default takes it"
    with pytest.raises(CommandError, match="no pipeline here takes image"):
        plan_call(server(voice, ear), wish(picture), [])
    with pytest.raises(CommandError, match=r"--image absent.png: cannot be read: No such file"):
        plan_call(info, wish(("image", "absent.png")), [])


async def test_there_must_be_something_to_ask() -> None:
    result = await omni("generate", "--target", "127.0.0.1:1")
    assert result.code == 2
    assert "there is no prompt, and neither --audio nor --image in its place" in result.err
