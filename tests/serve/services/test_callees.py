"""Who says where it is, of replicas of which one hangs."""

import asyncio
import time

from rayrec.serve.local_calls.peers import Address
from rayrec.serve.on_ray.callees import addresses_of


def test_a_replica_that_hangs_hides_no_other_one():
    there = Address("a", "here", "/a.sock")

    async def says():
        return there

    async def hangs():
        await asyncio.sleep(60)

    async def fails():
        raise RuntimeError("starts still")

    started = time.monotonic()
    found = asyncio.run(addresses_of([hangs(), says(), fails()], 0.05))

    assert found == [Address("", "", None), there, Address("", "", None)]
    assert time.monotonic() - started < 10
