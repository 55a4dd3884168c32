"""A trained model as a policy, in one process: what is drawn, and what a learner makes of it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.models.program.program import DivergedError
from rayrec.platform.errors import InputError
from rayrec.rl.config import PromptsConfig, RlConfig, RolloutConfig
from rayrec.rl.learner import StepTotals, sampled_of
from rayrec.rl.prompts import PromptStream, is_held_out
from rayrec.rl.rewards.errors import RewardError
from rayrec.rl.weights import Weights, WeightsChangedError
from rayrec.rl.workers import RolloutWorker, load_policy, make_learner, make_parts, make_rewards
from tests.helpers.runs import make_run

DRAWS = ("sample", "stochastic_beam", "beam")


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
    """A step in one process, and what was there on the way."""
    policy = load_policy(config)
    learner, rewards = make_learner(config, policy), make_rewards(config, policy)
    prompts = prompts_of(policy).step(0)
    drawn = [policy.draw(chunk, config.rollout, config.seed) for chunk in prompts.chunks(5)]
    scored = [rewards.score(rollouts) for rollouts in drawn]
    reference = load_policy(config)
    of_reference = [reference.log_probs(rollouts, config.rollout.temperature) for rollouts in drawn]
    num_users = sum(len(rollouts.items_UG) for rollouts in drawn)
    totals = StepTotals(0, num_users, 2.0)
    report = learner.update(totals, *[rewarded for _, rewarded in scored], *of_reference)
    return policy, learner, drawn, scored, report


@pytest.mark.parametrize("draw", DRAWS)
def test_a_learner_says_of_what_was_drawn_what_the_policy_said(run, draw):
    config = config_of(run, rollout={"group_size": 6, "draw": draw, "temperature": 0.7})
    policy = load_policy(config)
    prompts = prompts_of(policy).step(0)
    rollouts = policy.draw(prompts, config.rollout, seed=3)
    learner, rewards = make_learner(config, policy), make_rewards(config, policy)
    _, rewarded = rewards.score(rollouts)
    totals = StepTotals(0, len(prompts), 2.0)
    share, rows = learner._share(totals, [rewarded], [])
    sampled = sampled_of(policy.network, learner._program._batch(share, rows, training=True))

    assert (rollouts.items_UG >= 0).any()
    torch.testing.assert_close(
        sampled.log_probs_UGL.detach(), torch.tensor(rollouts.code_log_probs_UGL), atol=1e-5, rtol=1e-5
    )
    assert sampled.log_probs_UGL.requires_grad
    np.testing.assert_allclose(rollouts.weights_UG.sum(axis=1), 1.0, atol=1e-5)


def test_nothing_seen_is_drawn_unless_it_may_be(prefix_run):
    policy = load_policy(config_of(prefix_run))
    prompts = prompts_of(policy).step(0)
    seen_UE = policy.inputs(prompts.samples).seen_UE
    drawn = policy.draw(prompts, RolloutConfig(group_size=20), seed=0)
    assert not (drawn.items_UG[:, :, None] == seen_UE[:, None, :]).any()

    again = load_policy(config_of(prefix_run, rollout={"exclude_seen": False}))
    drawn = again.draw(prompts, RolloutConfig(group_size=20), seed=0)
    assert (drawn.items_UG[:, :, None] == seen_UE[:, None, :]).any()


def test_draws_hang_on_prompts_and_seed_and_on_nobody_who_draws(prefix_run):
    config = config_of(prefix_run)
    first, second = load_policy(config), load_policy(config)
    chunks = prompts_of(first).step(0).chunks(5)
    first.draw(chunks[0], config.rollout, 7)  # somebody else's work before
    one, other = (policy.draw(chunks[1], config.rollout, 7) for policy in (first, second))
    assert np.array_equal(one.items_UG, other.items_UG)
    assert np.array_equal(one.code_log_probs_UGL, other.code_log_probs_UGL)
    assert not np.array_equal(one.items_UG, first.draw(chunks[1], config.rollout, 8).items_UG)


def test_a_step_changes_the_policy_toward_what_was_rewarded(run):
    config = config_of(run, rewards={"parts": [{"kind": "novelty"}]}, learner={"learning_rate": 0.003})
    policy, learner, drawn, scored, report = learned(config)

    centered = [rewarded.rewards_UG - rewarded.rewards_UG.mean(1, keepdims=True) for _, rewarded in scored]
    grown = [
        policy.log_probs(rollouts, 1.0).candidates_UGL.sum(2) - rollouts.code_log_probs_UGL.sum(2)
        for rollouts in drawn
    ]
    together = sum(float((good * more).sum()) for good, more in zip(centered, grown, strict=True))
    assert together > 0
    assert learner.version == policy.version == 1
    assert {"loss", "kl", "clip_share", "target_log_prob"} <= set(report)


def test_rows_of_tables_stay_as_they_were(tmp_path):
    """Live rows would be of no version; they are those of the supervised run, for whoever draws or learns."""
    run = make_run(tmp_path, "generative")
    policy, *_ = learned(config_of(run))
    fresh = load_policy(config_of(run))
    samples = prompts_of(fresh).step(0).samples
    before, after = fresh.inputs(samples).rows, policy.inputs(samples).rows
    assert before
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_weights_are_checked_where_they_arrive(prefix_run):
    config = config_of(prefix_run)
    _, learner, *_ = learned(config)
    policy = load_policy(config)
    worker = RolloutWorker(policy, config.rollout, 0)
    chunk = prompts_of(policy).step(0).chunks(5)[0]
    sent = learner.weights()  # of a network that nobody changes any more
    name = next(iter(sent.arrays))
    damaged = Weights(sent.version, sent.arrays | {name: sent.arrays[name] + 1}, sent.checksum)
    with pytest.raises(WeightsChangedError, match="version 1"):
        worker.draw(chunk, damaged)

    summary, rollouts = worker.draw(chunk, sent)
    assert summary.policy_version == rollouts.policy_version == 1
    assert worker.sync_seconds() > 0


def test_users_held_out_are_asked_for_never(prefix_run):
    policy = load_policy(config_of(prefix_run))
    ids_U = policy.task.dataset.users["user_id"].to_numpy()
    held_out = set(ids_U[is_held_out(ids_U, 0.5)].tolist())
    assert 0 < len(held_out) < len(ids_U)
    for split in ("train", "valid"):
        stream = prompts_of(policy, split=split, held_out_share=0.5)
        asked = {int(user) for step in range(6) for user in stream.step(step).samples.user_ids_B}
        assert asked
        assert not asked & held_out


def test_prompts_end_before_their_target(prefix_run):
    policy = load_policy(config_of(prefix_run))
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


def test_the_same_step_has_the_same_prompts_whoever_asks_first(prefix_run):
    policy = load_policy(config_of(prefix_run))
    one, other = prompts_of(policy), prompts_of(policy)
    one.step(0)
    assert np.array_equal(one.step(3).samples.item_ids_N, other.step(3).samples.item_ids_N)
    assert np.array_equal(one.step(3).targets_U, other.step(3).targets_U)


def nan_reward(lists):
    rewards_UG = np.zeros(lists.items_UG.shape)
    rewards_UG[1, 2] = np.nan
    return rewards_UG


def test_a_reward_that_is_no_number_is_named_with_its_sample(prefix_run):
    own = {"kind": "function", "function": f"{__name__}:nan_reward"}
    config = config_of(prefix_run, rewards={"parts": [own, {"kind": "hit"}]})
    with pytest.raises(RewardError, match=r"'function' of user 'u\d+', item position \d+ at place 2"):
        learned(config)


def test_a_model_that_draws_nothing_is_refused(tmp_path):
    run = make_run(tmp_path, "sasrec")
    with pytest.raises(InputError, match="init_from has to be a run of a generative model"):
        load_policy(config_of(run))


def test_a_process_of_rewards_alone_needs_no_accelerator(prefix_run):
    """It claims none, whatever the policy is trained on."""
    parts = make_parts(config_of(prefix_run, device="cuda"), ["rewards"], None)
    assert parts["rewards"]._inputs._policy.program.device.type == "cpu"


def test_a_policy_that_diverges_is_told_of_in_the_settings_of_its_run(prefix_run):
    policy, learner, _, scored, _ = learned(config_of(prefix_run))
    rewarded = scored[0][1]
    with torch.no_grad():
        next(policy.network.parameters()).fill_(torch.nan)
    totals = StepTotals(4, len(rewarded.rewards_UG), 2.0)
    with pytest.raises(DivergedError, match=r"step 5: .* nan; .*lower learner\.learning_rate or set"):
        learner.update(totals, rewarded)
    assert learner.version == policy.version == 1


def test_chunks_are_the_whole_step(prefix_run):
    prompts = prompts_of(load_policy(config_of(prefix_run))).step(0)
    chunks = prompts.chunks(5)
    assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
    assert np.array_equal(
        np.concatenate([chunk.samples.item_ids_N for chunk in chunks]), prompts.samples.item_ids_N
    )


def test_a_data_set_with_labels_and_times_is_learned_from_like_any_other(tmp_path):
    run = make_run(tmp_path, "prefix", labeled=True)
    rewards = {"parts": [{"kind": "hit", "by_scenario": {"search": 2.0}}]}
    _, _, drawn, scored, _ = learned(config_of(run, rewards=rewards))
    hits = [rollouts.items_UG == rollouts.prompts.targets_U[:, None] for rollouts in drawn]
    worth = {
        float(value)
        for hit_UG, (_, rewarded) in zip(hits, scored, strict=True)
        for value in rewarded.rewards_UG[hit_UG]
    }
    assert worth <= {1.0, 2.0}  # hits are rare here
    assert {float(target) for _, each in scored for target in each.target_rewards_U} == {1.0, 2.0}


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


def test_a_hit_is_worth_what_the_target_is_worth_in_that_list(prefix_run):
    """Wherever it stands: R and R* of one item of one list are the same, so that no hit is gated."""
    rewards = {"parts": [{"kind": "hit"}, {"kind": "rank_position"}]}
    config = config_of(prefix_run, rewards=rewards, rollout={"group_size": 12, "chunk_users": 64})
    policy = load_policy(config)
    worker = make_rewards(config, policy)
    hits = []
    for step in range(3):
        rollouts = policy.draw(prompts_of(policy, split="train").step(step), config.rollout, 0)
        _, rewarded = worker.score(rollouts)
        is_hit_UG = rollouts.items_UG == rollouts.prompts.targets_U[:, None]
        targets_UG = np.broadcast_to(rewarded.target_rewards_U[:, None], is_hit_UG.shape)
        np.testing.assert_allclose(rewarded.rewards_UG[is_hit_UG], targets_UG[is_hit_UG])
        hits.extend(rewarded.rewards_UG[is_hit_UG].tolist())
    assert len(set(hits)) > 1
    assert max(hits) <= 2.0


def test_a_step_whose_users_are_all_held_out_asks_for_those_of_the_next(prefix_run):
    policy = load_policy(config_of(prefix_run))
    stream = prompts_of(policy, users_per_step=1, held_out_share=0.5)
    asked = [stream.step(step) for step in range(12)]
    assert all(len(prompts) == 1 for prompts in asked)
    assert [prompts.step for prompts in asked] == list(range(12))
    with pytest.raises(InputError, match="nobody to ask for"):
        prompts_of(policy, held_out_share=0.999999).step(0)


def test_pieces_of_a_step_add_up_to_the_whole(run):
    changes = {"learning_rate": 0.01, "warmup_steps": 0, "kl_weight": 0.1, "anchor_weight": 0.1}
    whole, *_ = learned(config_of(run, learner=changes))
    pieces, *_ = learned(config_of(run, learner=changes | {"micro_batches": 3}))
    expected = dict(whole.network.named_parameters())
    for name, parameter in pieces.network.named_parameters():
        torch.testing.assert_close(parameter, expected[name], atol=2e-4, rtol=1e-3)
