"""The checks of `k8s/`: what kustomize builds, its schemas, and its agreement with the code."""
