"""What the documents say, done: their commands and programs run, what they name exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from omni_grpc.config import read_pipeline
from omni_grpc.placement import check_memory
from omni_grpc.topology import check_pipeline
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc
from scripts import render_docs
from tests.balanced import free_ports
from tests.documents import Block, blocks, documents, is_part_of, perform, table
from tests.running import ServerProcess
from tests.support import ENVIRONMENT, ROOT

DOCS = ROOT / "docs"
ELSEWHERE = {
    "README.md": "test_readme.py",
    "clients/go/README.md": "test_clients.py",
    "clients/java/README.md": "test_clients.py",
    "clients/node/README.md": "test_clients.py",
    "clients/python/README.md": "test_client_readme.py",
    "tests/conformance/README.md": "test_conformance.py",
    "docs/load-balancing.md": "test_load_balancing.py",
    "docs/security.md": "test_secure_start.py",
    "k8s/README.md": "test_cluster_readme.py",
}
"""Documents whose code blocks another file of tests takes."""

RUN = ("sh", "python")
CHECKED = ("yaml", "json", "proto", "haproxy")
"""Languages that are data: held against what reads them, not run."""

COMMAND = re.compile(r"^(omni-grpc|make|grpcurl|pip|kubectl|python) ", re.MULTILINE)


def performed() -> list[Path]:
    """The documents that hold something to run, and that no other test runs."""
    return [
        document
        for document in documents()
        if str(document.relative_to(ROOT)) not in ELSEWHERE
        and any(block.language in RUN and not block.options for block in blocks(document))
    ]


def every_block() -> Iterator[Block]:
    """All code blocks of all documents."""
    for document in documents():
        yield from blocks(document)


@pytest.fixture(scope="module")
def echo_port() -> Iterator[int]:
    """Where `echo` is served."""
    with ServerProcess("echo") as server:
        yield server.await_serving()


def text_of(name: str) -> str:
    """A document's text."""
    return (DOCS / name).read_text()


# ---------------------------------------------------------------- all documents


@pytest.mark.timeout(90)  # many commands, each a process
@pytest.mark.parametrize("document", performed(), ids=lambda path: path.name)
def test_what_a_document_says_can_be_done(document: Path, echo_port: int, tmp_path: Path) -> None:
    found = blocks(document)
    serves = any(re.search(r"^omni-grpc serve", block.text, re.MULTILINE) for block in found)
    (port,) = free_ports(1) if serves else (echo_port,)
    printed = perform(found, tmp_path, port)
    for block in found:
        # What a block is said to print, where it is said.
        if block.options == "printed":
            assert block.text in printed, f"{block} is not in\n{printed}"


@pytest.mark.parametrize(
    ("language", "text", "complaint"),
    [
        ("sh", "false\necho went on\n", "failed: false"),
        ("sh", "false | cat\n", "failed: "),
        ("python", "print(1)\nraise SystemExit('no')\n", "no"),
        ("sh", "omni-grpc serve --pipeline nowhere.yaml\n", "nowhere.yaml: neither a file"),
    ],
)
def test_what_cannot_be_done_is_noticed(
    language: str, text: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=complaint) as failure:
        perform([Block("page.md", 1, language, "", text)], tmp_path, 1)
    assert "went on" not in str(failure.value)


def test_what_has_a_word_or_a_reason_is_left_out(tmp_path: Path) -> None:
    page = [
        Block("page.md", 1, "sh", "no-run: it fails", "false\n"),
        Block("page.md", 2, "sh", "models", "echo models at localhost:50051\n"),
        Block("page.md", 3, "json", "file=kept.json", "{}\n"),
    ]
    assert perform(page, tmp_path, 7) == ""
    assert perform(page, tmp_path, 7, word="models") == "models at localhost:7\n"
    assert (tmp_path / "kept.json").read_text() == "{}\n"


def test_no_code_is_overlooked() -> None:
    for block in every_block():
        if block.document not in ELSEWHERE or block.document == "README.md":
            data = block.language in CHECKED or block.origin or block.options == "printed"
            assert data or block.language in RUN, str(block)
            assert (
                not block.options
                or data
                or block.file
                or block.left_out
                or (block.document == "README.md" and block.options in ("models", "toolchains"))
            ), str(block)
    for name, test in ELSEWHERE.items():
        if (ROOT / name).exists():
            assert (ROOT / "tests" / test).exists(), name


def test_little_is_left_out_and_why() -> None:
    left_out = [(block.document, block.left_out) for block in every_block() if block.left_out]
    assert left_out == [("README.md", "makes the environment that tests run in")]


def test_what_is_shown_of_a_program_is_in_it() -> None:
    shown = [block for block in every_block() if block.origin is not None]
    assert {block.language for block in shown} >= {"js", "go", "java"}
    for block in shown:
        assert block.origin is not None
        assert is_part_of(block.text, (ROOT / block.origin).read_text()), str(block)


