"""What objects say of each other: a selector finds what it is meant for, a name names something
that is there, a port is one that is served, a route leads to services that the server has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omni_grpc.health import REFLECTION_V1, REFLECTION_V1ALPHA, SERVICE
from scripts.manifests.build import Build, Object
from scripts.manifests.pods import Pod, pods_of

SERVED = {SERVICE, "grpc.health.v1.Health", REFLECTION_V1, REFLECTION_V1ALPHA}
HEADER = "omni-request-id"
EXTERNAL = {("Service", "omni-grpc-epp"), ("Secret", "omni-grpc-tls")}
"""What the objects of others are called, which a build names and doesn't bring."""


def link_problems(build: Build) -> Iterator[str]:
    """What is wrong between the objects of a build."""
    for item in build.objects:
        name = f"{item['kind']}/{item['metadata']['name']}"
        for rule in (_selector, _references, _ports, _routes, _balance, _namespace):
            yield from (f"{name}: {found}" for found in rule(build, item))
    yield from _complete(build)


def _serving(build: Build) -> list[Pod]:
    return [pod for pod in build.pods() if pod.server is not None]


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector: `matchLabels` and `In` of `matchExpressions`, as far as we use them."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(part["key"]) in part["values"] for part in selector.get("matchExpressions", [])
    )


# ---------------------------------------------------------------- selectors


def _selector(build: Build, item: Object) -> Iterator[str]:
    match item["kind"]:
        case "Deployment":
            (pod,) = pods_of(item)
            if not _matches(item["spec"]["selector"], pod.labels):
                yield "selector: its own pods don't match"
        case "Service":
            yield from _selects(build, {"matchLabels": item["spec"].get("selector", {})})
        case "PodDisruptionBudget" | "InferencePool":
            yield from _selects(build, item["spec"]["selector"])
        case "NetworkPolicy":
            yield from _selects(build, item["spec"]["podSelector"], workers=True)
        case "ServiceMonitor":
            found = _monitored(build, item)
            if len(found) != 1:
                yield f"selector: finds {len(found)} Services, so pods are scraped as often"


def _selects(build: Build, selector: Mapping[str, Any], workers: bool = False) -> Iterator[str]:
    """The pods that serve must be found, and no other (but by a policy)."""
    if not any(selector.values()):
        yield "selector: an empty one selects every pod of the namespace"
        return
    for pod in build.pods():
        found = _matches(selector, pod.labels)
        if pod.server is not None and not found:
            yield f"selector: doesn't find the pods of {pod.owner}"
        if pod.server is None and found and not workers:
            yield f"selector: finds the pods of {pod.owner}, which serve nobody"


def _monitored(build: Build, item: Object) -> list[Object]:
    return [
        service
        for service in build.of("Service")
        if _matches(item["spec"]["selector"], service["metadata"].get("labels", {}))
    ]


# ---------------------------------------------------------------- names


def _references(build: Build, item: Object) -> Iterator[str]:
    for kind, name in _named(item):
        if (kind, name) not in EXTERNAL and not build.has(kind, name):
            yield f"there is no {kind} {name}"


def _named(item: Object) -> Iterator[tuple[str, str]]:
    """The objects that an object names."""
    spec = item.get("spec", {})
    for pod in pods_of(item):
        yield from _named_by_pod(pod)
    match item["kind"]:
        case "ScaledObject":
            target = spec["scaleTargetRef"]
            yield target.get("kind", "Deployment"), target["name"]
        case "BackendTrafficPolicy" | "ClientTrafficPolicy":
            yield from ((target["kind"], target["name"]) for target in spec["targetRefs"])
        case "GRPCRoute" | "HTTPRoute":
            yield from (("Gateway", parent["name"]) for parent in spec["parentRefs"])
            for rule in spec["rules"]:
                for backend in rule["backendRefs"]:
                    yield backend.get("kind", "Service"), backend["name"]
        case "Gateway":
            for listener in spec["listeners"]:
                for secret in listener.get("tls", {}).get("certificateRefs", []):
                    yield "Secret", secret["name"]
        case "InferencePool":
            yield "Service", spec["endpointPickerRef"]["name"]


def _named_by_pod(pod: Pod) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod.spec.get("serviceAccountName", "default")
    for volume in pod.spec.get("volumes", []):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for claim in pod.spec.get("resourceClaims", []):
        yield "ResourceClaimTemplate", claim["resourceClaimTemplateName"]


# ---------------------------------------------------------------- ports


