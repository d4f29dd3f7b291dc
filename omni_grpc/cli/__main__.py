"""`python -m omni_grpc.cli`."""

from omni_grpc.cli import main

main()
