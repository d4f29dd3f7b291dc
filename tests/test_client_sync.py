"""The Python client for programs without an event loop, against a server in a process of its
own."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc_client import (
    AbortOutcome,
    Accepted,
    AudioChunk,
    CancelledCallError,
    Event,
    EventChanged,
    Finished,
    InvalidArgumentError,
    OmniClient,
    OmniSyncClient,
    SegmentEnd,
    TextDelta,
    UnavailableError,
)
from tests.running import ServerProcess, wait_until
from tests.support import ROOT

SLOW = {"text": {"outputs": 1000, "interval_ms": 20}}
TONE = 2400


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where `echo` is served."""
    with ServerProcess("echo") as server:
        yield server.await_serving()


@pytest.fixture
def client(port: int) -> Iterator[OmniSyncClient]:
    """A client of it. When the test is over, the server must have nothing to do."""
    with OmniSyncClient(f"127.0.0.1:{port}") as connected:
        yield connected
        wait_until(lambda: running(connected) == 0, 5, "freed")


def running(client: OmniSyncClient) -> int:
    """Tasks that the server's replicas hold."""
    return sum(replica.running or 0 for stage in client.load() for replica in stage.replicas)


def client_threads() -> int:
    """How many clients have a thread."""
    return sum(thread.name == "omni-client" for thread in threading.enumerate())


def text_of(events: list[Event]) -> str:
    """The text of all deltas."""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_the_whole_answer(client: OmniSyncClient) -> None:
    answer = client.generate("hello big world")
    assert answer.text == "hello big world"
    assert answer.audio is not None and answer.audio.samples == 3 * TONE
    assert client.draw("x").mime_type == "image/png"
    assert client.server_info().default_pipeline == "echo"


def test_events_come_one_by_one(client: OmniSyncClient) -> None:
    events = list(client.stream("hello big world", output_modalities=["text"]))
    assert isinstance(events[0], Accepted) and isinstance(events[-1], Finished)
    assert text_of(events) == "hello big world"
    begun = time.monotonic()
    for event in client.stream("x", stage_params=SLOW):
        if isinstance(event, TextDelta):
            break
    assert time.monotonic() - begun < 10, "the first came before the last, 20 s later"


def test_breaking_out_aborts_the_request(client: OmniSyncClient) -> None:
    for event in client.stream("x", stage_params=SLOW):
        if isinstance(event, TextDelta):
            assert running(client) > 0
            break
    wait_until(lambda: running(client) == 0, 5)


def test_an_iterator_that_is_kept_is_closed_by_hand(client: OmniSyncClient) -> None:
    events = client.stream("x", stage_params=SLOW)
    next(events)
    assert running(client) > 0
    events.close()
    wait_until(lambda: running(client) == 0, 5)
    assert list(events) == []


def test_errors_are_the_same(client: OmniSyncClient) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate("x", stage_params={"text": {"bogus": 1}})
    assert caught.value.violations[0].field == "stage_params[0].custom.bogus"
    with pytest.raises(ValueError, match="smell"):
        client.generate("x", output_modalities=["smell"])
    with pytest.raises(LookupError, match="no more"):
        list(client.speak(one_word_and_an_error()))
    with OmniSyncClient("127.0.0.1:1", retry=None) as nobody, pytest.raises(UnavailableError):
        nobody.load()


def one_word_and_an_error() -> Iterator[str]:
    yield "hello "
    raise LookupError("no more words")


def test_text_is_spoken_while_it_is_written(client: OmniSyncClient) -> None:
    chunks = list(client.speak(word for word in ("hello ", "big ", "world")))
    assert sum(chunk.samples for chunk in chunks) == 3 * TONE


def test_a_request_is_fed_and_read(client: OmniSyncClient) -> None:
    with client.open(output_modalities=["text"]) as request:
        for n in range(2):
            request.send("hello ")
            request.send(f"{n}", end_of_segment=True)
            events = []
            for event in request:
                events.append(event)
                if isinstance(event, SegmentEnd):
                    break
            assert text_of(events) == f"hello {n}"
        summary = request.finish()
        assert summary is not None and summary.accepted_chunks == 4
        assert isinstance(list(request)[-1], Finished)


def test_one_thread_feeds_and_another_reads(client: OmniSyncClient) -> None:
    with client.open(output_modalities=["text"]) as request:
        read: list[Event] = []
        reader = threading.Thread(target=lambda: read.extend(request))
        reader.start()
        with client.feed(request.request_id) as feeder:
            feeder.send("hello ")
            feeder.send("world")
            feeder.finish()
        reader.join(10)
        assert text_of(read) == "hello world"


