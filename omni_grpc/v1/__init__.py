"""Generated from protos/omni_grpc/v1 by `make protos`."""
