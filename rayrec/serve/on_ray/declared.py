"""Applications that are put into a cluster by Ray Serve's REST API, as data.

    GET  /api/serve/applications/     all of them, with their configs
    PUT  /api/serve/applications/     all that are declared; those that are not named there are removed

So what others have declared is read first and put back along with ours.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from rayrec.platform.errors import InputError, MachineError
from rayrec.serve.on_ray.scaling import ServeDownError, ServeRefusedError
from rayrec.serve.on_ray.serve_dashboard import Fetch, fetch_text

logger = logging.getLogger(__name__)

POLL_S = 1.0
REMOVE_S = 60.0
"""In which a removal is tried again where the dashboard does not answer."""
PUT_S = 60.0
"""In which the dashboard answers: the first application starts Ray Serve."""
_PATH = "/api/serve/applications/"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_LEAVING = "DELETING"


class DeclaredApplications:
    """Those of one cluster, over its dashboard."""

    def __init__(
        self,
        dashboard: str,
        serve_url: str | None = None,
        fetch: Fetch | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            serve_url: where Ray Serve answers, or is to answer where it does not run yet; None: as it says.
        """
        self._dashboard = dashboard.rstrip("/")
        self._serve_url = serve_url
        self._fetch = fetch or partial(fetch_text, answer_s=PUT_S)
        self._sleep, self._clock = sleep, clock

    @contextmanager
    def deployed(self, applications: Sequence[Mapping[str, Any]], timeout_s: float) -> Iterator[None]:
        """The applications run inside the block, and are removed behind it.

        Raises:
            InputError: the cluster refuses them, or could not start them; they are removed.
            MachineError: it does not answer, has something of one of these names, or they do not run in time.
        """
        names = [str(one["name"]) for one in applications]
        details = self._details_behind_removal(names)
        for one in applications:
            taken = {name: each.get("route_prefix") for name, each in details["applications"].items()}
            if one["name"] in taken:
                raise MachineError(
                    f"the cluster at {self._dashboard} serves an application {one['name']!r} already; remove "
                    "it, or give the model another name"
                )
            if one["route_prefix"] in taken.values():
                raise MachineError(f"the cluster at {self._dashboard} has something at {one['route_prefix']}")
        try:
            self._put([*_declared(details), *map(dict, applications)], details)
            self._wait(names, timeout_s)
            yield
        finally:
            self._remove(names)

    def _details_behind_removal(self, names: Sequence[str]) -> dict[str, Any]:
        """What there is once applications of these names are gone that are being removed.

        Who starts a service again at once finds the last one's: Ray Serve removes behind its answer.
        """
        ends_at = self._clock() + REMOVE_S
        while True:
            details = self._details()
            found = [details["applications"].get(name, {}) for name in names]
            if all(one.get("status") != _LEAVING for one in found) or self._clock() > ends_at:
                return details
            self._sleep(POLL_S)

    def serve_url(self) -> str:
        """Where Ray Serve answers: at the dashboard's host, unless it was said.

        Raises:
            InputError: what answers is no dashboard.
            MachineError: the cluster does not answer.
        """
        if self._serve_url is not None:
            return self._serve_url
        options = self._details().get("http_options") or {}
        host = urlsplit(self._dashboard).hostname or "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{options.get('port') or 8000}"

    def _wait(self, names: Sequence[str], timeout_s: float) -> None:
        ends_at = self._clock() + timeout_s
        while True:
            try:
                found = self._details()["applications"]
            except InputError as error:
                # One answer that is missing says nothing of applications that load for half an hour.
                if self._clock() > ends_at:
                    raise
                logger.debug("asked again: %s", error)
                self._sleep(POLL_S)
                continue
            waiting = [name for name in names if found.get(name, {}).get("status") != "RUNNING"]
            if not waiting:
                return
            for name in waiting:
                if found.get(name, {}).get("status") in _FAILED:
                    raise InputError(f"{name} could not be started in the cluster: {_why(found[name])}")
            if self._clock() > ends_at:
                raise MachineError(
                    f"{waiting[0]} does not run after {timeout_s:g} s; {_why(found.get(waiting[0], {}))}"
                )
            self._sleep(POLL_S)

    def _remove(self, names: Sequence[str]) -> None:
        ends_at = self._clock() + REMOVE_S
        while True:
            try:
                details = self._details()
                left = [one for one in _declared(details) if one["name"] not in names]
                self._put(left, details)
                return
            except InputError as error:
                if self._clock() > ends_at:
                    logger.warning("applications are left in the cluster: %s", error)
                    return
                self._sleep(POLL_S)

    def _details(self) -> dict[str, Any]:
        text = self._asked("GET", None)
        try:
            found = json.loads(text)
            return {**found, "applications": dict(found["applications"])}
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{self._dashboard} is no dashboard of Ray: it does not list applications"
            ) from error

    def _put(self, applications: Sequence[Mapping[str, Any]], details: Mapping[str, Any]) -> None:
        body: dict[str, Any] = {"applications": list(applications)}
        if details.get("proxy_location"):
            body["proxy_location"] = details["proxy_location"]
        if details.get("target_capacity") is not None:
            # What is not said is reset, and with it the replicas of everything in the cluster.
            body["target_capacity"] = details["target_capacity"]
        options = {
            name: value
            for name, value in (details.get("http_options") or {}).items()
            if name in ("host", "port") and value is not None
        }
        if not options and self._serve_url is not None:
            parts = urlsplit(self._serve_url)
            is_here = parts.hostname in ("127.0.0.1", "localhost", "::1")
            options = {"host": "127.0.0.1" if is_here else "0.0.0.0", "port": parts.port or 80}
        self._asked("PUT", body | ({"http_options": options} if options else {}))

    def _asked(self, method: str, body: Mapping[str, Any] | None) -> str:
        try:
            return self._fetch(method, self._dashboard + _PATH, body)
        except ServeDownError as error:
            kind = InputError if isinstance(error, ServeRefusedError) else MachineError
            raise kind(f"the cluster does not take applications: {error}") from error


def _declared(details: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Configs of what is declared; what programs deploy has none, and stays anyway."""
    return [
        dict(each["deployed_app_config"])
        for each in details["applications"].values()
        if each.get("deployed_app_config")
    ]


def _why(application: Mapping[str, Any]) -> str:
    """The last line of what Ray Serve says of it."""
    said = [str(application.get("message") or "")]
    said += [str(each.get("message") or "") for each in (application.get("deployments") or {}).values()]
    lines = [line.strip() for text in said for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "Ray Serve gives no reason"