def _ports(build: Build, item: Object) -> Iterator[str]:
    served = _served(build)
    match item["kind"]:
        case "Service":
            for port in item["spec"]["ports"]:
                if served.get(port["targetPort"]) != port["port"]:
                    yield f"port {port['port']}: pods serve {port['targetPort']} on another"
                if port["name"] == "grpc" and port.get("appProtocol") != _protocol(build):
                    yield f"port grpc: appProtocol is not {_protocol(build)}"
        case "NetworkPolicy":
            for rule in item["spec"].get("ingress", []):
                for port in rule.get("ports", []):
                    if port["port"] not in {*served, *served.values()}:
                        yield f"ingress: no pod serves port {port['port']}"
        case "ServiceMonitor":
            for endpoint in item["spec"]["endpoints"]:
                for service in _monitored(build, item):
                    if endpoint["port"] not in {p["name"] for p in service["spec"]["ports"]}:
                        yield f"endpoints: the Service has no port {endpoint['port']}"
        case "InferencePool":
            numbers = [port["number"] for port in item["spec"]["targetPorts"]]
            if numbers != [served.get("grpc")]:
                yield f"targetPorts: {numbers}, pods serve gRPC on {served.get('grpc')}"
            if item["spec"].get("appProtocol") != "kubernetes.io/h2c":
                yield "appProtocol: not kubernetes.io/h2c, so HTTP/1.1"


def _protocol(build: Build) -> str | None:
    """What a gateway should speak: HTTP/2 in plain text, or what TLS negotiates."""
    encrypted = any(pod.command_line.options.get("tls_cert") for pod in _serving(build))
    return None if encrypted else "kubernetes.io/h2c"


def _served(build: Build) -> dict[str, int]:
    """The ports of the pods that serve, by name."""
    return {
        port["name"]: port["containerPort"]
        for pod in _serving(build)
        for port in (pod.server or {}).get("ports", [])
    }


# ---------------------------------------------------------------- routes


def _routes(build: Build, item: Object) -> Iterator[str]:
    if item["kind"] not in ("GRPCRoute", "HTTPRoute"):
        return
    routed = {name for rule in item["spec"]["rules"] for name in _routed(rule)}
    if routed != SERVED:
        yield f"routes {', '.join(sorted(routed ^ SERVED))} wrongly, or not at all"
    for rule in item["spec"]["rules"]:
        for backend in rule["backendRefs"]:
            yield from _backend(build, backend)


def _routed(rule: Object) -> Iterator[str]:
    for match in rule["matches"]:
        if "path" in match:
            yield match["path"]["value"].strip("/")
        else:
            yield match["method"]["service"]


def _backend(build: Build, backend: Object) -> Iterator[str]:
    for service in build.of("Service"):
        if backend.get("kind", "Service") == "Service" and (
            service["metadata"]["name"] == backend["name"]
        ):
            ports = {port["port"] for port in service["spec"]["ports"]}
            if backend.get("port") not in ports:
                yield f"backendRefs: Service {backend['name']} has no port {backend.get('port')}"


def _balance(build: Build, item: Object) -> Iterator[str]:
    """All RPCs about one request must meet on one pod."""
    if item["kind"] != "BackendTrafficPolicy":
        return
    hashed = item["spec"].get("loadBalancer", {}).get("consistentHash", {}).get("headers", [])
    if [header["name"] for header in hashed] != [HEADER]:
        yield f"loadBalancer: doesn't hash {HEADER}"
    if item["spec"].get("timeout", {}).get("http", {}).get("requestTimeout") != "0s":
        yield "timeout.http.requestTimeout: not 0s, so Envoy ends a stream after 15 s"


# ---------------------------------------------------------------- the whole


def _namespace(build: Build, item: Object) -> Iterator[str]:
    spaces = {space["metadata"]["name"] for space in build.of("Namespace")}
    if item["kind"] != "Namespace" and item["metadata"].get("namespace") not in spaces:
        yield f"namespace {item['metadata'].get('namespace')} is not among {', '.join(spaces)}"


def _complete(build: Build) -> Iterator[str]:
    """What every build has."""
    if not _serving(build):
        yield "no pod serves"
    for space in build.of("Namespace"):
        if space["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"Namespace/{space['metadata']['name']}: not held to level restricted"
    wanted = ("Namespace", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy", "Service")
    yield from (f"there is no {kind}" for kind in wanted if not build.of(kind))
    if not any(service["spec"].get("clusterIP") == "None" for service in build.of("Service")):
        yield "there is no headless Service"
    for item in build.of("ServiceAccount"):
        if item.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount/{item['metadata']['name']}: mounts its token"
    scaled = {item["spec"]["scaleTargetRef"]["name"] for item in build.of("ScaledObject")}
    for item in build.of("Deployment", "LeaderWorkerSet"):
        if item["metadata"]["name"] in scaled and "replicas" in item["spec"]:
            yield f"{item['kind']}/{item['metadata']['name']}: replicas would undo the scaler's"
