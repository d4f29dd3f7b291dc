"""Every check of the manifests can fail: a mistake is made, and it is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.check_manifests import problems
from scripts.manifests.build import K8S, Build, BuildError, render
from tests.manifests import GONE, OVERLAYS, built, changed, tool
from tests.running import Command
from tests.support import ROOT

# Whichever test is first waits for all builds.
pytestmark = pytest.mark.timeout(120)

SERVER = "spec.template.spec.containers.0"
LEADER = "spec.leaderWorkerTemplate.leaderTemplate.spec"
WORKER = "spec.leaderWorkerTemplate.workerTemplate.spec"
DEPLOYMENT = "Deployment/omni-grpc"
GROUP = "LeaderWorkerSet/omni-grpc"
MISTAKES: list[tuple[str, str, str, object, str]] = [
    # Fields that no schema knows, of Kubernetes' own kinds and of others'.
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.readinessProb", {}, "readinessProb"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.livenessProbe.grpc.port", "grpc", "'grpc' is not of type"),
    ("cpu-demo", DEPLOYMENT, "spec.replica", 2, "replica"),
    ("cpu-demo", "Service/omni-grpc", "spec.ports.0.appProtocl", "x", "appProtocl"),
    ("cpu-demo", "Service/omni-grpc", "apiVersion", "v2", "no such kind"),
    ("multi-gpu", "GRPCRoute/omni-grpc", "spec.rules.0.backends", [], "backends"),
    ("multi-gpu", "GRPCRoute/omni-grpc", "spec.rules.0.matches", GONE, "matches"),
    ("multi-gpu", "Gateway/omni-grpc", "spec.listeners.0.protocol", "GRPC", "protocol"),
    ("multi-gpu", "Gateway/omni-grpc", "metadata.labls", {}, "labls"),
    ("multi-gpu", "Gateway/omni-grpc", "kind", "Gatewy", "no schema"),
    ("multi-gpu", "BackendTrafficPolicy/omni-grpc", "spec.timeouts", {}, "timeouts"),
    (
        *("multi-gpu", "BackendTrafficPolicy/omni-grpc"),
        *("spec.loadBalancer.consistentHash.headers", GONE, "headers"),
    ),
    ("multi-gpu", "ClientTrafficPolicy/omni-grpc", "spec.timeout.http.streamTimeout", "1h", "http"),
    ("multi-gpu", "ScaledObject/omni-grpc", "spec.triggers.0.metadata.threshold", 8, "threshold"),
    ("multi-gpu", "ScaledObject/omni-grpc", "spec.maxReplicas", 8, "maxReplicas"),
    ("multi-gpu", "ServiceMonitor/omni-grpc", "spec.endpoints.0.ports", 1, "ports"),
    ("inference-pool", "InferencePool/omni-grpc", "spec.targetPortNumber", 1, "targetPortNumber"),
    ("inference-pool", "HTTPRoute/omni-grpc-pool", "spec.rules.0.timeouts.request", "0", "request"),
    ("leaderworkerset", GROUP, "spec.leaderWorkerTemplate.sizes", 2, "sizes"),
    ("leaderworkerset", GROUP, f"{WORKER}.containers.0.imag", "x", "imag"),
    ("dra", "ResourceClaimTemplate/omni-grpc-gpu", "spec.spec.device", {}, "device"),
    # Probes, ports and times, against the server.
    (
        *("cpu-demo", DEPLOYMENT, f"{SERVER}.readinessProbe.grpc.service", "readiness"),
        "asks for 'readiness', not 'omni-readiness'",
    ),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.startupProbe", GONE, "startupProbe: there is no gRPC"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.livenessProbe.grpc.port", 50052, "livenessProbe: port"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.startupProbe.failureThreshold", 60, "gives 300 s"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.args.4", "--port=50052", "port grpc: 50051"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.args.5", "--metrics-port=9090", "port metrics: 9464"),
    ("cpu-demo", DEPLOYMENT, "spec.template.spec.terminationGracePeriodSeconds", 53, "less than"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.args.6", "--drain-timeout=37", "60 is less than 61"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.lifecycle", GONE, "preStop: no sleep"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.lifecycle.preStop.sleep.seconds", 20, "preStop 20"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.args.6", "--drain-time=30", "refuses its arguments"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.args.2", "--host=127.0.0.1", "nobody reaches it"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.args.3", "--drain-timeout=30", "needs --insecure"),
    ("tls", DEPLOYMENT, f"{SERVER}.livenessProbe.grpc.port", 50051, "health is served on 50052"),
    ("tls", DEPLOYMENT, f"{SERVER}.args.7", "--drain-timeout=30", "needs --insecure"),
    ("tls", DEPLOYMENT, f"{SERVER}.ports.2.containerPort", 50055, "port health: 50055"),
    (
        *("tls", "Service/omni-grpc", "spec.ports.0.appProtocol", "kubernetes.io/h2c"),
        "appProtocol is not None",
    ),
    # The pipeline and its devices.
    (
        "cpu-demo",
        DEPLOYMENT,
        f"{SERVER}.args.1",
        "--pipeline=/etc/omni-grpc/p.yaml",
        "no ConfigMap",
    ),
    ("one-gpu", DEPLOYMENT, f"{SERVER}.resources.limits.nvidia~com/gpu", "2", "gets 2 GPUs"),
    ("multi-gpu", DEPLOYMENT, f"{SERVER}.resources.limits.nvidia~com/gpu", "1", "gets 1 GPUs"),
    ("dra", DEPLOYMENT, f"{SERVER}.resources.claims", GONE, "gets 0 GPUs"),
    # Rights, volumes, image.
    ("cpu-demo", DEPLOYMENT, "spec.template.spec.hostNetwork", True, "namespace of its node"),
    ("cpu-demo", DEPLOYMENT, "spec.template.spec.securityContext.runAsUser", GONE, "runAsNonRoot"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.securityContext", GONE, "readOnlyRootFilesystem"),
    (
        *("cpu-demo", DEPLOYMENT, f"{SERVER}.securityContext.capabilities"),
        *({"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "capabilities"),
    ),
    ("cpu-demo", DEPLOYMENT, "spec.template.spec.automountServiceAccountToken", GONE, "token"),
    ("cpu-demo", DEPLOYMENT, "spec.template.spec.enableServiceLinks", True, "enableServiceLinks"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.volumeMounts.3", GONE, "/dev/shm"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.volumeMounts.2", GONE, "/tmp must be an emptyDir"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.volumeMounts.1.name", "model", "there is no volume model"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.resources.limits", GONE, "no memory limit"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.image", "omni-grpc:latest", "image omni-grpc:latest"),
    ("cpu-demo", DEPLOYMENT, f"{SERVER}.image", "omni-grpc:0.1.0-cuda", "different images"),
    # Selectors, names, ports, routes.
    ("cpu-demo", DEPLOYMENT, "spec.selector.matchLabels", {"app": "omni"}, "its own pods"),
    ("cpu-demo", "Service/omni-grpc", "spec.selector", {"app": "omni-grpc"}, "doesn't find"),
    ("cpu-demo", "Service/omni-grpc", "spec.selector", GONE, "every pod of the namespace"),
    ("cpu-demo", "PodDisruptionBudget/omni-grpc", "spec.selector.matchLabels", {"a": "b"}, "find"),
    ("cpu-demo", "NetworkPolicy/omni-grpc", "spec.podSelector", {}, "every pod of the namespace"),
    ("cpu-demo", "NetworkPolicy/omni-grpc", "spec.ingress.0.ports.0.port", 80, "serves port 80"),
    ("cpu-demo", "Service/omni-grpc", "spec.ports.0.targetPort", "http", "pods serve http"),
    ("cpu-demo", "Service/omni-grpc", "spec.ports.0.appProtocol", GONE, "appProtocol"),
    ("cpu-demo", "Service/omni-grpc-pods", "spec.clusterIP", GONE, "no headless Service"),
    ("cpu-demo", "ServiceAccount/omni-grpc", "automountServiceAccountToken", True, "its token"),
    (
        "cpu-demo",
        "ServiceAccount/omni-grpc",
        "metadata.name",
        "omni",
        "no ServiceAccount omni-grpc",
    ),
    ("cpu-demo", "Service/omni-grpc", "metadata.namespace", "default", "namespace default"),
    ("cpu-demo", "Namespace/omni-grpc", "metadata.labels", {"a": "b"}, "level restricted"),
    ("multi-gpu", "PersistentVolumeClaim/omni-grpc-models", "metadata.name", "m", "no Persistent"),
    (
        "multi-gpu",
        "ScaledObject/omni-grpc",
        "spec.scaleTargetRef.name",
        "omni",
        "no Deployment omni",
    ),
    ("multi-gpu", DEPLOYMENT, "spec.replicas", 2, "undo the scaler's"),
    ("multi-gpu", "ServiceMonitor/omni-grpc", "spec.endpoints.0.port", "web", "no port web"),
    (
        *("multi-gpu", "ServiceMonitor/omni-grpc", "spec.selector.matchLabels"),
        *({"app.kubernetes.io/name": "omni-grpc"}, "finds 2 Services"),
    ),
    ("multi-gpu", "GRPCRoute/omni-grpc", "spec.rules.0.matches.3", GONE, "v1alpha"),
    (
        *("multi-gpu", "GRPCRoute/omni-grpc", "spec.rules.0.matches.0.method.service"),
        *("omni_grpc.v1.Omni", "omni_grpc.v1.Omni,"),
    ),
    ("multi-gpu", "GRPCRoute/omni-grpc", "spec.rules.0.backendRefs.0.port", 80, "no port 80"),
    ("multi-gpu", "GRPCRoute/omni-grpc", "spec.rules.0.backendRefs.0.name", "o", "no Service o"),
    ("multi-gpu", "GRPCRoute/omni-grpc", "spec.parentRefs.0.name", "gate", "no Gateway gate"),
    (
        *("multi-gpu", "BackendTrafficPolicy/omni-grpc"),
        *(
            "spec.loadBalancer.consistentHash.headers.0.name",
            "x-request-id",
            "hash omni-request-id",
        ),
    ),
    ("multi-gpu", "BackendTrafficPolicy/omni-grpc", "spec.timeout", GONE, "after 15 s"),
    (
        "multi-gpu",
        "BackendTrafficPolicy/omni-grpc",
        "spec.targetRefs.0.name",
        "o",
        "no GRPCRoute o",
    ),
    ("inference-pool", "InferencePool/omni-grpc", "spec.appProtocol", GONE, "so HTTP/1.1"),
    ("inference-pool", "InferencePool/omni-grpc", "spec.targetPorts.0.number", 8000, "on 50051"),
    (
        *("inference-pool", "InferencePool/omni-grpc", "spec.selector.matchLabels"),
        *({"app": "vllm"}, "doesn't find"),
    ),
    # A replica over several nodes.
    ("leaderworkerset", GROUP, "spec.leaderWorkerTemplate.size", 3, "has 2 nodes, the group 3"),
    ("leaderworkerset", GROUP, f"{WORKER}.containers.0.args.0", "--verbose", "--headless"),
    (
        "leaderworkerset",
        GROUP,
        f"{WORKER}.containers.0.args.4",
        "--tensor-parallel-size=4",
        "pipeline 8",
    ),
    ("leaderworkerset", GROUP, f"{WORKER}.containers.0.command.4", "/models/x", "doesn't serve"),
    (
        *("leaderworkerset", GROUP, f"{WORKER}.containers.0.resources.limits.nvidia~com/gpu", "4"),
        "16 ranks",
    ),
    ("leaderworkerset", GROUP, f"{LEADER}.terminationGracePeriodSeconds", 60, "less than"),
    (
        *("leaderworkerset", "Service/omni-grpc", "spec.selector"),
        *({"app.kubernetes.io/name": "omni-grpc-worker"}, "which serve nobody"),
    ),
]


@pytest.mark.parametrize(
    ("build", "target", "path", "value", "says"),
    MISTAKES,
    ids=[f"{b}-{t.partition('/')[0]}-{p.rpartition('.')[2]}-{s}" for b, t, p, _, s in MISTAKES],
)
def test_a_mistake_is_found(build: str, target: str, path: str, value: object, says: str) -> None:
    kind = "overlays" if build in OVERLAYS else "components"
    found = list(problems(changed(built()[f"{kind}/{build}"], target, path, value)))
    assert any(says in problem for problem in found), found


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of k8s/ to break."""
    tool()
    return Path(shutil.copytree(K8S, tmp_path / "k8s"))


