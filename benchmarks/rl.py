"""Reinforcement learning: sampling speed inside the loop, and the speed of placements.

* `rl-rollouts`: candidates per second that a policy samples with their log-probabilities, features of the
  histories included, against a loop over `generate` of Hugging Face transformers that samples from the same
  distribution: the same Qwen3-shaped network and weights, `do_sample`, `prefix_allowed_tokens_fn`,
  `renormalize_logits`, as many sequences per history, scores of what was sampled. 16 histories at once, 16
  candidates each, one thread on both sides; a step of a window is one such batch, and both sample for the
  same histories. Before anything is timed, the peer's log-probabilities of what it sampled are compared with
  ours, to 1e-3.
* `rl-async`: steps per second of the loop with `async` against `colocated`, one thread per process: the
  prefix decoder of `configs/beauty-generative.yaml`, 256 users a step, 16 candidates each. Each window begins
  with an empty queue and ends with one. The time of sampling and of learning is printed; they have to be
  about the same for the ratio to be meaningful.
* `rl-weight-sync`: how many times the time spent on weights is within 5 % of the time of the async windows:
  what the learner takes to copy them, and each rollout worker to load them, with checksums on both sides.
  The times of all processes are added up; overlap with computation is not subtracted.

`RAYREC_BENCH_DATA` names a prepared data set with semantic IDs; without one, it is synthetic, of the size of
Amazon Beauty. `RAYREC_BENCH_STEPS` is the number of steps of a window.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data_sets import beauty_sized
from benchmarks.generate_peer import GeneratePeer
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.untrained import LANGUAGE_MODEL, untrained_run
from rayrec.actors.spawning import RayCalls, RayHost
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.cluster import ray_cluster
from rayrec.platform.console import log
from rayrec.platform.devices import HOST
from rayrec.rl.config import RlConfig
from rayrec.rl.controller import SingleController
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import Prompts, PromptStream
from rayrec.rl.training import PolicyTraining

GROUP_SIZE, CHUNK_USERS = 16, 16
TOLERANCE = 1e-3
ROLLOUTS_PEER = "a loop over transformers generate(), same weights"


def bench(options: BenchOptions) -> list[Bar]:
    with beauty_sized(options.data) as data, tempfile.TemporaryDirectory(prefix="rayrec-rl-") as folder:
        return [_rollouts(data, Path(folder), options), *_placements(data, Path(folder), options)]


def _rollouts(data: Path, folder: Path, options: BenchOptions) -> Bar:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        missing = f"transformers, which is not installed ({error}): pip install 'rayrec[hf]'"
        return Bar.of("rl-rollouts", [], missing, 8.0)
    config = _config(untrained_run(folder / "language-model", data, LANGUAGE_MODEL), CHUNK_USERS, CHUNK_USERS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        policy = Policy.load(config)
        peer = _Peer(policy)
        chunks = _chunks(PromptStream(policy.task.dataset, config.prompts, config.seed), config)
        _check_same_distribution(policy, peer, next(chunks))

        def rate(sample: Any, asked: list[Prompts]) -> float:
            begun = time.perf_counter()
            for prompts in asked:
                sample(prompts)
            return sum(map(len, asked)) * GROUP_SIZE / (time.perf_counter() - begun)

        asked: list[Prompts] = []

        def our_rate() -> float:
            asked[:] = itertools.islice(chunks, options.steps)
            return rate(lambda prompts: policy.sample(prompts, config.rollout, config.seed), asked)

        def their_rate() -> float:
            return rate(peer.sample, asked)  # for the same users: histories differ in length

        def show(ours: float, theirs: float) -> None:
            log.print(f"rl-rollouts: {ours:,.0f} a second, peer {theirs:,.0f}, ratio {ours / theirs:.1f}")

        interleaved(our_rate, their_rate, repeats=1)  # thrown away
        ratios = interleaved(our_rate, their_rate, options.pairs, show)
        return Bar.of("rl-rollouts", ratios, ROLLOUTS_PEER, 8.0)
    finally:
        torch.set_num_threads(before)


def _chunks(stream: PromptStream, config: RlConfig) -> Iterator[Prompts]:
    """None of them twice, as far as the data goes."""
    step = 0
    while True:
        yield from stream.step(step).chunks(config.rollout.chunk_users)
        step += 1


class _Peer(GeneratePeer):
    """The same network, sampled from by `transformers`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.network)
        self._positions = policy.task.dataset.item_positions

    @torch.inference_mode()
    def sample(self, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
        """([U, G] items, [U, G] log-probabilities)."""
        samples = prompts.samples
        histories = np.split(self._positions(samples.item_ids_N), samples.offsets_B1[1:-1])
        found = self.generate(
            [history[-LANGUAGE_MODEL["backbone"]["max_length"] :] for history in histories],
            do_sample=True,
            top_k=0,
            num_return_sequences=GROUP_SIZE,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = self.network.compute_transition_scores(found.sequences, found.scores, normalize_logits=False)
        items_UG = self.items(found.sequences, len(histories))
        return items_UG, scores.sum(dim=1).numpy().reshape(items_UG.shape)


def _check_same_distribution(policy: Policy, peer: _Peer, prompts: Prompts) -> None:
    """Check that the peer samples with the probabilities that we compute; otherwise, timing is pointless."""
    items_UG, log_probs_UG = peer.sample(prompts)
    rollouts = policy.sample(prompts, _config(Path("run"), 1, 1).rollout, 0)
    ours = policy.log_probs(replace(rollouts, items_UG=items_UG), 1.0).candidates_UGL.sum(axis=2)
    worst = np.abs(ours - log_probs_UG).max()
    assert worst <= TOLERANCE, f"log-probabilities of the two sides differ by {worst}"


def _placements(data: Path, folder: Path, options: BenchOptions) -> list[Bar]:
    supervised = RunConfig.load(CHECKOUT / "configs" / "beauty-generative.yaml")
    run = untrained_run(folder / "prefix-decoder", data, supervised.model.model_dump(mode="json"))
    configs = {
        kind: _config(run, 256, 64, placement={"kind": kind, "max_staleness": 2})
        for kind in ("async", "colocated")
    }
    policy = Policy.load(configs["colocated"])
    stream = PromptStream(policy.task.dataset, configs["colocated"].prompts, 0)
    shares: list[float] = []
    """Of the time of async windows that went to weights."""
    with (
        ray_cluster(policy.task.config.cluster, cpus_needed=6),
        _controller("async", configs) as ahead,
        _controller("colocated", configs) as in_turns,
    ):

        def rate(controller: SingleController, kind: str) -> float:
            done = _version(controller)  # one step per batch
            config = configs[kind].model_copy(update={"steps": done + options.steps})
            synced_s, begun = _sync_seconds(controller), time.perf_counter()
            training = PolicyTraining(config, controller, stream, done)
            for _ in training.steps():
                pass
            seconds = time.perf_counter() - begun
            if kind == "async":
                shares.append((_sync_seconds(controller) - synced_s) / seconds)
            return options.steps / seconds

        def show(a: float, b: float) -> None:
            log.print(f"rl-async: {a:.2f} steps a second, colocated {b:.2f}, ratio {a / b:.2f}")

        def pair(repeats: int, on_pair: Any = None) -> list[float]:
            return interleaved(
                lambda: rate(ahead, "async"), lambda: rate(in_turns, "colocated"), repeats, on_pair
            )

        pair(1)  # thrown away
        shares.clear()
        ratios = pair(options.pairs, show)
        seconds = in_turns.seconds()
        sampling = seconds["rollouts.sample"] + seconds["reference.log_probs"] + seconds["rewards.score"]
        learning = seconds["learner.update"]
    log.print(f"rl-async: learning costs {learning / sampling:.2f} times what sampling and scoring does")
    log.print(f"rl-weight-sync: {', '.join(f'{share:.1%}' for share in shares)} of the time of the windows")
    return [
        Bar.of("rl-async", ratios, "colocated, as many threads per process", 1.2),
        Bar.of("rl-weight-sync", [0.05 / share for share in shares], "5 % of the time", 1.0),
    ]


@contextmanager
def _controller(kind: str, configs: dict[str, RlConfig]) -> Iterator[SingleController]:
    host = RayHost(f"rl-bench-{kind}")
    with SingleController(configs[kind], HOST.kind, host, RayCalls()) as controller:
        yield controller


def _version(controller: SingleController) -> int:
    """Optimizer steps that the learner has taken; waits until it is idle."""
    (weights,) = controller.get([controller.weights()])
    return weights.version


def _sync_seconds(controller: SingleController) -> float:
    """Time that the learner has spent on giving weights, and each rollout worker on loading them."""
    seconds = controller.seconds()
    return seconds.get("learner.weights", 0.0) + seconds["sync"]


def _config(run: Path, users: int, chunk_users: int, **changes: Any) -> RlConfig:
    return RlConfig.parse(
        {
            "init_from": str(run),
            "snapshot": "last",
            "algorithm": {"name": "gspo"},
            "prompts": {"users_per_step": users, "held_out_share": 0.0},
            "rollout": {"group_size": GROUP_SIZE, "chunk_users": chunk_users, "exclude_seen": False},
            "rewards": {"parts": [{"kind": "prefix_match"}]},
            "alarms": {"max_kl": 1e6, "min_entropy_share": 0.0},
            **changes,
        }
    )
