"""What is wrong with a configuration is said before anything starts: file, path and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from omni_grpc.cli import app
from omni_grpc.config import ServerConfig, StageConfig, builtin_pipelines, load_pipeline
from omni_grpc.errors import ConfigError
from omni_grpc.pipelines.bridges import load_bridge
from omni_grpc.pipelines.expansions import load_expansion
from omni_grpc.pipelines.transforms import load_transform
from omni_grpc.server import Server
from omni_grpc.topology import check_pipeline
from tests.running import ServerProcess, text_pipeline

ONE = "{name: one, engine: fake, output: text}"
TWO = "{name: two, engine: fake, inputs: [one], output: audio}"


def stages(*lines: str) -> str:
    """A pipeline of these stages."""
    return "name: mine\nstages:\n" + "".join(f"  - {line}\n" for line in lines)


def one(fields: str) -> str:
    """A pipeline of one fake stage with these fields beside its name and output."""
    return stages(f"{{name: one, engine: fake, output: text, {fields}}}")


def two(fields: str) -> str:
    """A pipeline whose second stage has these fields beside its name and input."""
    return stages(ONE, f"{{name: two, inputs: [one], output: audio, {fields}}}")


# By name: the file, and what its error must say, path first.
WRONG: dict[str, tuple[str, list[str]]] = {
    "unknown key": (one("") + "colour: red\n", ["  colour: Extra inputs are not permitted"]),
    "unknown key of a stage": (one("colour: red"), ["  stages[0].colour: Extra inputs"]),
    "unknown key of a stage's policy": (
        one("restart: {budgets: 3}"),
        ["  stages[0].restart.budgets: Extra inputs"],
    ),
    "no name": ("stages:\n  - " + ONE, ["  name: Field required"]),
    "name with a space": ("name: my own\nstages:\n  - " + ONE, ["  name: String should match"]),
    "no stages": ("name: mine", ["  stages: Field required"]),
    "empty stages": ("name: mine\nstages: []", ["  stages: Tuple should have at least 1 item"]),
    "stages not a list": ("name: mine\nstages: one", ["  stages: Input should be a valid tuple"]),
    "unknown engine": (
        stages("{name: one, engine: steam, output: text}"),
        ["  stages[0].engine: Input should be 'vllm'"],
    ),
    "unknown modality": (
        stages("{name: one, engine: fake, output: smell}"),
        ["  stages[0].output: Input should be 'text'"],
    ),
    "unknown prompt": (one("") + "prompts: [songs]\n", ["  prompts[0]: Input should be 'text'"]),
    "two errors": (
        one("replicas: 0, threads: none"),
        ["  stages[0].replicas: Input should be greater", "  stages[0].threads: Input should be"],
    ),
    "time of nothing": (one("") + "max_duration: 0\n", ["  max_duration: Input should be greater"]),
    "time without end": (one("stage_timeout: .inf"), ["  stages[0].stage_timeout: Input should"]),
    "same name twice": (
        stages(ONE, "{name: one, engine: fake, inputs: [one], output: audio}"),
        ["stages[1] (one): the name is taken by an earlier stage"],
    ),
    "input that does not exist": (
        stages(ONE, "{name: two, engine: fake, inputs: [nobody], output: audio}"),
        ["stages[1] (two): inputs: 'nobody' is not an earlier stage"],
    ),
    "input from a later stage": (
        stages(ONE, "{name: two, engine: fake, inputs: [three]}", TWO.replace("two", "three")),
        ["stages[1] (two): inputs: 'three' is not an earlier stage"],
    ),
    "input from itself": (
        stages(ONE, "{name: two, engine: fake, inputs: [two], output: audio}"),
        ["stages[1] (two): inputs: 'two' is not an earlier stage"],
    ),
    "first stage with inputs": (
        stages("{name: one, engine: fake, inputs: [one], output: text}"),
        ["stages[0] (one): the first stage takes the prompt and has no inputs"],
    ),
    "second stage without inputs": (
        stages(ONE, "{name: two, engine: fake, output: audio}"),
        ["stages[1] (two): the first stage takes the prompt and has no inputs, others have some"],
    ),
    "two outputs of one modality": (
        stages(ONE, TWO.replace("audio", "text")),
        ["two stages have the same output modality"],
    ),
    "no output": (stages("{name: one, engine: fake}"), ["no stage has an output"]),
    "output that nobody takes": (
        stages(ONE, "{name: two, engine: fake, inputs: [one]}"),
        ["stages[1] (two): nobody takes its output"],
    ),
    "devices that are not as many as replicas": (
        one("replicas: 3, devices: [cpu, cpu]"),
        ["  stages[0]: devices: give one for all 3 replicas, or one for each, not 2"],
    ),
    "python without import path": (
        stages("{name: one, engine: python, model: mine, output: text}"),
        ["  stages[0]: model: engine 'python' needs the class's import path"],
    ),
    "engine without model": (
        stages("{name: one, engine: vllm, output: text}"),
        ["  stages[0]: model: engine 'vllm' needs a model"],
    ),
    "unknown bridge": (
        two("engine: fake, bridge: teleport"),
        ["stages[1] (two)", "bridge 'teleport'", "neither one of forward"],
    ),
    "bridge of a module that is not there": (
        two("engine: fake, bridge: 'nowhere.at_all:Bridge'"),
        ["stages[1] (two)", "bridge 'nowhere.at_all:Bridge'", "No module named 'nowhere'"],
    ),
    "bridge that its module lacks": (
        two("engine: fake, bridge: 'tests.example_stages:Nobody'"),
        ["stages[1] (two)", "bridge 'tests.example_stages:Nobody'", "no attribute 'Nobody'"],
    ),
    "sampling default of the wrong type": (
        stages("{name: one, engine: vllm, model: m, output: text, defaults: {temperature: hot}}"),
        ["stages[0] (one): defaults", "got `str` - at `$.temperature`"],
    ),
    "unknown sampling default": (
        stages("{name: one, engine: vllm, model: m, output: text, defaults: {heat: 1}}"),
        ["stages[0] (one): defaults", "unknown field `heat`"],
    ),
    "unknown sampling constraint": (
        stages("{name: one, engine: vllm, model: m, output: text, constraints: {heat: 1}}"),
        ["stages[0] (one): constraints", "unknown field `heat`"],
    ),
    "unknown diffusion default": (
        two("engine: diffusion, model: m, defaults: {temperature: 1}"),
        ["stages[1] (two): defaults", "unknown field `temperature`"],
    ),
    "unknown codec default": (
        two("engine: codec, model: m, defaults: {voice: 3}"),
        ["stages[1] (two): defaults", "at `$.voice`"],
    ),
    "unknown key of a fake script": (
        one("defaults: {output: 3}"),
        ["stages[0] (one): defaults", "params.output: is not one of outputs, interval_ms"],
    ),
    "fake script of the wrong type": (
        one("defaults: {outputs: many}"),
        ["stages[0] (one): defaults", "params.outputs: Expected `int | null`, got `str`"],
    ),
    "fake script out of range": (
        one("defaults: {interval_ms: -1}"),
        ["stages[0] (one): defaults", "params.interval_ms: must be from 0 to"],
    ),
    "not YAML": ("name: mine\nstages: [\n", ["not YAML", "line 3"]),
    "a list": ("- name: mine\n", ["a pipeline is a mapping with 'name' and 'stages'"]),
    "nothing": ("", ["a pipeline is a mapping with 'name' and 'stages'"]),
}


def check(*references: object) -> Result:
    """`omni-grpc check`."""
    return CliRunner().invoke(app, ["check", *(str(reference) for reference in references)])


@pytest.mark.parametrize("name", WRONG)
def test_check_says_file_path_and_reason(name: str, tmp_path: Path) -> None:
    content, wanted = WRONG[name]
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    result = check(file)
    assert result.exit_code == 2
    for part in (str(file), *wanted):
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert "pydantic" not in result.stderr
    assert result.stdout == ""


def test_reference_that_is_no_file_names_the_built_in_ones(tmp_path: Path) -> None:
    result = check("no-such-pipeline", tmp_path)
    assert result.exit_code == 2
    for reference in ("no-such-pipeline", str(tmp_path)):
        assert f"{reference}: neither a file nor a built-in pipeline" in result.stderr
    assert all(name in result.stderr for name in builtin_pipelines())


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00name")
    result = check(file)
    assert result.exit_code == 2
    assert str(file) in result.stderr and "decode" in result.stderr


def test_one_wrong_file_does_not_hide_the_others(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(stages(ONE, TWO))
    bad.write_text("[]")
    result = check(bad, good)
    assert result.exit_code == 2
    assert f"{good}: ok, pipeline 'mine': one → two" in result.stdout
    assert str(bad) in result.stderr


def test_bridge_whose_module_is_broken_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_bridge.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "mine.yaml"
    file.write_text(two("engine: fake, bridge: 'broken_bridge:Bridge'"))
    result = check(file)
    assert result.exit_code == 2
    assert "stages[1] (two)" in result.stderr and "at import" in result.stderr


@pytest.mark.parametrize("name", builtin_pipelines())
def test_built_in_pipeline_is_right(name: str) -> None:
    result = check(name)
    assert (result.exit_code, result.stderr) == (0, "")
    config = load_pipeline(name)
    assert config.name == name
    assert config.description
    check_pipeline(config, name)


def test_file_of_a_built_in_pipeline_is_that_pipeline() -> None:
    for name, path in builtin_pipelines().items():
        assert load_pipeline(str(path)) == load_pipeline(name)


def test_serve_refuses_what_check_refuses(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(one("colour: red"))
    with ServerProcess(str(file)) as server:
        assert server.await_exit() == 2
        assert f"{file}:\n  stages[0].colour: Extra inputs are not permitted" in server.log
        assert "Traceback" not in server.log
        assert "listening" not in server.log


# ---------------------------------------------------------------- the server's settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", "http"),
        ("max_requests", 0),
        ("max_receive_bytes", 1000),
        ("queue_bytes", 0),
        ("write_timeout", 0),
        ("drain_timeout", -1),
        ("stop_timeout", float("inf")),
        ("heartbeat_timeout", 0),
        ("ipc", "carrier pigeon"),
        ("ipc", "tcp://127.0.0.1:5000"),
        ("colour", "red"),
    ],
)
def test_server_setting_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ServerConfig.model_validate({field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize("address", ["ipc", "tcp://127.0.0.1", "tcp://0.0.0.0"])
def test_line_to_replicas_is_ipc_or_an_address(address: str) -> None:
    assert ServerConfig(ipc=address).ipc == address


def test_serve_names_the_option_that_is_out_of_range() -> None:
    with ServerProcess("echo", arguments=("--port", "65536")) as server:
        assert server.await_exit() == 2
        assert "port" in server.log
        assert "65535" in server.log
        assert "Traceback" not in server.log


def test_configuration_cannot_be_changed() -> None:
    for config in (ServerConfig(), text_pipeline("mine"), text_pipeline("mine").stages[0]):
        with pytest.raises(ValidationError, match="frozen"):
            config.name = "other"  # type: ignore[misc, union-attr]


async def test_server_wants_pipelines_of_different_names() -> None:
    with pytest.raises(ConfigError, match="no pipeline"):
        Server(ServerConfig(port=0), [])
    with pytest.raises(ConfigError, match="same name among mine, mine"):
        Server(ServerConfig(port=0), [text_pipeline("mine"), text_pipeline("mine")])


def test_each_replica_has_a_device() -> None:
    fields = {"name": "one", "engine": "fake", "replicas": 2}
    one_each = StageConfig.model_validate({**fields, "devices": ["cuda:0", "cuda:1"]})
    assert [one_each.device(number) for number in range(2)] == ["cuda:0", "cuda:1"]
    for_all = StageConfig.model_validate({**fields, "devices": ["cuda:0,1"]})
    assert [for_all.device(number) for number in range(2)] == ["cuda:0,1", "cuda:0,1"]


@pytest.mark.parametrize("kind", ["transform", "expansion", "bridge"])
def test_a_module_that_raises_when_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever a user's own module raises is a wrong configuration, not a traceback."""
    (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaders: dict[str, Any] = {
        "transform": load_transform,
        "expansion": load_expansion,
        "bridge": load_bridge,
    }
    with pytest.raises(ConfigError, match=f"{kind} 'breaks_at_import:make'.*no luck"):
        loaders[kind]("breaks_at_import:make")
