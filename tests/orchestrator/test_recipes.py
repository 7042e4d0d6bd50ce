"""An objective's name sets what its paper sets, and TRL's loss arguments land on the same settings."""

import pytest

from harness_rl import AsyncGRPOConfig
from harness_rl.config import LearnerSection, RolloutSection, RunConfig
from harness_rl.configfile import resolve_config, to_toml
from harness_rl.errors import UserError


def test_a_name_alone_is_the_algorithm():
    gspo = resolve_config({"learner": {"objective": "gspo"}}, [], "t").learner
    assert (gspo.epsilon_low, gspo.epsilon_high, gspo.loss_normalisation) == (3e-4, 4e-4, "rollout")
    dr_grpo = resolve_config({}, ["learner.objective=dr_grpo"], "t")
    assert (dr_grpo.learner.loss_normalisation, dr_grpo.rollout.normalise_advantage) == ("constant", "none")
    dppo = RunConfig(learner=LearnerSection(objective="dppo_tv"))
    assert (dppo.learner.ratio, dppo.learner.epsilon_high, dppo.learner.ratio_max) == ("behaviour", 0.2, 20.0)


def test_what_the_user_sets_wins():
    config = RunConfig(learner=LearnerSection(objective="dr_grpo", epsilon_high=0.5), rollout=RolloutSection(normalise_advantage="std"))
    assert (config.learner.epsilon_high, config.learner.loss_normalisation) == (0.5, "constant")
    assert config.rollout.normalise_advantage == "std"


def test_the_default_is_what_it_was():
    learner = RunConfig().learner
    assert (learner.objective, learner.epsilon_low, learner.epsilon_high, learner.ratio) == ("grpo", 0.2, 0.28, "proximal")
    assert (learner.loss_normalisation, learner.truncation, learner.kl_beta, learner.ratio_max) == ("token", 2.0, 0.0, 0.0)
    assert RunConfig().rollout.normalise_advantage == "std"


def test_a_resolved_recipe_reads_back_equal(tmp_path):
    from harness_rl.configfile import load_config

    config = resolve_config({"learner": {"objective": "cispo", "corrections": ["token_mask:0.5:5"]}}, [], "t")
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml") == config


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"objective": "ppo"}, "objective 'ppo': use one of grpo, dapo"),
        ({"corrections": ["tis"]}, "correction 'tis'"),
        ({"corrections": ["token_truncate", "token_mask"]}, "both weights"),
        ({"ratio": "behaviour", "corrections": ["token_truncate"]}, "the ratio itself corrects"),
    ],
)
def test_a_wrong_name_is_one_line(learner, words):
    with pytest.raises(UserError, match=words) as caught:
        resolve_config({"learner": learner}, [], "t")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "learner"),
    [
        (
            {"loss_type": "grpo", "epsilon": 0.1},
            {"objective": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.1, "loss_normalisation": "rollout"},
        ),
        (
            {"loss_type": "dapo", "epsilon_high": 0.3},
            {"objective": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.3, "loss_normalisation": "token"},
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"objective": "cispo", "epsilon_high": 4.0, "epsilon_low": 1.0}),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}, {"objective": "gspo", "epsilon_high": 4e-4}),
        ({"delta": 2.5, "beta": 0.04}, {"ratio_max": 2.5, "kl_beta": 0.04}),
        ({"vllm_importance_sampling_mode": "token_truncate"}, {"corrections": ["token_truncate:3.0"]}),
        ({"vllm_importance_sampling_clip_max": 2.0}, {"corrections": ["sequence_mask:0.0:2.0"]}),
        ({"vllm_importance_sampling_correction": False}, {"corrections": []}),
    ],
)
def test_trls_loss_arguments_map(arguments, learner):
    found = AsyncGRPOConfig(**arguments).config.learner
    assert {key: getattr(found, key) for key in learner} == learner


def test_trls_reward_scaling_maps_and_what_does_not_is_named():
    assert AsyncGRPOConfig(scale_rewards="none").config.rollout.normalise_advantage == "none"
    for arguments, words in (({"scale_rewards": "batch"}, "whole batch"), ({"loss_type": "sapo"}, "loss_type 'sapo'")):
        with pytest.raises(UserError, match=words):
            AsyncGRPOConfig(**arguments)
