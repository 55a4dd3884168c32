"""A trained model as a policy, in one process: sampling, scoring and one update."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.actors.spawning import ActorRole
from rayrec.models.program.program import DivergedError
from rayrec.platform.errors import InputError
from rayrec.rl.config import PromptsConfig, RlConfig, RolloutConfig
from rayrec.rl.learner import BatchTotals, PolicyLearner, loss_inputs
from rayrec.rl.policy import Policy, Weights, WeightsChangedError
from rayrec.rl.prompts import PromptStream, is_held_out
from rayrec.rl.rewards.base import RewardError
from rayrec.rl.scoring import RolloutScorer
from rayrec.rl.worker import RlWorker
from tests.helpers.runs import make_run

METHODS = ("sample", "stochastic_beam", "beam")


@pytest.fixture(scope="module", params=["prefix", "generative", "lazy"])
def run(request, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def prefix_run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("prefix"), "prefix")


def config_of(run: Path, **changes) -> RlConfig:
    values = {
        "init_from": str(run),
        "snapshot": "last",
        "steps": 2,
        "algorithm": {"name": "grpo"},
        "prompts": {"users_per_step": 16, "held_out_share": 0.2},
        "rollout": {"group_size": 4, "chunk_users": 5},
        "rewards": {"parts": [{"kind": "hit"}, {"kind": "novelty", "weight": 0.1}]},
        "learner": {"learning_rate": 0.01, "warmup_steps": 0},
    }
    return RlConfig.parse(values | changes)


def prompts_of(policy, **changes):
    settings = PromptsConfig(**({"users_per_step": 16, "held_out_share": 0.2} | changes))
    return PromptStream(policy.task.dataset, settings, 0)


def learned(config):
    """A step in one process, and its intermediate results."""
    policy = Policy.load(config)
    learner, scorer = PolicyLearner.of(config, policy), RolloutScorer.of(config.rewards, policy)
    prompts = prompts_of(policy).step(0)
    rollouts = [policy.sample(chunk, config.rollout, config.seed) for chunk in prompts.chunks(5)]
    scored = [scorer.score(each)[1] for each in rollouts]
    reference = Policy.load(config)
    of_reference = [reference.log_probs(each, config.rollout.temperature) for each in rollouts]
    num_users = sum(len(each.items_UG) for each in rollouts)
    report = learner.update(BatchTotals(0, num_users, 2.0), scored, of_reference)
    return policy, learner, rollouts, scored, report


@pytest.mark.parametrize("method", METHODS)
def test_the_learner_computes_the_log_probabilities_of_the_rollouts(run, method):
    config = config_of(run, rollout={"group_size": 6, "method": method, "temperature": 0.7})
    policy = Policy.load(config)
    prompts = prompts_of(policy).step(0)
    rollouts = policy.sample(prompts, config.rollout, seed=3)
    learner, scorer = PolicyLearner.of(config, policy), RolloutScorer.of(config.rewards, policy)
    _, scored = scorer.score(rollouts)
    batch, _ = learner.batch(BatchTotals(0, len(prompts), 2.0), [scored], [])
    inputs = loss_inputs(policy.network, batch)

    assert (rollouts.items_UG >= 0).any()
    torch.testing.assert_close(
        inputs.log_probs_UGL.detach(), torch.tensor(rollouts.code_log_probs_UGL), atol=1e-5, rtol=1e-5
    )
    assert inputs.log_probs_UGL.requires_grad
    is_target_UG = rollouts.items_UG == np.where(prompts.targets_U < 0, -2, prompts.targets_U)[:, None]
    assert inputs.is_target_UG.tolist() == is_target_UG.tolist()
    np.testing.assert_allclose(rollouts.weights_UG.sum(axis=1), 1.0, atol=1e-5)


def test_items_of_the_history_are_sampled_only_if_allowed(prefix_run):
    policy = Policy.load(config_of(prefix_run))
    prompts = prompts_of(policy).step(0)
    seen_UE = policy.inputs(prompts.samples).seen_UE
    sampled = policy.sample(prompts, RolloutConfig(group_size=20), seed=0)
    assert not (sampled.items_UG[:, :, None] == seen_UE[:, None, :]).any()

    again = Policy.load(config_of(prefix_run, rollout={"exclude_seen": False}))
    sampled = again.sample(prompts, RolloutConfig(group_size=20), seed=0)
    assert (sampled.items_UG[:, :, None] == seen_UE[:, None, :]).any()


def test_samples_depend_on_prompts_and_seed_and_not_on_the_worker(prefix_run):
    config = config_of(prefix_run)
    first, second = Policy.load(config), Policy.load(config)
    chunks = prompts_of(first).step(0).chunks(5)
    first.sample(chunks[0], config.rollout, 7)  # other work before
    one, other = (policy.sample(chunks[1], config.rollout, 7) for policy in (first, second))
    assert np.array_equal(one.items_UG, other.items_UG)
    assert np.array_equal(one.code_log_probs_UGL, other.code_log_probs_UGL)
    assert not np.array_equal(one.items_UG, first.sample(chunks[1], config.rollout, 8).items_UG)


def test_a_step_moves_the_policy_toward_higher_rewards(run):
    config = config_of(run, rewards={"parts": [{"kind": "novelty"}]}, learner={"learning_rate": 0.003})
    policy, learner, sampled, scored, report = learned(config)

    centered = [each.rewards_UG - each.rewards_UG.mean(1, keepdims=True) for each in scored]
    grown = [
        policy.log_probs(rollouts, 1.0).candidates_UGL.sum(2) - rollouts.code_log_probs_UGL.sum(2)
        for rollouts in sampled
    ]
    together = sum(float((good * more).sum()) for good, more in zip(centered, grown, strict=True))
    assert together > 0
    assert learner.version == policy.version == 1
    assert {"loss", "kl", "clip_share", "target_log_prob"} <= set(report)


def test_rows_of_tables_stay_as_they_were(tmp_path):
    """Live rows would belong to no version, so rollouts and learner read those of the supervised run."""
    run = make_run(tmp_path, "generative")
    policy, *_ = learned(config_of(run))
    fresh = Policy.load(config_of(run))
    samples = prompts_of(fresh).step(0).samples
    before, after = fresh.inputs(samples).rows, policy.inputs(samples).rows
    assert before
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_weights_are_checked_where_they_arrive(prefix_run):
    config = config_of(prefix_run)
    _, learner, *_ = learned(config)
    worker = RlWorker(ActorRole("run", "rl_rollouts", 0), config, ["rollouts"])
    chunk = prompts_of(Policy.load(config)).step(0).chunks(5)[0]
    sent = learner.weights()  # of a network that does not change any more
    name = next(iter(sent.arrays))
    damaged = Weights(sent.version, sent.arrays | {name: sent.arrays[name] + 1}, sent.checksum)
    with pytest.raises(WeightsChangedError, match="version 1"):
        worker.sample(chunk, damaged)

    assert worker.sample(chunk, sent).policy_version == 1
    assert worker.seconds()["sync"] > 0


def test_held_out_users_are_in_no_prompt(prefix_run):
    policy = Policy.load(config_of(prefix_run))
    ids_U = policy.task.dataset.users["user_id"].to_numpy()
    held_out = set(ids_U[is_held_out(ids_U, 0.5)].tolist())
    assert 0 < len(held_out) < len(ids_U)
    for split in ("train", "valid"):
        stream = prompts_of(policy, split=split, held_out_share=0.5)
        asked = {int(user) for step in range(6) for user in stream.step(step).samples.user_ids_B}
        assert asked
        assert not asked & held_out


def test_prompts_end_before_their_target(prefix_run):
    policy = Policy.load(config_of(prefix_run))
    dataset = policy.task.dataset
    known = {
        int(user): dataset.history_of(str(key)).tolist()
        for user, key in zip(
            dataset.users["user_id"].to_pylist(), dataset.users["user_key"].to_pylist(), strict=True
        )
    }
    for settings in ({"event": "any"}, {"event": "last"}, {"split": "valid"}):
        prompts = prompts_of(policy, **settings).step(0)
        samples, targets_B = prompts.samples, prompts.samples.targets_B
        for row, user in enumerate(samples.user_ids_B.tolist()):
            start, stop = samples.offsets_B1[row : row + 2]
            history = samples.item_ids_N[start:stop].tolist()
            assert [*history, targets_B[row]] == known[user][: len(history) + 1]
        assert np.array_equal(prompts.targets_U, dataset.item_positions(targets_B))


def test_the_prompts_of_a_step_do_not_depend_on_what_was_read_before(prefix_run):
    policy = Policy.load(config_of(prefix_run))
    one, other = prompts_of(policy), prompts_of(policy)
    one.step(0)
    assert np.array_equal(one.step(3).samples.item_ids_N, other.step(3).samples.item_ids_N)
    assert np.array_equal(one.step(3).targets_U, other.step(3).targets_U)


def nan_reward(lists):
    rewards_UG = np.zeros(lists.items_UG.shape)
    rewards_UG[1, 2] = np.nan
    return rewards_UG


def test_a_reward_that_is_not_finite_is_named_with_its_candidate(prefix_run):
    own = {"kind": "function", "function": f"{__name__}:nan_reward"}
    config = config_of(prefix_run, rewards={"parts": [own, {"kind": "hit"}]})
    with pytest.raises(RewardError, match=r"'function' of user 'u\d+', catalog item \d+ at position 2"):
        learned(config)


def test_a_model_that_does_not_generate_is_refused(tmp_path):
    run = make_run(tmp_path, "sasrec")
    with pytest.raises(InputError, match="init_from has to be a run of a generative model"):
        Policy.load(config_of(run))


def test_a_process_of_rewards_alone_needs_no_accelerator(prefix_run):
    """It claims none, whatever device the policy is trained on."""
    config = config_of(prefix_run, device="cuda")
    worker = RlWorker(ActorRole("run", "rl_rewards", 0), config, ["rewards"])
    assert worker._scorer._inputs._policy.program.device.type == "cpu"


def test_a_diverging_policy_is_reported_with_the_settings_to_change(prefix_run):
    policy, learner, _, scored, _ = learned(config_of(prefix_run))
    chunk = scored[0]
    with torch.no_grad():
        next(policy.network.parameters()).fill_(torch.nan)
    totals = BatchTotals(4, len(chunk.rewards_UG), 2.0)
    with pytest.raises(DivergedError, match=r"step 5: .* nan; .*lower learner\.learning_rate or set"):
        learner.update(totals, [chunk], [])
    assert learner.version == policy.version == 1


def test_chunks_are_the_whole_step(prefix_run):
    prompts = prompts_of(Policy.load(config_of(prefix_run))).step(0)
    chunks = prompts.chunks(5)
    assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
    assert np.array_equal(
        np.concatenate([chunk.samples.item_ids_N for chunk in chunks]), prompts.samples.item_ids_N
    )


def test_a_data_set_with_labels_and_times_is_learned_from_like_any_other(tmp_path):
    run = make_run(tmp_path, "prefix", labeled=True)
    rewards = {"parts": [{"kind": "hit", "by_scenario": {"search": 2.0}}]}
    _, _, sampled, scored, _ = learned(config_of(run, rewards=rewards))
    hits = [rollouts.items_UG == rollouts.prompts.targets_U[:, None] for rollouts in sampled]
    worth = {
        float(value) for hit_UG, each in zip(hits, scored, strict=True) for value in each.rewards_UG[hit_UG]
    }
    assert worth <= {1.0, 2.0}  # hits are rare here
    assert {float(target) for each in scored for target in each.target_rewards_U} == {1.0, 2.0}


def test_a_run_means_the_same_wherever_its_processes_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [
        {"kind": "hit"},
        {"kind": "ranker", "ranking": {"run": "ranker"}},
        {"kind": "business_value", "path": "margins.csv", "column": "margin"},
        {"kind": "function", "function": "mine:reward", "folder": "rewards"},
    ]
    config = config_of(Path("run"), rewards={"parts": parts}).with_absolute_paths()
    _, ranker, value, function = config.rewards.parts
    assert config.init_from == str(tmp_path / "run")
    assert ranker.ranking.run == str(tmp_path / "ranker")
    assert (value.path, function.folder) == (str(tmp_path / "margins.csv"), tmp_path / "rewards")
    assert config.with_absolute_paths() == config


def test_a_hit_has_the_reward_of_the_target_in_that_list(prefix_run):
    """Wherever it stands: R and R* of one item of one list are the same, so that no hit is gated."""
    rewards = {"parts": [{"kind": "hit"}, {"kind": "rank_position"}]}
    config = config_of(prefix_run, rewards=rewards, rollout={"group_size": 12, "chunk_users": 64})
    policy = Policy.load(config)
    worker = RolloutScorer.of(config.rewards, policy)
    hits = []
    for step in range(3):
        rollouts = policy.sample(prompts_of(policy, split="train").step(step), config.rollout, 0)
        _, scored = worker.score(rollouts)
        is_hit_UG = rollouts.items_UG == rollouts.prompts.targets_U[:, None]
        targets_UG = np.broadcast_to(scored.target_rewards_U[:, None], is_hit_UG.shape)
        np.testing.assert_allclose(scored.rewards_UG[is_hit_UG], targets_UG[is_hit_UG])
        hits.extend(scored.rewards_UG[is_hit_UG].tolist())
    assert len(set(hits)) > 1
    assert max(hits) <= 2.0


def test_a_step_whose_users_are_all_held_out_takes_those_of_the_next(prefix_run):
    policy = Policy.load(config_of(prefix_run))
    stream = prompts_of(policy, users_per_step=1, held_out_share=0.5)
    asked = [stream.step(step) for step in range(12)]
    assert all(len(prompts) == 1 for prompts in asked)
    assert [prompts.step for prompts in asked] == list(range(12))
    with pytest.raises(InputError, match="no users to sample for"):
        prompts_of(policy, held_out_share=0.999999).step(0)


def test_micro_batches_add_up_to_the_whole(run):
    changes = {"learning_rate": 0.01, "warmup_steps": 0, "kl_coefficient": 0.1, "nll_coefficient": 0.1}
    whole, *_ = learned(config_of(run, learner=changes))
    pieces, *_ = learned(config_of(run, learner=changes | {"micro_batches": 3}))
    expected = dict(whole.network.named_parameters())
    for name, parameter in pieces.network.named_parameters():
        torch.testing.assert_close(parameter, expected[name], atol=2e-4, rtol=1e-3)
