"""How a run of reinforcement learning is resumed."""

import json

import numpy as np

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
