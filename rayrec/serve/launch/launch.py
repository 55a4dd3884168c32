"""Starting the service, and stopping it clean.

serve_run ─► serving ─► on_ray: replicas of Ray Serve, or single_process: here ─► URL
    └ waits for a signal; then the same way back
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rayrec.serve.config.serve import ServeConfig

logger = logging.getLogger(__name__)


def serve_run(run: str | Path, config: ServeConfig) -> None:
    """Answer requests with a run's model until SIGINT or SIGTERM; call it on the main thread.

    Raises:
        InputError: as `serving`.
    """
    with serving(run, config) as url, stop_signal() as stopped:
        logger.info(
            "up to %d requests at a time for each of %d replicas; %s",
            config.max_waiting,
            config.num_replicas,
            _protection(config),
        )
        logger.info("answering at %s/v1/recommend, described at %s/docs; Ctrl-C stops", url, url)
        if config.grpc_port is not None:
            logger.info("answering over gRPC at %s:%d", config.host, config.grpc_port)
        stopped.wait()
        logger.info("stopping")


def serving(run: str | Path, config: ServeConfig) -> AbstractContextManager[str]:
    """The service runs inside the block; the value is its base URL, such as `http://127.0.0.1:8000`.

    Raises:
        InputError: as `serving_on_ray` or `serving_here`; nothing was started.
        RuntimeError: the service could not be started.
    """
    if config.single_process:
        from rayrec.serve.launch.single_process import serving_here

        return serving_here(run, config)
    from rayrec.serve.on_ray.serving import serving_on_ray  # which takes seconds to import

    return serving_on_ray(run, config)


def _protection(config: ServeConfig) -> str:
    """Which machines reach the service, and what of it is open to them."""
    reach = "this machine alone" if config.is_loopback else "every machine that reaches this one"
    said = f"for {reach}, {'HTTP without TLS' if config.tls is None else 'TLS'}"
    if config.token_sha256 is None:
        return f"{said}, no token needed"
    said += ", with a token for all but probes of health"
    if not config.single_process:
        # Ray binds it to all interfaces, and no setting of its own changes that.
        said += "; Ray's ports, metrics among them, know no token and answer every machine that reaches them"
    if config.tls is None and not config.is_loopback:
        said += " (which travels readable, unless something before this service speaks TLS)"
    return said


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set inside the block, instead of what they did before."""
    stopped = threading.Event()

    def stop(signum: int, frame: Any) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
