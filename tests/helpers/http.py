"""Asking a service of this machine."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fetch(url: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON of an answer; never through a proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    content = None if body is None else json.dumps(body).encode()
    try:
        with opener.open(
            urllib.request.Request(url, content, {"Content-Type": "application/json"}), timeout=30
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
