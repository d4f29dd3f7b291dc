"""The image's recipe, without a container engine: it is linted, its steps are the environment's
own, and what it copies is enough to install and serve."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from docker.utils.build import exclude_paths
from packaging.specifiers import SpecifierSet

from scripts.manifests.build import K8S
from scripts.manifests.pods import ANNOUNCED, known_options
from tests.recipe import DOCKERFILE, copies, environment, values
from tests.running import BIN
from tests.support import ROOT

USER = "10001:10001"


@pytest.fixture(scope="module")
def context() -> set[str]:
    """The files that a build is given: what .dockerignore leaves of the files that git knows."""
    known = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and line[0] != "#"
    ]
    return set(known) & set(exclude_paths(str(ROOT), patterns, dockerfile="Dockerfile"))


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    """What the linter says."""
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    program = shutil.which("hadolint", path=path)
    assert program is not None, "hadolint is missing: make env-dev"
    return subprocess.run([program, file], cwd=ROOT, capture_output=True, text=True)


# ---------------------------------------------------------------- the recipe


def test_linter_finds_nothing() -> None:
    assert hadolint(DOCKERFILE).stdout == ""


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ('ENTRYPOINT ["tini", "--", "omni-grpc"]', "ENTRYPOINT omni-grpc", "DL3025"),
        ("USER 10001:10001", "USER root", "DL3002"),
        ("--no-install-recommends ", "", "DL3015"),
        ("WORKDIR /opt", "WORKDIR opt", "DL3000"),
    ],
)
def test_linter_finds_mistakes(tmp_path: Path, old: str, new: str, rule: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    file = tmp_path / "Dockerfile"
    file.write_text(text.replace(old, new))
    assert rule in hadolint(file).stdout


def test_steps_are_those_of_make_serve() -> None:
    run = values("RUN")
    called = re.findall(r"scripts/environment (\w+)", "\n".join(run))
    made = re.findall(r"scripts/environment (\w+)", (ROOT / "Makefile").read_text())
    assert called == [step for step in ("venv", "runtime", "packages") if step in made]
    assert any('scripts/environment runtime "${DEVICE}"' in value for value in run)
    assert "DEVICE=cpu" in values("ARG")
    script = (ROOT / "scripts/environment").read_text()
    assert all(re.search(rf"^  {step}\)", script, re.MULTILINE) for step in called)


def test_both_kinds_of_device_have_a_list() -> None:
    assert all((ROOT / f"requirements/{device}.txt").exists() for device in ("cpu", "cuda"))


def test_python_of_the_base_is_one_that_the_project_takes() -> None:
    (image,) = (value for value in values("ARG") if value.startswith("PYTHON_IMAGE="))
    version = re.search(r"python:(\d\.\d+)", image)
    assert version is not None
    assert version[1] in SpecifierSet(">=3.11,<3.13")


def test_it_runs_as_a_number_and_from_arguments() -> None:
    """A cluster can't tell by a name whether a user is root; a shell would keep the signals."""
    assert values("USER")[-1] == USER
    assert json.loads(values("ENTRYPOINT")[-1])[-1] == "omni-grpc"
    assert json.loads(values("CMD")[-1])[0] == "serve"


def test_user_ports_and_folders_are_those_of_the_pods() -> None:
    deployment = (K8S / "base/deployment.yaml").read_text()
    user, group = USER.split(":")
    assert f"runAsUser: {user}" in deployment
    assert f"runAsGroup: {group}" in deployment
    for port in values("EXPOSE")[-1].split():
        assert f"containerPort: {port}" in deployment
    variables = environment()
    for name in ("OMNI_GRPC_CACHE", "HOME", "TMPDIR"):
        assert f"mountPath: {variables[name]}" in deployment


def test_command_line_is_one_that_the_server_takes() -> None:
    program, *arguments = json.loads(values("ENTRYPOINT")[-1])[-1:] + json.loads(values("CMD")[-1])
    later = ANNOUNCED - known_options()
    asked = [a for n, a in enumerate(arguments) if not {a, arguments[n - 1]} & later]
    done = subprocess.run(
        [BIN / program, *asked, "--help"], capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- what it copies


def test_everything_that_is_copied_is_there(context: set[str]) -> None:
    for sources, _ in copies():
        for source in sources:
            assert any(f"{file}/".startswith(f"{source.rstrip('/')}/") for file in context), source


def test_nothing_else_is_sent_to_the_engine(context: set[str]) -> None:
    wanted = tuple(source.rstrip("/") for sources, _ in copies() for source in sources)
    own = {"Dockerfile", ".dockerignore"}
    assert [file for file in context - own if not file.startswith(wanted)] == []


def destination(file: str, source: str, target: str) -> Path | None:
    """Where COPY puts a file of the context; None if the source isn't about it."""
    if not Path(file).is_relative_to(source):
        return None
    if file == source:
        return Path(target, Path(file).name) if target.endswith("/") else Path(target)
    return Path(target, Path(file).relative_to(source))


@pytest.fixture(scope="module")
def image(context: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the context's files where the recipe puts them, and an environment made of
    them by the recipe's own steps; but the packages of the runtime are those of this one."""
    root = tmp_path_factory.mktemp("image")
    for sources, target in copies():
        for file, source in itertools.product(context, sources):
            if (place := destination(file, source, target)) is not None:
                copy = root / "omni-grpc" / place
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, copy)
    variables = {"VENV": str(root / "venv"), "PYTHON": sys.executable, "PATH": os.environ["PATH"]}
    script = root / "omni-grpc/scripts/environment"
    subprocess.run([script, "venv"], env=variables, check=True)
    (packages,) = (root / "venv/lib").glob("python3.*/site-packages")
    (packages / "runtime.pth").write_text("\n".join(site.getsitepackages()))
    subprocess.run([script, "packages"], env=variables, check=True)
    return root


def in_image(image: Path, *command: str) -> str:
    """What a program of the image's environment prints."""
    program, *arguments = command
    done = subprocess.run(
        [image / "venv/bin" / program, *arguments],
        cwd=image,
        env={"PATH": f"{image}/venv/bin:{os.environ['PATH']}", "HOME": str(image)},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_is_copied_is_enough_to_install_and_serve(image: Path) -> None:
    code = "import omni_grpc, omni_grpc_client, omni_grpc.server; print(omni_grpc.__file__)"
    assert in_image(image, "python", "-c", code).startswith(f"{image}/omni-grpc/")
    assert "ok" in in_image(image, "omni-grpc", "check", "smol-voice", "shapes")
