"""Where a service listens: whether it can, its URL, and when it answers there."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
import time
import urllib.request

from rayrec.platform.errors import InputError, MachineError

READY_TIMEOUT_S = 60.0
"""Between a model being loaded and answers at its address; usually a fraction of a second."""


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Check that the service can listen at an address.

    Args:
        option: that chooses the port, for messages.

    Raises:
        MachineError: something listens there already.
        InputError: this machine has no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections of an earlier service may still be closing.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MachineError(f"port {port} on {host} is in use; choose another with {option}") from error
        raise InputError(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose others with --host and "
            f"{option}"
        ) from error


def ip_of(host: str) -> str:
    """The address that a service listens on which is told of a host, by name or address.

    Raises:
        InputError: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InputError(f"--host {host}: {error.strerror}") from error
    return str(found).partition("%")[0]


def url_of(host: str, port: int, tls: bool = False) -> str:
    """Where this machine reaches the service."""
    scheme = "https" if tls else "http"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return f"{scheme}://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


def wait_until_ready(url: str) -> None:
    """Wait until the service answers its readiness probe.

    Raises:
        RuntimeError: it does not answer within `READY_TIMEOUT_S`.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    # Never through a proxy of the environment: the service is on this machine. Whose name its certificate has
    # is for its callers to check; nothing secret is sent here.
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
    )
    while True:
        try:
            with opener.open(f"{url}/health/ready", timeout=READY_TIMEOUT_S):
                return
        except OSError as error:  # other statuses than 200 among them
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the service at {url} is not ready after {READY_TIMEOUT_S:g} s: {error}"
                ) from error
        time.sleep(0.05)
