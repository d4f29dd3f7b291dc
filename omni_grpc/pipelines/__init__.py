"""Pipelines that the package brings: topologies in YAML, and the bridges between their stages."""
