"""Pod templates, and the command line of the server in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer
from typer.exceptions import TyperException

from omni_grpc.cli import app
from omni_grpc.config import ServerConfig

Object = dict[str, Any]

ANNOUNCED = {"--metrics-port"}
"""Options of `omni-grpc serve` that the manifests may use before the command has them."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`omni-grpc serve …`: what it parses to, defaults included, or why it doesn't."""

    options: Mapping[str, Any]
    """By the names of the parameters, `drain_timeout`; those announced by what is written."""
    error: str = ""

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> CommandLine:
        """The arguments after `serve`."""
        known = known_options()
        later: dict[str, Any] = {}
        rest = []
        for argument in arguments:
            option, _, value = argument.partition("=")
            if option in ANNOUNCED - known:
                later[option.strip("-").replace("-", "_")] = value or True
            else:
                rest.append(argument)
        try:
            context = _command("serve").make_context("serve", rest)
        except TyperException as error:
            return cls(later, str(error))
        return cls({**context.params, **later})

    def value(self, name: str) -> Any:
        """An option's value, else the server's default; None where it is off."""
        given = self.options.get(name)
        return getattr(ServerConfig(), name, None) if given is None else given

    def port(self, name: str) -> int | None:
        """The port that an option names; None where it is off."""
        value = self.value(name)
        return None if value is None else int(value)


@cache
def _command(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


@cache
def known_options() -> frozenset[str]:
    """The options of `omni-grpc serve`."""
    return frozenset(option for parameter in _command("serve").params for option in parameter.opts)


@dataclass(frozen=True, slots=True)
class Pod:
    """A workload's pod template."""

    owner: str
    """`Deployment/omni-grpc`."""
    labels: Mapping[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """All containers, those that run first among them."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def server(self) -> Object | None:
        """The container that serves; None in a pod that doesn't."""
        for container in self.spec["containers"]:
            if "command" not in container and container.get("args", [""])[0] == "serve":
                return dict(container)
        return None

    @property
    def command_line(self) -> CommandLine:
        """That of the container that serves."""
        server = self.server
        return CommandLine.parse(server["args"][1:] if server else ())

    def volume(self, name: str) -> Object | None:
        """The volume of that name."""
        return next((dict(v) for v in self.spec.get("volumes", []) if v["name"] == name), None)


def pods_of(item: Object) -> Iterator[Pod]:
    """The pod templates of a workload; none of any other object."""
    name = f"{item.get('kind')}/{item['metadata']['name']}"
    match item.get("kind"):
        case "Deployment":
            yield _pod(name, item["spec"]["template"])
        case "LeaderWorkerSet":
            group = item["spec"]["leaderWorkerTemplate"]
            for role in ("leaderTemplate", "workerTemplate"):
                if role in group:
                    yield _pod(f"{name} ({role})", group[role])


def _pod(owner: str, template: Object) -> Pod:
    return Pod(owner, template.get("metadata", {}).get("labels", {}), template["spec"])
