"""omni-grpc: omni-modal inference pipelines behind one typed gRPC contract."""

__version__ = "0.1.0"
