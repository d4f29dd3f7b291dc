"""The server's certificates, and the credentials that gRPC takes for them.

Every new connection is given what is valid then, so a certificate can be replaced while the server
runs. Connections that stand keep what they began with."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from omni_grpc.config import TlsConfig
from omni_grpc.errors import ConfigError
from omni_grpc.watched import Watched


@dataclass(frozen=True, slots=True)
class Material:
    """What the files held, in PEM, and is known to be good."""

    cert: bytes
    key: bytes
    client_ca: bytes | None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC takes it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.client_ca)


class Certificates:
    """The files' present content. Raises ConfigError where they cannot be used."""

    def __init__(self, config: TlsConfig) -> None:
        self._mutual = config.client_ca is not None
        paths = [Path(path) for path in (config.cert, config.key, config.client_ca) if path]
        self._files = Watched("TLS certificates", paths, partial(read_material, config))

    def refresh(self) -> None:
        """Reads the files again if they have changed."""
        self._files.refresh()

    def credentials(self) -> grpc.ServerCredentials:
        """For one listener. It must be referred to as long as that listens: gRPC does not."""
        given = self._files.value

        def newest() -> grpc.ServerCertificateConfiguration | None:
            # Called by gRPC's own threads, before each handshake.
            nonlocal given
            if given is self._files.value:
                return None
            given = self._files.value
            return given.configuration()

        return grpc.dynamic_ssl_server_credentials(
            given.configuration(),
            newest,  # type: ignore[arg-type] # None means no change
            require_client_authentication=self._mutual,
        )


def read_material(config: TlsConfig) -> Material:
    """The files' content. Raises ConfigError for what cannot be read or does not fit together:
    gRPC itself would only begin to refuse connections."""
    cert, key = _read(config.cert), _read(config.key)
    client_ca = None if config.client_ca is None else _read(config.client_ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _check_pair(context, cert, key, config)
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError):
            raise ConfigError(f"{config.client_ca}: holds no certificates in PEM") from None
    return Material(cert, key, client_ca)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _check_pair(context: ssl.SSLContext, cert: bytes, key: bytes, config: TlsConfig) -> None:
    # From memory: what was read is what is checked, and the key touches no disk.
    files = [os.memfd_create("pem", os.MFD_CLOEXEC) for _ in "ck"]
    try:
        for file, data in zip(files, (cert, key), strict=True):
            os.pwrite(file, data, 0)
        # An encrypted key is refused: without this, its password would be asked for on a terminal.
        names = [f"/proc/self/fd/{file}" for file in files]
        context.load_cert_chain(names[0], names[1], password=lambda: "")
    except ssl.SSLError as error:
        reason = (error.reason or "").replace("_", " ").lower()
        raise ConfigError(
            f"{config.cert} and {config.key}: not a certificate and its own, unencrypted key in "
            f"PEM: {reason or error}"
        ) from None
    finally:
        for file in files:
            os.close(file)