def test_a_conversation(client: OmniSyncClient) -> None:
    with client.converse(output_modalities=["text"]) as talk:
        assert talk.ask("hello").text == "hello"
        assert text_of([e for e in talk.stream("world") if isinstance(e, TextDelta)]) == "world"
        turn: list[bool] = []
        asking = threading.Thread(
            target=lambda: turn.append(talk.ask("x", stage_params=SLOW).interrupted)
        )
        asking.start()
        wait_until(lambda: running(client) > 0, 5)
        time.sleep(0.1)
        talk.interrupt()
        asking.join(10)
        assert turn == [True]


def test_a_session_is_steered(client: OmniSyncClient) -> None:
    params = {"text": {"outputs": 10, "interval_ms": 50}}
    with client.interact("x", output_modalities=["text"], stage_params=params) as session:
        session.event("y", event_id="change", transition_chunks=0)
        items = list(session)
    assert {item.event_id for item in items if isinstance(item, EventChanged)} == {"change"}
    assert isinstance(items[-1], Finished)


def test_another_thread_aborts(client: OmniSyncClient) -> None:
    events = client.stream("x", request_id="doomed", stage_params=SLOW)
    next(events)
    aborting = threading.Thread(target=client.abort, args=("doomed",))
    aborting.start()
    with pytest.raises(CancelledCallError) as caught:
        list(events)
    assert caught.value.reason == "ABORTED_BY_CLIENT"
    aborting.join(5)
    assert client.abort("doomed") == {"doomed": AbortOutcome.ALREADY_FINISHED}


def test_many_threads_use_one_client(client: OmniSyncClient) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = client.generate(f"I am {number}", output_modalities=["text"]).text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == {number: f"I am {number}" for number in range(16)}


def test_closing_ends_what_runs(port: int, client: OmniSyncClient) -> None:
    other = OmniSyncClient(f"127.0.0.1:{port}")
    before = client_threads() - 1
    with other:
        ended: list[Exception] = []
        events = other.stream("x", stage_params=SLOW)
        next(events)

        def read() -> None:
            try:
                list(events)
            except Exception as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.1)
    reader.join(5)
    assert [type(error) for error in ended] == [CancelledCallError]
    assert client_threads() == before
    wait_until(lambda: running(client) == 0, 5)
    other.close()
    with pytest.raises(CancelledCallError, match="closed"):
        other.load()
    with pytest.raises(CancelledCallError, match="closed"):
        next(other.stream("x"))


def test_a_generator_that_outlives_its_client_is_no_trouble(port: int) -> None:
    with OmniSyncClient(f"127.0.0.1:{port}") as client:
        events = client.stream("x", stage_params=SLOW)
        next(events)
    del events
    gc.collect()


def test_all_that_the_asynchronous_client_does(client: OmniSyncClient) -> None:
    missing = {
        name for name in vars(OmniClient) if not name.startswith("_") and not hasattr(client, name)
    }
    assert not missing
    assert client.generate.__doc__ == OmniClient.generate.__doc__


# ---------------------------------------------------------------- programs


def program(code: str, port: int) -> subprocess.Popen[str]:
    """A program that has a client, and streams something long."""
    head = f"""if True:
        from omni_grpc_client import *
        slow = {SLOW!r}
        client = OmniSyncClient("127.0.0.1:{port}")
    """
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_the_call(port: int, client: OmniSyncClient) -> None:
    code = """
        with client:
            try:
                for event in client.stream("x", stage_params=slow):
                    if isinstance(event, TextDelta):
                        print("came", flush=True)
            except KeyboardInterrupt:
                busy = sum(r.running for s in client.load() for r in s.replicas)
                print("caught", client.generate("still here").text, flush=True)
    """
    process = program(code, port)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "came\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out.endswith("caught still here\n")
    wait_until(lambda: running(client) == 0, 5)


@pytest.mark.parametrize("end", ["pass", "import os; os._exit(0)", "raise SystemExit(0)"])
def test_a_client_that_nobody_closed_keeps_no_program(
    port: int, client: OmniSyncClient, end: str
) -> None:
    code = f"""
        events = client.__enter__().stream("x", stage_params=slow)
        next(events)
        {end}
    """
    process = program(code, port)
    try:
        out, err = process.communicate(timeout=15)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "", "")
    wait_until(lambda: running(client) == 0, 5)


def test_a_player_hears_what_comes(port: int, tmp_path: Path) -> None:
    """The README's way to write sound as it arrives."""
    from omni_grpc_client import Audio, WavWriter

    path = tmp_path / "a.wav"
    with OmniSyncClient(f"127.0.0.1:{port}") as client:
        writer: WavWriter | None = None
        for event in client.stream("hello world", output_modalities=["audio"]):
            if isinstance(event, AudioChunk):
                writer = writer or WavWriter(path, event.format)
                writer.write(event.data)
                writer.flush()
                assert Audio.load(path).samples == writer.samples
        assert writer is not None and writer.samples == 2 * TONE
        writer.close()
