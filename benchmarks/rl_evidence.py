"""Does reinforcement learning pay? Five paired seeds on a public data set, and in a world with known truth.

    python -m benchmarks.rl_evidence movielens --source FOLDER/movielens-100k --work runs/evidence
    python -m benchmarks.rl_evidence world --work runs/evidence

Every seed has a supervised run of its own, from which each method starts: the same prompts, batch size and
number of optimizer steps. A run that has ended is not repeated, so a measurement that was stopped goes on.

* `movielens`: the recipe of `configs/movielens-generative.yaml`. Rewards are for the logged next item: a hit
  and MiniOneRec's penalty of likelier wrong items. Prompts are validation events of four fifths of the users;
  everything is reported on all users' last events.
* `world`: `benchmarks/simulated_world.py`. Prompts are training histories of four fifths of the users,
  rewards the answers of the simulated users. What a list is worth is the true probability that its items
  satisfy, and the optimum is known.

Controls: supervised training on the same prompts (`reward_weight: 0`), sampling at the best temperature, and
the best of 64 samples by the reward itself, which asks the user before it recommends, or by item means of as
many answers as training asked for. The record is `benchmarks/quality/rl/evidence/NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.paired_seeds import change_of, mean_of
from benchmarks.rl_evidence_page import EVIDENCE, write_page
from benchmarks.rl_lists import ItemMeans, ListMaker, Scores
from benchmarks.simulated_world import MEMORY, SATIATION, LoggedWorld, best_lists
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, tokenize
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.platform.errors import InputError
from rayrec.rl.config import RlConfig
from rayrec.rl.prompts import PromptStream
from rayrec.rl.rewards.config import RewardsConfig
from rayrec.rl.rewards.simulator import World
from rayrec.rl.run import train_policy
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare

HELD_OUT, N, TEMPERATURES = 0.2, 64, (0.1, 0.25, 0.5, 0.75, 1.0)
SHOWN_METRICS = ("zero_variance_share", "oversampling", "ratio_deviation", "clip_share", "staleness", "kl")
DAPO: dict[str, Any] = {"name": "grpo", "clip_high": 0.28, "mean": "batch"}
Settings = dict[str, Any]
SUPERVISED, OPTIMUM = "supervised", "optimum"
BEST_BY_REWARD, BEST_BY_MEANS = f"best of {N} by the reward", f"best of {N} by item means"


@dataclass(frozen=True)
class Setting:
    """One data set with its methods."""

    name: str
    supervised: Sequence[str]
    """Overrides of `configs/movielens-generative.yaml`."""
    common: Settings
    """Of every method."""
    methods: dict[str, Settings]
    worth: Settings
    """The reward by which lists are judged."""
    metric: str
    """By which the temperature is chosen."""
    truth: Path | None = None
    """Folder of the world."""


def _rl(steps: int, learner: Settings, **changes: Any) -> Settings:
    """Settings of every method: steps and learning rate of the control are those of the others."""
    return {
        "steps": steps,
        "algorithm": {"name": "grpo"},
        "rollout": {"group_size": 16, "chunk_users": 64},
        "learner": learner,
        "placement": {"threads": 1},
        "alarms": {"max_kl": 50.0, "min_entropy_share": 0.0},
    } | changes


def movielens(data: Path) -> Setting:
    """Rewards are the label, by the same events as the control."""
    learner = {"learning_rate": 1e-4, "warmup_steps": 5}
    dynamic = {"group_size": 16, "chunk_users": 64, "dynamic": {"groups": 32, "max_reads": 4}}
    return Setting(
        "movielens",
        [f"data.path={data}"],
        _rl(
            30,
            learner,
            prompts={"split": "valid", "users_per_step": 96, "held_out_share": HELD_OUT},
            rewards={
                "parts": [{"kind": "hit"}, {"kind": "rank_position", "penalty": True, "only_with_hit": True}]
            },
            evaluation={"every_steps": 15, "metric": "ndcg@10", "temperatures": [1.0]},
        ),
        {
            "supervised learning": {"learner": learner | {"reward_weight": 0.0, "nll_coefficient": 1.0}},
            "GRPO": {},
            "DAPO": {"algorithm": DAPO, "rollout": dynamic},
            "DAPO and supervised": {
                "algorithm": DAPO,
                "rollout": dynamic,
                "learner": learner | {"nll_coefficient": 0.1},
            },
        },
        {"kind": "hit"},
        "recall@10",
    )


def world(data: Path, truth: Path) -> Setting:
    """Rewards are answers of simulated users."""
    learner = {"learning_rate": 1e-3, "warmup_steps": 5}
    simulator = {"kind": "simulator", "path": str(truth), "satiation": SATIATION, "memory": MEMORY}
    dynamic = {"group_size": 16, "chunk_users": 64, "dynamic": {"groups": 48, "max_reads": 4}}
    graded = {"parts": [simulator | {"feedback": "expected"}]}
    return Setting(
        "world",
        [
            f"data.path={data}",
            "training.epochs=30",
            "training.optimizer={learning_rate: 0.003, weight_decay: 0.1}",
            "training.batch_size=64",
            "model.backbone.dim=32",
            "model.backbone.num_layers=1",
            "model.backbone.feedforward_dim=64",
            "model.backbone.max_length=16",
            "model.backbone.dropout=0.1",
        ],
        _rl(
            40,
            learner,
            prompts={"split": "train", "users_per_step": 64, "held_out_share": HELD_OUT},
            rewards={"parts": [simulator | {"feedback": "sampled"}]},
            evaluation={"every_steps": 20, "metric": "reward", "temperatures": [1.0], "max_users": 256},
        ),
        {
            "supervised learning": {"learner": learner | {"reward_weight": 0.0, "nll_coefficient": 1.0}},
            "GRPO": {},
            "DAPO": {"algorithm": DAPO, "rollout": dynamic},
            "DAPO, async": {
                "algorithm": DAPO,
                "rollout": dynamic,
                "placement": {"kind": "async", "max_staleness": 6, "threads": 1},
            },
            "GRPO, graded": {"rewards": graded},
            "SA-GCPO, graded": {"algorithm": {"name": "sa_gcpo"}, "rewards": graded},
        },
        simulator | {"feedback": "expected"},
        "worth",
        truth,
    )


def prepared_movielens(source: Path, work: Path) -> Path:
    data = work / "movielens-100k"
    if not data.is_dir():
        prepare(source, data, PrepareConfig(allow=frozenset({"duplicates"})))
        tokenize(data, config=TokenizeConfig(codebook_size=64))
    return data


def prepared_world(work: Path) -> tuple[Path, Path]:
    folder, data = work / "world", work / "world" / "data"
    if not data.is_dir():
        LoggedWorld.random().write(folder)
        prepare(folder / "source", data, PrepareConfig(allow=frozenset({"short-users", "cold-items"})))
        tokenize(data, config=TokenizeConfig(codebook_size=16, dim=32))
    return data, folder / "world"


class SeedMeasurement:
    """The methods of one seed; what has been measured is kept beside the runs."""

    def __init__(self, setting: Setting, work: Path, seed: int) -> None:
        self._setting, self._work, self._seed = setting, work, seed
        self._worth = RewardsConfig.parse({"parts": [setting.worth]})

    @property
    def methods(self) -> list[str]:
        """Those that are trained, and the controls that train nothing."""
        controls = ["temperature", BEST_BY_REWARD]
        if self._setting.truth is not None:
            controls += [BEST_BY_MEANS, OPTIMUM]
        return [SUPERVISED, *self._setting.methods, *controls]

    def measured(self, method: str) -> tuple[Scores, dict[str, float]]:
        """(scores of the test users, what the run was like)."""
        path = self._path(method).with_suffix(".npz")
        facts_path = path.with_suffix(".json")
        if not path.is_file():
            scores, facts = self._measure(method)
            self._say(method, scores, facts)
            facts_path.write_text(json.dumps(facts))
            np.savez(path, **scores)  # type: ignore[arg-type]
        with np.load(path) as kept:
            return dict(kept), json.loads(facts_path.read_text())

    def _measure(self, method: str) -> tuple[Scores, dict[str, float]]:
        if method in self._setting.methods:
            run = self._trained(method)
            return self._lists(run).beam(), self._facts(run)
        supervised = self._supervised
        if method == "temperature":
            best, scores = supervised.temperature(TEMPERATURES, self._setting.metric)
            return scores, {"temperature": best}
        if method == BEST_BY_REWARD:
            return supervised.best_of(N, supervised.worth), {}
        if method == BEST_BY_MEANS:
            return supervised.best_of(N, self._item_means()), {}
        if method == OPTIMUM:
            return supervised.of_test("worth", self._optimum()), {}
        return supervised.beam(), {}

    @cached_property
    def _supervised(self) -> ListMaker:
        return self._lists(self._base)

    @cached_property
    def _base(self) -> Path:
        """The supervised run."""
        run = self._path(SUPERVISED)
        if not _has_ended(run):
            config = RunConfig.load(
                CHECKOUT / "configs" / "movielens-generative.yaml",
                [f"seed={self._seed}", "cluster.dashboard=false", *self._setting.supervised],
            )
            begun = time.process_time()
            train(config, run, resume="if_begun", cluster=in_process)
            _keep_cpu(run, begun)
        return run

    def _lists(self, run: Path) -> ListMaker:
        return ListMaker(str(run), "best", self._worth, HELD_OUT)

    def _config(self, method: str) -> RlConfig:
        changes = self._setting.methods[method]
        base = {"init_from": str(self._base), "seed": self._seed}
        return RlConfig.parse(base | self._setting.common | changes)

    def _trained(self, method: str) -> Path:
        run = self._path(method)
        if not _has_ended(run):
            begun = time.process_time()
            train_policy(self._config(method), run, resume=run.is_dir(), cluster=in_process)
            _keep_cpu(run, begun)
        return run

    def _path(self, method: str) -> Path:
        name = method.lower().replace(",", "").replace(" ", "-")
        return self._work / f"{self._setting.name}-{name}-{self._seed}"

    def _facts(self, run: Path) -> dict[str, float]:
        """Means over the steps, and processor seconds."""
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        found = {name: float(np.mean([line[name] for line in steps])) for name in SHOWN_METRICS}
        # From the second batch on, the policy may have moved since the batch was sampled.
        found["largest clip_share"] = max(line["clip_share"] for line in steps)
        last = [line for line in lines if "seconds/learner.update" in line][-1]
        work = ("rollouts.sample", "rewards.score", "reference.log_probs", "learner.update")
        found["seconds of steps"] = sum(last[f"seconds/{name}"] for name in work)
        return found | json.loads((run / "cpu.json").read_text())

    def _item_means(self) -> ItemMeans:
        """Of answers to what the supervised policy samples, as many as training asked for."""
        config, policy = self._config("GRPO"), self._supervised.policy
        asked = ListMaker(config.init_from, "best", config.rewards, HELD_OUT)
        stream = PromptStream(policy.task.dataset, config.prompts, config.seed)
        items, answers = [], []
        for step in range(config.steps):
            prompts = stream.step(step)
            rollouts = policy.sample(prompts, config.rollout, config.seed)
            items.append(rollouts.items_UG.reshape(-1))
            answers.append(asked.worth(prompts, rollouts.items_UG).reshape(-1))
        return ItemMeans.of(np.concatenate(items), np.concatenate(answers), len(policy.task.dataset.items))

    def _optimum(self) -> np.ndarray:
        dataset, truth = self._supervised.policy.task.dataset, self._setting.truth
        assert truth is not None, "it is asked for where there is one"
        world = World.read(truth, pd.Index(dataset.items.keys.to_pandas()), SATIATION)
        ids, keys = (dataset.users[name].to_pylist() for name in ("user_id", "user_key"))
        key_of = dict(zip(ids, keys, strict=True))
        found = []
        for prompts in self._supervised.prompts("test"):
            samples = prompts.samples
            rows_U = world.rows_of([str(key_of[user]) for user in samples.user_ids_B.tolist()])
            histories = np.split(dataset.item_positions(samples.item_ids_N), samples.offsets_B1[1:-1])
            found.append(best_lists(world, rows_U, _padded(histories, MEMORY), _padded(histories, None)))
        return np.concatenate(found)

    def _say(self, method: str, scores: Scores, facts: dict[str, float]) -> None:
        means = ", ".join(f"{name} {np.nanmean(score_U):.4f}" for name, score_U in scores.items())
        rest = ", ".join(f"{name} {value:.3g}" for name, value in facts.items())
        log.print(f"{self._setting.name} {self._seed} {method}: {means}; {rest}", highlight=False)


def _padded(histories: Sequence[np.ndarray], newest: int | None) -> np.ndarray:
    """Rows of the newest events, padded with -1."""
    width = newest or max(map(len, histories))
    rows = np.full((len(histories), width), -1)
    for row, history in zip(rows, histories, strict=True):
        kept = history[-width:]
        row[: len(kept)] = kept
    return rows


def _has_ended(run: Path) -> bool:
    return run.is_dir() and RunFolder.open(run).condition == "finished" and (run / "cpu.json").is_file()


def _keep_cpu(run: Path, begun: float) -> None:
    seconds = time.process_time() - begun
    (run / "cpu.json").write_text(json.dumps({"cpu seconds": seconds}))


def check_work(setting: Setting, work: Path) -> None:
    """Refuse a folder whose runs had other settings.

    Raises:
        InputError: names the folder.
    """
    path, now = (
        work / f"{setting.name}-settings.json",
        json.dumps(asdict(setting), default=str, sort_keys=True),
    )
    if path.is_file() and path.read_text() != now:
        raise InputError(f"{work}: its runs of {setting.name} had other settings; give another folder")
    path.write_text(now)


def record_of(setting: Setting, seeds: Sequence[int], work: Path) -> dict[str, Any]:
    """Measure what is not measured yet, and summarize all seeds; `check_work` comes first."""
    by_seed = [SeedMeasurement(setting, work, seed) for seed in seeds]
    measured = {method: [of_seed.measured(method) for of_seed in by_seed] for method in by_seed[0].methods}
    scores = {
        method: {metric: np.stack([each[metric] for each, _ in found]) for metric in found[0][0]}
        for method, found in measured.items()
    }
    control = next(iter(setting.methods))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "setting": setting.name,
        "seeds": list(seeds),
        "num_users": scores[SUPERVISED]["worth"].shape[1],
        "supervised cpu seconds": [
            json.loads((work / f"{setting.name}-{SUPERVISED}-{seed}" / "cpu.json").read_text())["cpu seconds"]
            for seed in seeds
        ],
        "results": {
            method: {
                metric: _compared(found_SU, scores[SUPERVISED][metric]) for metric, found_SU in found.items()
            }
            for method, found in scores.items()
        },
        f"against {control}": {
            method: {
                metric: _compared(found_SU, scores[control][metric])["change"]
                for metric, found_SU in scores[method].items()
            }
            for method in setting.methods
            if method != control
        },
        "facts": {
            method: {name: float(np.mean([facts[name] for _, facts in found])) for name in found[0][1]}
            for method, found in measured.items()
        },
    }


def _compared(scores_SU: np.ndarray, supervised_SU: np.ndarray) -> dict[str, Any]:
    some_U = ~np.isnan(scores_SU[0])
    scores_SU, supervised_SU = scores_SU[:, some_U], supervised_SU[:, some_U]
    return {
        "mean": mean_of(scores_SU)._asdict(),
        "by seed": scores_SU.mean(axis=1).tolist(),
        "change": change_of(scores_SU, supervised_SU)._asdict(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rl_evidence")
    parser.add_argument("setting", choices=["movielens", "world"])
    parser.add_argument("--source", type=Path, help="MovieLens 100K as RecBole publishes it")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--runs-only", action="store_true", help="write no record, so that processes can share the seeds"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    if options.setting == "movielens":
        if options.source is None:
            parser.error("movielens needs --source")
        setting = movielens(prepared_movielens(options.source, work))
    else:
        setting = world(*prepared_world(work))
    check_work(setting, work)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.runs_only:
        for seed in seeds:
            measurement = SeedMeasurement(setting, work, seed)
            for method in measurement.methods:
                measurement.measured(method)
        return
    record = record_of(setting, seeds, work)
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    (EVIDENCE / f"{setting.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    write_page()


if __name__ == "__main__":
    main()
