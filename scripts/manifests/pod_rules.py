"""What a pod must be: what it says of ports, health names, times and devices is what the code
does, and it needs no more rights than it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from omni_grpc import __version__
from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline
from omni_grpc.errors import ConfigError
from omni_grpc.health import LIVENESS, READINESS, STARTUP
from omni_grpc.placement import devices_of
from omni_grpc.server import STOP_GRACE_S
from omni_grpc.topology import check_pipeline
from scripts.manifests.build import Build, Object
from scripts.manifests.pods import Pod

PROBES = {
    "startupProbe": STARTUP,
    "readinessProbe": READINESS[-1],
    "livenessProbe": LIVENESS,
}
LISTENERS = {"grpc": "port", "metrics": "metrics_port", "health": "health_port"}
"""The option behind each named port."""
GPU = "nvidia.com/gpu"
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def pod_problems(build: Build) -> Iterator[str]:
    """What is wrong with the pods of a build."""
    for pod in build.pods():
        for rule in (_rights, _volumes, _image):
            yield from (f"{pod.owner}: {found}" for found in rule(pod))
        if pod.server is not None:
            yield from (f"{pod.owner}: {found}" for found in _server_problems(build, pod))


def _server_problems(build: Build, pod: Pod) -> Iterator[str]:
    command_line = pod.command_line
    if command_line.error:
        yield f"omni-grpc serve refuses its arguments: {command_line.error}"
        return
    yield from _probes(pod)
    yield from _ports(pod)
    yield from _grace(pod)
    yield from _exposure(pod)
    try:
        pipelines = pipelines_of(build, pod)
    except ConfigError as error:
        yield str(error)
        return
    yield from _startup(pod, pipelines)
    yield from _gpus(build, pod, pipelines)


# ---------------------------------------------------------------- against the server's settings


def _probes(pod: Pod) -> Iterator[str]:
    server, line = pod.server or {}, pod.command_line
    port = line.port("health_port") or line.port("port")
    for probe, name in PROBES.items():
        asked = server.get(probe, {}).get("grpc")
        if asked is None:
            yield f"{probe}: there is no gRPC probe"
            continue
        if asked.get("service") != name:
            yield f"{probe}: asks for {asked.get('service')!r}, not {name!r}"
        if asked.get("port") != port:
            yield f"{probe}: port {asked.get('port')!r}; health is served on {port}"


def _ports(pod: Pod) -> Iterator[str]:
    line = pod.command_line
    declared = {p["name"]: p["containerPort"] for p in (pod.server or {}).get("ports", [])}
    for name in sorted({"grpc", "metrics", *declared}):
        port = line.port(LISTENERS.get(name, name))
        if declared.get(name) != port:
            yield f"port {name}: {declared.get(name)} is declared, the arguments say {port}"


def _grace(pod: Pod) -> Iterator[str]:
    """A pod is killed when its grace is over: it must have drained and stopped by then."""
    server, settings = pod.server or {}, ServerConfig()
    wait = server.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds")
    if wait is None:
        yield "lifecycle.preStop: no sleep; gateways would still send to a server that drains"
        wait = 0
    drain = float(pod.command_line.value("drain_timeout"))
    # gRPC's last writes, to clients and to operators, then the replicas' stop.
    needed = wait + drain + 2 * STOP_GRACE_S + settings.stop_timeout
    grace = pod.spec.get("terminationGracePeriodSeconds", 30)
    if grace < needed:
        yield (
            f"terminationGracePeriodSeconds: {grace} is less than {needed:g} "
            f"(preStop {wait:g}, drain {drain:g}, stop {needed - wait - drain:g})"
        )


def _exposure(pod: Pod) -> Iterator[str]:
    line = pod.command_line
    host = line.value("host")
    plain = not (line.options.get("tls_cert") and line.options.get("tls_key"))
    if host in LOOPBACK:
        yield f"--host {host}: nobody reaches it"
    elif plain and not line.options.get("insecure"):
        yield f"--host {host}: plaintext there needs --insecure"


def pipelines_of(build: Build, pod: Pod) -> list[PipelineConfig]:
    """The pipelines that a pod serves; files are looked up in the ConfigMaps that it mounts.
    Raises ConfigError."""
    found = []
    for reference in pod.command_line.options["pipeline"]:
        config = _mounted(build, pod, reference) if "/" in reference else load_pipeline(reference)
        check_pipeline(config, reference)
        found.append(config)
    return found


def _mounted(build: Build, pod: Pod, reference: str) -> PipelineConfig:
    path = Path(reference)
    for mount in (pod.server or {}).get("volumeMounts", []):
        if Path(mount["mountPath"]) != path.parent:
            continue
        name = (pod.volume(mount["name"]) or {}).get("configMap", {}).get("name")
        for item in build.of("ConfigMap"):
            if item["metadata"]["name"] == name and path.name in item["data"]:
                return _read(path.name, item["data"][path.name])
    raise ConfigError(f"{reference}: no ConfigMap with that file is mounted there")


def _read(name: str, text: str) -> PipelineConfig:
    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text)
        return load_pipeline(str(file))


def _startup(pod: Pod, pipelines: list[PipelineConfig]) -> Iterator[str]:
    probe = (pod.server or {}).get("startupProbe", {})
    given = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
    longest = max(stage.start_timeout for config in pipelines for stage in config.stages)
    if given <= longest:
        yield f"startupProbe: gives {given} s, a stage may load for {longest:g} s"


# ---------------------------------------------------------------- devices


def _gpus(build: Build, pod: Pod, pipelines: list[PipelineConfig]) -> Iterator[str]:
    used = {
        device
        for config in pipelines
        for stage in config.stages
        for replica in range(stage.replicas)
        for device in devices_of(stage.device(replica))
        if device.startswith("cuda")
    }
    limits = (pod.server or {}).get("resources", {}).get("limits", {})
    given = int(limits.get(GPU, 0)) + _claimed(build, pod)
    if given != len(used):
        yield f"the pod gets {given} GPUs, its pipelines use {len(used)}"


def _claimed(build: Build, pod: Pod) -> int:
    """GPUs by claims of dynamic resource allocation."""
    named = {c["name"] for c in (pod.server or {}).get("resources", {}).get("claims", [])}
    templates = {
        claim.get("resourceClaimTemplateName")
        for claim in pod.spec.get("resourceClaims", [])
        if claim["name"] in named
    }
    return sum(
        request["exactly"].get("count", 1)
        for item in build.of("ResourceClaimTemplate")
        if item["metadata"]["name"] in templates
        for request in item["spec"]["spec"]["devices"]["requests"]
    )


# ---------------------------------------------------------------- rights, volumes, image


def _rights(pod: Pod) -> Iterator[str]:
    """Pod Security's level "restricted", and a root file system that is read-only."""
    whole = pod.spec.get("securityContext", {})
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken: the pod gets a token that it has no use for"
    if pod.spec.get("enableServiceLinks") is not False:
        yield "enableServiceLinks: names of Services would become variables of vLLM"
    if any(pod.spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")):
        yield "it shares a namespace of its node"
    if not (whole.get("runAsNonRoot") and whole.get("runAsUser")):
        yield "securityContext: runAsNonRoot, with the number of a user, is missing"
    if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext.seccompProfile: not RuntimeDefault"
    for container in pod.containers:
        yield from (f"container {container['name']}: {found}" for found in _confined(container))


def _confined(container: Object) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem is not true"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "it doesn't drop all capabilities, or adds some"
    if "memory" not in container.get("resources", {}).get("limits", {}):
        yield "it has no memory limit"


def _volumes(pod: Pod) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    mounted = set()
    for container in pod.containers:
        places = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        mounted |= set(places.values())
        for path, name in places.items():
            if name not in volumes:
                yield f"container {container['name']}: {path}: there is no volume {name}"
        # HOME and TMPDIR of the image.
        if "emptyDir" not in volumes.get(places.get("/tmp", ""), {}):
            yield f"container {container['name']}: /tmp must be an emptyDir"
    for name, volume in volumes.items():
        if not set(volume) & RESTRICTED_VOLUMES:
            yield f"volume {name}: a kind that level restricted forbids"
        if name not in mounted:
            yield f"volume {name}: nobody mounts it"
    main = pod.spec["containers"][0]
    shm = {mount["mountPath"]: mount["name"] for mount in main.get("volumeMounts", [])}
    if volumes.get(shm.get("/dev/shm", ""), {}).get("emptyDir", {}).get("medium") != "Memory":
        yield "/dev/shm: not an emptyDir in memory; the default is 64 MiB, which engines outgrow"


def _image(pod: Pod) -> Iterator[str]:
    """One image, ours, of this version, and of the kind that the pod's devices need."""
    images = {container["image"] for container in pod.containers}
    if len(images) > 1:
        yield f"different images: {', '.join(sorted(images))}"
    limits = pod.spec["containers"][0].get("resources", {}).get("limits", {})
    kind = "cuda" if GPU in limits or pod.spec.get("resourceClaims") else "cpu"
    pattern = rf"(\S+/)?omni-grpc:{re.escape(__version__)}-{kind}"
    for image in images:
        if not re.fullmatch(pattern, image):
            yield f"image {image}: not omni-grpc:{__version__}-{kind}"
