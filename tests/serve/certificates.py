"""Certificates for tests, which no authority has signed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "service", password: str | None = None) -> tuple[Path, Path]:
    """Files of a certificate of localhost and its key; skips the test where OpenSSL is not installed."""
    if shutil.which("openssl") is None:
        pytest.skip("OpenSSL is not installed")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    command += [
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    ]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
