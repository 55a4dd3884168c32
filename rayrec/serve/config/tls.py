"""The service's certificate and its key, as files."""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import field_validator

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError


class TlsConfig(Config):
    """With it, the service speaks HTTPS and nothing else."""

    certificate: str
    """PEM file of the certificate, followed by those that lead to its authority."""
    key: str
    """PEM file of its key, which no password protects."""

    @field_validator("certificate", "key")
    @classmethod
    def _path_is_absolute(cls, value: str) -> str:
        # Processes of Ray read them from another working directory.
        return str(Path(value).absolute())


def check_tls(config: TlsConfig) -> None:
    """Check that the certificate and its key can be used together.

    Raises:
        InputError: a file cannot be read, the key needs a password, or the two do not belong together.
    """
    for name, path in (("--tls-cert", config.certificate), ("--tls-key", config.key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"{name} {path}: cannot be read: {error.strerror}") from error

    def asked() -> str:
        raise InputError(f"--tls-key {config.key}: a password protects it; give a key without one")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.certificate, config.key, asked)
    except ssl.SSLError as error:
        raise InputError(
            f"--tls-cert {config.certificate} and --tls-key {config.key} are not a certificate and its key "
            f"in PEM format: {error.reason or error}"
        ) from error


def link_for_haproxy(config: TlsConfig, folder: Path) -> Path:
    """Make a link whose key HAProxy finds next to it, under the same name with `.key`. Nothing is copied, so
    that a launcher that is killed leaves no key on disk."""
    certificate = folder / "certificate.pem"
    certificate.symlink_to(config.certificate)
    certificate.with_name("certificate.pem.key").symlink_to(config.key)
    return certificate
