"""A replica of the dense part as a gang: its process and actors beside it compute each batch together.

    Ray Serve ─► replica = rank 0 ─ its placement group, on one node ─► RankActor 1 ... n − 1
                   │ ready when all ranks have joined, loaded and split the network
                   └ a rank dies ─► who waits is told (503), check_health fails ─► Serve replaces the replica,
                                    and with it all ranks

What ranks say to each other, and in which order, is in `ranks`. A network is not divided by layers: for
pipeline parallelism, a language model is handed over to an engine that has it
(`rayrec.serve.language.ray_llm`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrec.actors.collective import Address
from rayrec.models.program.fused_sums import fuse_sums
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.pipelines.inference.tensor_parallel import check_split, split
from rayrec.platform.devices import Device, device_named, ray_claim
from rayrec.platform.errors import UnavailableError
from rayrec.serve.app.loading import device_of
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.dense import DensePart, first_version
from rayrec.serve.on_ray.ranks import SERVICE, START_S, Commands, FirstRank, follow, meet

logger = logging.getLogger(__name__)


class RankActor:
    """A rank that does what the first one does."""

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        os.chdir(working_directory)
        self._device = device_named(device_of(run, config))
        self._part = part_of_rank(run, config)
        self._commands: Commands | None = None

    def ping(self) -> int:
        """The number of this process, which so has started."""
        return os.getpid()

    def join(self, address: Address, num_ranks: int, rank: int) -> None:
        """Meet the others."""
        from torch.distributed import TCPStore

        store = TCPStore(*address, num_ranks, is_master=False)
        self._commands = meet(store, self._device, num_ranks, rank)

    def read(self, version: int | None) -> None:
        self._part.read(version)

    def forget(self, version: int | None) -> None:
        self._part.forget(version)

    def follow(self) -> None:
        """Until the first rank ends, or one is lost."""
        assert self._commands is not None, "ranks meet first"
        follow(self._commands, self._part)


def part_of_rank(run: str, config: ServeConfig) -> DensePart:
    """What each rank of a gang holds."""
    services = config.services
    assert services is not None, "as these deployments are of it"

    dense = services.dense

    def check(program: SequenceProgram) -> None:
        check_split(program.model, dense.tensor_parallel, run, dense.fused_communication)

    def take_part(program: SequenceProgram) -> None:
        split(program, run)
        if dense.fused_communication:
            fuse_sums(program.model)

    return DensePart.of(run, config, split=take_part, check=check)


class Gang:
    """The ranks of a replica, of which this process is the first."""

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        """Start the other ranks, and return when all of them could answer.

        Raises:
            InputError: the run or the version cannot be loaded, or its network cannot be split.
            UnavailableError: a rank was lost while it started.
        """
        assert config.services is not None, "as these deployments are of it"
        self._is_ending = False
        self.part = part_of_rank(run, config)
        num_ranks, device = config.services.dense.tensor_parallel, device_named(device_of(run, config))
        self._ranks = [
            _spawned(number, config.services.dense.cpus, device).remote(run, config, working_directory)
            for number in range(1, num_ranks)
        ]
        commands, self._pids = joined(self._ranks, device)
        self._first = FirstRank(commands, self.part, self._read)
        following = [rank.follow.remote() for rank in self._ranks]
        threading.Thread(target=self._watch, args=(following,), name="watch", daemon=True).start()
        self._first.hold(first_version(run))

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the ranks but for this one."""
        return self._pids

    def beam_width(self) -> int:
        return self.part.beam_width()

    def recommend(self, packed: bytes) -> bytes:
        return self._first.recommend(packed)

    def hold(self, version: int | None) -> None:
        self._first.hold(version)

    def holds(self, version: int | None) -> bool:
        return self.part.holds(version)

    def check(self) -> None:
        """As `FirstRank.check`."""
        self._first.check()

    def metrics(self) -> dict[str, float]:
        return {**self.part.metrics(), "dense_ranks": 1.0 + len(self._ranks)}

    def close(self) -> None:
        self._is_ending = True
        self._first.end()
        for rank in self._ranks:
            ray.kill(rank)

    def _read(self, version: int | None) -> None:
        reading = [rank.read.remote(version) for rank in self._ranks]
        try:
            self.part.read(version)
            _results(reading)
        except Exception:
            self.part.forget(version)
            for rank in self._ranks:  # each after it has read
                rank.forget.remote(version)
            raise

    def _watch(self, following: list[Any]) -> None:
        """Wait until a rank follows no more."""
        ended, _ = ray.wait(following, num_returns=1)
        if self._is_ending:
            return
        try:
            ray.get(ended)
            reason = "a rank has ended"
        except RayActorError as error:
            reason = f"a rank has died: {error}"
        except RayTaskError as error:
            reason = f"a rank has failed: {error.cause}"
        self._first.lose(reason)


def joined(ranks: Sequence[Any], device: Device) -> tuple[Commands, tuple[int, ...]]:
    """Meet the other ranks, as the first one; the way to them, and their processes.

    Raises:
        UnavailableError: a rank was lost, or did not come.
        Exception: what one of them has raised.
    """
    from torch.distributed import TCPStore

    # Ranks that meet wait for `LOST_S`, which is less than actors may take to start: they are there first.
    pids = tuple(_results([rank.ping.remote() for rank in ranks]))
    host, num_ranks = ray.util.get_node_ip_address(), 1 + len(ranks)
    store = TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False)
    joining = [
        rank.join.remote((host, store.port), num_ranks, number) for number, rank in enumerate(ranks, start=1)
    ]
    try:
        commands = meet(store, device, num_ranks, 0)
    except RuntimeError as error:  # it says that one is missing; that one says why
        failed, _ = ray.wait(joining, num_returns=len(joining), timeout=0)
        _results(failed)
        raise UnavailableError(SERVICE, 1, str(error)) from error
    _results(joining)
    return commands, pids


def _spawned(number: int, cpus: float, device: Device) -> Any:
    """The class of a rank, which goes into its bundle of this process's placement group."""
    group = get_current_placement_group()
    assert group is not None, "the deployment of a gang has bundles"
    return ray.remote(RankActor).options(
        num_cpus=cpus,
        **ray_claim(device.kind),
        max_concurrency=2,  # beside following, it loads the next version
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
    )


def _results(promises: list[Any]) -> list[Any]:
    """What ranks return.

    Raises:
        UnavailableError: one of them died, or does not return.
    """
    try:
        found: list[Any] = ray.get(promises, timeout=START_S)
    except (RayActorError, GetTimeoutError) as error:
        raise UnavailableError(SERVICE, 1, str(error)) from error
    return found
