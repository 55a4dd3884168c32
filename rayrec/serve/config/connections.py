"""Settings of connections: how many, and how long they may take."""

from __future__ import annotations

from pydantic import Field

from rayrec.platform.config import Config


class ConnectionsConfig(Config):
    """What slow and idle clients may take of the service."""

    most: int = Field(8192, ge=1)
    """Connections at once; more are told to come back. Each is an open file of the process: where fewer may
    be open, there are fewer, and the log says so."""
    most_per_address: int | None = Field(None, ge=1)
    """Of one address; None is half of `most`. Behind a proxy, all connections are of one address."""
    headers_timeout_s: float = Field(10.0, gt=0)
    """In which the headers of a request have to be there, from its first byte or that of the connection."""
    answer_timeout_s: float = Field(20.0, gt=0)
    """After which a client that takes nothing of its answer is disconnected."""
    keep_alive_s: int | None = Field(None, ge=1)
    """For which a connection stays open without a request; None is 5 s, and what Ray Serve has with Ray."""

    @property
    def of_one_address(self) -> int:
        """`most_per_address`, or what stands for it."""
        return min(self.most_per_address or max(self.most // 2, 1), self.most)
