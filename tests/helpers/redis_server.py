"""A real Redis server for tests, on a free port, which keeps nothing."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

SERVER = "redis-server"
_STARTS_WITHIN_S = 20


class RedisServer:
    """Can be stopped and started again on its port; what was in it is gone then, unless it was saved."""

    def __init__(self, folder: Path, *options: str, tls: tuple[Path, Path] | None = None) -> None:
        """
        Args:
            tls: key and certificate; it listens for nothing else then.
        """
        if shutil.which(SERVER) is None:
            pytest.skip(
                f"{SERVER} is not installed; `make packages` or `apt-get install redis-server` brings it"
            )
        self._folder = folder
        self._options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen | None = None
        if tls is None:
            self._options += ("--port", str(self.port))
        else:
            key, certificate = map(str, tls)
            self._options += ("--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no")
            self._options += ("--tls-key-file", key, "--tls-cert-file", certificate)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it listens."""
        self._process = subprocess.Popen(
            [
                SERVER,
                *("--bind", "127.0.0.1", "--dir", str(self._folder)),
                *("--save", "", "--appendonly", "no", "--daemonize", "no", *self._options),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, f"{SERVER} ended with {self._process.returncode}"
                assert time.monotonic() < deadline, f"{SERVER} did not listen within {_STARTS_WITHIN_S} s"
                time.sleep(0.01)

    def stop(self) -> None:
        """At once, as a machine dies."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
