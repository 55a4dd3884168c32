"""Where a run trains: on a Ray cluster, or in this process.

    train ─► placement.connected ─► for each attempt: placement.running ─► Stages

Both start the same actors and give the same bits; from three trainers on, the cluster's collective chooses
the order in which dense gradients are summed, and results agree up to rounding. On a cluster, room is
reserved for all actors at once, they are ended together, and an actor that dies or hangs is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from rayrec.actors.in_process import InProcessCalls, InProcessHost
from rayrec.actors.spawning import Calls, Host, RayCalls, RayHost
from rayrec.actors.trainer import TRAINER_STAGE
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.stages import Stages, spawn_stages
from rayrec.platform.cluster import ClusterConfig, check_accelerators, ray_cluster, starts_cluster
from rayrec.platform.devices import ray_claim
from rayrec.platform.errors import InputError


class Placement(Protocol):
    """Where the actors of a run live."""

    def trains_here(self, assembly: Assembly) -> bool:
        """Whether the trainers will run on this machine."""

    def check(self, assembly: Assembly) -> None:
        """Refuse what cannot run there, before anything starts.

        Raises:
            InputError: names the setting.
        """

    def joined(self, config: ClusterConfig, cpus_needed: float) -> AbstractContextManager[None]:
        """Inside the block, actors can be started.

        Raises:
            InputError: no cluster can be joined or started, or it has too few CPUs.
        """

    def host(self, run: str, members: Mapping[str, int]) -> tuple[Host, Calls]:
        """Start actors one by one, and wait for their answers.

        Args:
            members: of each stage whose members meet.
        """

    def connected(self, assembly: Assembly) -> AbstractContextManager[None]:
        """Inside the block, the actors of a run can be started.

        Raises:
            InputError: the cluster has too little of something.
        """

    def running(
        self, run: str, assembly: Assembly, folder: Path | None, hang_timeout_s: float
    ) -> AbstractContextManager[Stages]:
        """Inside the block every actor of a run is there; leaving it ends them, whatever happened inside.

        Args:
            folder: of the run, where trainers keep what they measure.
            hang_timeout_s: time without any answer after which an actor counts as hanging.

        Raises:
            ActorDeathError: an actor's process died; names the actor.
            StageHungError: one with state hangs. Other errors pass as they are.
        """


class OnRay:
    """Actors are processes of a Ray cluster, which is joined, or started on this machine."""

    def trains_here(self, assembly: Assembly) -> bool:
        return starts_cluster(assembly.config.cluster)

    def check(self, assembly: Assembly) -> None:
        """Nothing: what a cluster has shows when it has been joined."""

    def joined(self, config: ClusterConfig, cpus_needed: float) -> AbstractContextManager[None]:
        return ray_cluster(config, cpus_needed)

    def host(self, run: str, members: Mapping[str, int]) -> tuple[Host, Calls]:
        return RayHost(run), RayCalls()

    @contextmanager
    def connected(self, assembly: Assembly) -> Iterator[None]:
        config = assembly.config
        with self.joined(config.cluster, config.cpus_needed):
            # Only here: these modules need Ray.
            from rayrec.pipelines.cluster.nodes import cluster_nodes
            from rayrec.pipelines.cluster.placement import actor_groups
            from rayrec.pipelines.cluster.placement_check import check_possible

            check_accelerators(
                ray_claim(config.device),
                config.pipeline.num_trainers,
                "trainers",
                "set another device, lower pipeline.num_trainers, or join a larger cluster",
            )
            check_possible(actor_groups(config), cluster_nodes())
            yield

    def running(
        self, run: str, assembly: Assembly, folder: Path | None, hang_timeout_s: float
    ) -> AbstractContextManager[Stages]:
        from rayrec.pipelines.training.ray_stages import running_stages

        return running_stages(run, assembly, folder, hang_timeout_s)


class InProcess:
    """Actors are objects of this process, whose methods are called directly. Needs no Ray.

    Several trainers are threads that meet, as processes of a cluster would.
    """

    def trains_here(self, assembly: Assembly) -> bool:
        return True

    def check(self, assembly: Assembly) -> None:
        if assembly.config.training.compute.is_split and assembly.config.pipeline.num_trainers > 1:
            raise InputError(
                "training.parallel: fsdp2 splits weights between processes, and in one process trainers are "
                "threads; train on Ray, or set parallel: replicated"
            )

    def joined(self, config: ClusterConfig, cpus_needed: float) -> AbstractContextManager[None]:
        return nullcontext()

    def host(self, run: str, members: Mapping[str, int]) -> tuple[Host, Calls]:
        several = {stage: number for stage, number in members.items() if number > 1}
        return InProcessHost(run, several), InProcessCalls()

    def connected(self, assembly: Assembly) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def running(
        self, run: str, assembly: Assembly, folder: Path | None, hang_timeout_s: float
    ) -> Iterator[Stages]:
        host, calls = self.host(run, {TRAINER_STAGE: assembly.config.pipeline.num_trainers})
        try:
            stages = Stages.of(assembly, spawn_stages(host, assembly, folder), calls, host)
            stages.connect_trainers(host)
            yield stages
        finally:
            host.close()


on_ray = OnRay()
in_process = InProcess()