def test_what_is_not_in_a_program_is_noticed() -> None:
    program = "a\n  b\nc\nd\n"
    assert is_part_of("b\nc\n", program) and is_part_of("  a\n// ...\nd\n", program)
    assert not any(is_part_of(text, program) for text in ("b\nd\n", "d\n// ...\na\n", "e\n"))


def test_commands_stand_in_blocks_that_are_run() -> None:
    for document in documents():
        fenced = re.findall(r"^```([^\n]*)\n(.*?)^```$", document.read_text(), re.M | re.S)
        for plain in (text for options, text in fenced if not options):
            assert not COMMAND.search(plain), f"{document}: {plain}"


def test_links_lead_somewhere() -> None:
    for document in documents():
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
            name, _, anchor = link.partition("#")
            path = document.parent / name if name else document
            assert path.exists(), f"{document}: {link}"
            if anchor:
                assert anchor in anchors(path.read_text()), f"{document}: {link}"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_data_is_what_reads_it_takes(tmp_path: Path) -> None:
    for document in documents():
        if str(document.relative_to(ROOT)) in ELSEWHERE:
            continue
        for block in blocks(document):
            if block.language == "json":
                json.loads(block.text)
            elif block.language == "yaml" and block.file is None:
                # The others are served.
                file = tmp_path / "pipeline.yaml"
                file.write_text(block.text)
                config = read_pipeline(file)
                check_pipeline(config, str(block))
                check_memory(config.stages)


@pytest.mark.slow
def test_arguments_of_vllm_on_the_pages_are_vllms() -> None:
    stages = [
        stage
        for name in ("models.md", "pipelines.md")
        for block in blocks(DOCS / name, "yaml")
        for stage in yaml.safe_load(block.text)["stages"]
        if stage["engine"] == "vllm"
    ]
    prose = re.findall(r"`(enable_\w+|\w+_size|scheduling_policy|otlp_\w+)", text_of("models.md"))
    used = {key for stage in stages for key in stage.get("engine_args", {})} | set(prose)
    assert len(used) > 8
    names = "[field.name for field in dataclasses.fields(AsyncEngineArgs)]"
    program = (
        f"from vllm.engine.arg_utils import AsyncEngineArgs; import dataclasses; print({names})"
    )
    told = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"'(\w+)'", told.stdout.splitlines()[-1]))
    assert used - known == set()


def rendering(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """scripts/render_docs.py, run in a folder like the repository's root."""
    return subprocess.run(
        (sys.executable, "-m", "scripts.render_docs", *options),
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=25,
    )


def test_what_comes_from_the_code_is_what_the_code_says() -> None:
    checked = rendering(ROOT, "--check")
    assert checked.returncode == 0, checked.stderr


def test_drift_is_noticed_and_mended(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    for name, was in (
        ("contract.md", "Cancelling"),
        ("errors.md", "NOT_FOUND"),
        ("operations.md", "1024"),
    ):
        page = tmp_path / "docs" / name
        page.write_text(page.read_text().replace(was, "drift", 1))
        checked = rendering(tmp_path, "--check")
        assert checked.returncode == 1
        assert checked.stderr.startswith(f"not what the code says: docs/{name};")
        assert rendering(tmp_path).returncode == 0
        assert page.read_text() == (DOCS / name).read_text()


# ---------------------------------------------------------------- one by one


def test_worked_example_is_short() -> None:
    (module,) = blocks(DOCS / "pipelines.md", "python")[:1]
    assert module.file == "morse.py"
    assert module.text.count("\n") < 100


def test_worked_example_knows_the_verbs_that_the_page_does_not_call(tmp_path: Path) -> None:
    for block in blocks(DOCS / "pipelines.md"):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    path = {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    arguments = ("--port", "0", "--admin-port", "0")
    with ServerProcess(
        str(tmp_path / "morse.yaml"), arguments=arguments, environment=path
    ) as server:
        server.await_serving()
        port = server.await_log(r"AdminService on 127\.0\.0\.1:(\d+)")[1]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
            beeper, keyer = ({"stage": name} for name in ("beeper", "keyer"))
            (done,) = admin.ResetCache(admin_pb2.ResetCacheRequest(target=beeper)).results
            assert done.status.code == 0
            (refused,) = admin.ResetCache(admin_pb2.ResetCacheRequest(target=keyer)).results
            assert refused.status.reason == "NOT_SUPPORTED"
        assert server.end() == 0


def test_advice_is_given_for_every_error() -> None:
    advised = {reason.strip("`") for reason, *_ in table(DOCS / "errors.md", "What to do")}
    assert advised == set(render_docs.all_errors())
