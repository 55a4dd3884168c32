"""How a run of reinforcement learning is resumed, and which runs are seeds of one method."""

import json

import numpy as np

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.method import Method, rewards_of, seed_in_words
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.rl.config import RlConfig
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import PromptStream
from rayrec.rl.run_folder import RlRunFolder
from tests.helpers.runs import make_run


def test_a_resumed_run_has_one_line_per_step(tmp_path):
    """It died after step 3; its last snapshot is that of step 2."""
    supervised = make_run(tmp_path, "prefix")
    config = RlConfig.parse(
        {"init_from": str(supervised), "snapshot": "last", "rewards": {"parts": [{"kind": "hit"}]}}
    )
    policy, path = Policy.load(config), tmp_path / "rl"
    folder = RlRunFolder.create(path, config, RunFolder.open(supervised).config, policy)
    position = PromptStream(policy.task.dataset, config.prompts, 0).position
    state = {"step": np.array(0)}
    for step in (0, 2):
        folder.save(step, policy.program.views(), state, position(step), {}, is_best=step == 0)
    for step in (0, 1, 2, 2, 3):  # a validation comes after its step
        folder.folder.log({"step": step})

    longer = config.model_copy(update={"steps": 700})
    resumed = RlRunFolder.resume(path, longer, RunFolder.open(supervised).config, policy)

    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 2]
    assert resumed.last().committed_step == 1
    assert RlConfig.load(path / "rl.yaml") == longer  # the next one that goes on with it takes as many


def test_runs_that_differ_in_seeds_alone_are_of_one_method(tmp_path):
    """Of what they began with, or of their own; others are not, though they have one network."""

    def method_of(name: str, began_with: int, seed: int | None, loss: str = "gspo", **more) -> Method:
        model = {"name": "prefix_decoder"}
        begun = RunConfig.parse({"data": {"path": "data"}, "model": model, "seed": began_with})
        folder = RunFolder.create(tmp_path / name, begun)
        if seed is not None:
            values = {"rewards": {"parts": [{"kind": "hit"}]}, "algorithm": {"name": loss}, "seed": seed}
            config = RlConfig.parse({"init_from": f"runs/{began_with}", **values, **more})
            (folder.path / "rl.yaml").write_text(config.to_yaml())
        return Method.of_run(folder)

    supervised = method_of("supervised", 1, None)
    seeds = [method_of(f"rl-{one}-{other}", one, other) for one in range(2) for other in range(2)]
    moved = method_of("moved", 0, 0, placement={"kind": "async"}, device="cpu")

    assert len({each.settings for each in (*seeds, moved)}) == 1
    assert len({each.seed for each in seeds}) == 4
    assert moved == seeds[0]
    others = [supervised, method_of("loss", 0, 0, "grpo"), method_of("steps", 0, 0, steps=7)]
    assert len({each.settings for each in (seeds[0], *others)}) == 4


def test_a_quantized_run_is_of_the_method_that_its_source_was_trained_by(tmp_path):
    config = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "prefix_decoder"}})
    source, quantized = (RunFolder.create(tmp_path / name, config) for name in ("source", "quantized"))
    rewards = {"rewards": {"parts": [{"kind": "hit"}]}, "seed": 3}
    (source.path / "rl.yaml").write_text(RlConfig.parse({"init_from": "runs/0", **rewards}).to_yaml())

    quantized.update(by_rewards=rewards_of(source))

    assert Method.of_run(quantized) == Method.of_run(source)
    assert seed_in_words(Method.of_run(source).seed) == "the seeds 3 (rewards) and 0"
    assert seed_in_words(4) == "the seed 4"