def edit(file: Path, old: str, new: str) -> None:
    """Replaces a text that must be there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("overlays/one-gpu/gpu.yaml", "name: omni-grpc", "name: omni", "no matches for Id"),
        ("overlays/one-gpu/kustomization.yaml", "../../base", "../../bas", "bas"),
        ("overlays/one-gpu/kustomization.yaml", "patches:", "patchs:", "patchs"),
        ("base/kustomization.yaml", "service.yaml", "services.yaml", "services.yaml"),
    ],
)
def test_what_kustomize_refuses_is_found(
    own: Path, file: str, old: str, new: str, says: str
) -> None:
    edit(own / file, old, new)
    with pytest.raises(BuildError, match=says):
        render(own / "overlays/one-gpu")


def test_the_check_ends_with_what_is_wrong(own: Path) -> None:
    edit(own / "overlays/cpu-demo/kustomization.yaml", "../../base", "../../bas")
    command: Command = [sys.executable, ROOT / "scripts/check_manifests.py", own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25)
    assert done.returncode == 1
    assert "bas" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_changed_pipeline_rolls_the_pods(own: Path) -> None:
    def mounted() -> Any:
        return [
            volume["configMap"]["name"]
            for pod in Build("", render(own / "overlays/cpu-demo")).pods()
            for volume in pod.spec["volumes"]
            if "configMap" in volume
        ]

    before = mounted()
    edit(own / "base/pipeline.yaml", "max_tokens: 200", "max_tokens: 100")
    assert before != mounted()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("engine: vllm", "engine: vlm", "stages[0].engine"),
        ("bridge: spoken-text", "bridge: spoken", "bridge"),
        ("start_timeout: 1800", "start_timeout: 3600", "a stage may load for 3600 s"),
        ("nnodes: 2", "nnodes: 4", "--nnodes 2, the pipeline 4"),
        ("budget: 0", "budget: 3", "restarts alone"),
    ],
)
def test_a_mistake_in_a_pipeline_is_found(old: str, new: str, says: str) -> None:
    build = built()["components/leaderworkerset"]
    (config,) = build.of("ConfigMap")
    text = config["data"]["pipeline.yaml"]
    assert old in text
    name = f"ConfigMap/{config['metadata']['name']}"
    found = list(problems(changed(build, name, "data.pipeline~yaml", text.replace(old, new, 1))))
    assert any(says in problem for problem in found), found
