"""Objectives by name: what each stands for, who wins, and the formula that a run prints."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from hermes_jax import config as cfg
from hermes_jax.assembly import objective_lines, objective_spec
from hermes_jax.config.presets import PRESETS, PresetName
from tests.test_config import error_of, write

R = "; r = exp(clip(lp - old, +-20))"
FORMULAS = {
    "grpo": "sequence_mean[-min(r A, clip(r, 0.8, 1.2) A)] + 0.04 * sequence_mean[k3(lp - ref)]" + R,
    "dapo": "token_mean[-min(r A, clip(r, 0.8, 1.28) A)]" + R,
    "dr_grpo": "constant[-min(r A, clip(r, 0.8, 1.2) A)] (max_tokens=4096)" + R,
    "gspo": "sequence_mean[-min(r A, clip(r, 0.9997, 1.0004) A)]; r = exp(clip(mean(lp - old), +-20))",
    "cispo": "token_mean[-sg(clip(r, -inf, 5)) A lp]" + R,
    "sapo": "sequence_mean[-4/tau sigmoid(tau (r - 1)) A, tau = 1 if A > 0 else 1.05]" + R,
    "rloo": "sequence_sum[-A lp]",
    "reinforce++": "token_mean[-min(r A, clip(r, 0.8, 1.2) A)]" + R,
}
WITH_KL = {"rloo": "R - 0.03 * sum k1(old - ref)", "reinforce++": "R - 0.01 * sum k1(old - ref)"}
ADVANTAGES = {"dr_grpo": "group_mean", "rloo": "leave_one_out", "reinforce++": "batch_norm"}


@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_and_the_advantage_of_a_preset(name):
    config = cfg.load(overrides=[f"grpo.preset={name}"])
    advantage = f"{ADVANTAGES.get(name, 'group_mean_std')}({WITH_KL.get(name, 'R')})"
    lines = objective_lines(config, objective_spec(config))
    assert lines == [f"objective: loss = {FORMULAS[name]}; A = {advantage}"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_resolved_config_holds_plain_values(name, tmp_path):
    config = cfg.load(overrides=[f"grpo.preset={name}"])
    text = cfg.dump(config)
    assert name not in re.findall(r"preset: (\S+)", text)
    assert cfg.load(write(tmp_path / "config.yaml", text)) == config
    values = [f"grpo.{key}={'null' if value is None else value}" for key, value in PRESETS[name].items()]
    assert cfg.load(overrides=values) == config


def test_every_preset_is_in_the_help_with_its_values():
    assert set(get_args(PresetName)) == set(PRESETS)
    text = " ".join(cfg.help_config().split())
    for name, values in PRESETS.items():
        assert f" {name} = " in text
        for key in values:
            assert f"{key}: " in text
    assert "clip_low: 0.2, clip_high: 0.28" in text


def test_keys_beside_a_preset_win_and_so_do_later_ones(tmp_path):
    file = write(tmp_path / "a.yaml", "grpo: {clip_high: 0.5, preset: dapo, dual_clip: 3.0}\n")
    grpo = cfg.load(file).grpo
    assert (grpo.clip_low, grpo.clip_high, grpo.dual_clip) == (0.2, 0.5, 3.0)
    assert cfg.load(file, overrides=["grpo.epsilon_clip_upper=0.4"]).grpo.clip_high == 0.4


def test_a_later_preset_is_the_whole_objective(tmp_path):
    file = write(
        tmp_path / "a.yaml", "grpo: {clip_low: 0.1, dual_clip: 3.0, beta: 0.1, kl_kind: k2, temperature: 1.0}\n"
    )
    for name in PRESETS:
        mixed = cfg.load(file, overrides=[f"grpo.preset={name}"])
        assert mixed == cfg.load(overrides=[f"grpo.preset={name}", "grpo.temperature=1.0"])


def test_a_key_beside_a_preset_may_switch_off_what_the_preset_sets():
    grpo = cfg.load(overrides=["grpo.preset=grpo", "grpo.beta=0", "grpo.objective=reinforce"]).grpo
    assert (grpo.beta, grpo.objective, grpo.aggregation) == (0, "reinforce", "sequence_mean")


def test_bad_presets(tmp_path):
    assert "`grpo.preset` needs one of grpo, dapo" in error_of("grpo.preset=grop")
    assert "needs one of" in error_of("grpo.preset=[dapo]")
    file = write(tmp_path / "a.yaml", "grpo:\n  preset: sapo\n  clip_low: 0.2\n")
    assert f"{file}:3: `grpo.clip_low` has no effect" in error_of(files=[file])


def test_a_group_of_one_has_a_preset():
    assert cfg.load(overrides=["grpo.preset=reinforce++", "env.group_size=1"]).env.group_size == 1
    for name in set(PRESETS) - {"reinforce++"}:
        message = error_of(f"grpo.preset={name}", "env.group_size=1")
        assert f"grpo.advantage: {ADVANTAGES.get(name, 'group_mean_std')} compares episodes" in message


def test_rewards_are_part_of_the_printed_objective_and_doubtful_ones_are_pointed_out():
    kl = ["grpo.beta=0.1", "grpo.kl_in=reward", "grpo.kl_kind=k2"]
    config = cfg.load(overrides=[*kl, "env.max_episode_tokens=100", "grpo.overlong_cache=20"])
    formula, kind, scaled = objective_lines(config, objective_spec(config))
    assert formula.endswith("; A = group_mean_std(R - 1 * overlong(tokens, 80..100) - 0.1 * sum k2(old - ref))")
    assert "+ 0.1" not in formula, "not in the loss as well"
    assert "use k1" in kind
    assert "use leave_one_out" in scaled


@pytest.mark.parametrize(
    ("overrides", "formula"),
    [
        (
            ["grpo.objective=gmpo", "grpo.clip_low=0.3", "grpo.clip_high=0.5", "grpo.aggregation=sequence_mean"],
            "sequence_mean[-g A, g = geometric mean of (min(r, 1.5) if A > 0 else max(r, 0.7))]" + R,
        ),
        (["grpo.objective=dppo"], "token_mean[-(0 if abs(p - p_old) > 0.15 and (r - 1) A > 0 else r A)]" + R),
    ],
)
def test_formulas_of_other_objectives(overrides, formula):
    config = cfg.load(overrides=[*overrides, "grpo.advantage=pass_at_k", "grpo.pass_k=2"])
    [line] = objective_lines(config, objective_spec(config))
    assert line == f"objective: loss = {formula}; A = pass_at_k(R, k = 2)"
