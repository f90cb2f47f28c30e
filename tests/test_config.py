"""Configuration: files, layers, overrides, other names, and messages that say where and what to do."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hermes_jax import config as cfg
from hermes_jax.config.blocks_learn import OutcomePolicy, OutcomeRule
from hermes_jax.config.fields import Block, block_type, unit_of
from hermes_jax.config.rules import GONE, USES
from hermes_jax.data.trajectory import Outcome


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def error_of(*overrides, files=()):
    with pytest.raises(cfg.ConfigError) as caught:
        cfg.load(*files, overrides=overrides)
    return str(caught.value)


def fields_of(block=cfg.Config, prefix=""):
    for name, field in block.model_fields.items():
        inner = block_type(field)
        if inner:
            yield from fields_of(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


# -- every option is documented ------------------------------------------------------------------------------------


def test_help_lists_every_option_with_default_and_help():
    text = cfg.help_config()
    for path, field in fields_of():
        assert re.search(rf"^{re.escape(path)}: .*; default ", text, re.M), path
        assert field.description.endswith((".", ")")), path
        assert field.description.split()[0] in text
    for alias in cfg.ALIASES:
        assert alias in text


def test_counts_and_durations_have_units():
    for path, field in fields_of():
        whole = int in (field.annotation, *get_args(field.annotation))
        if (whole and path != "seed") or (path.endswith("timeout") and float is field.annotation):
            assert unit_of(field), f"{path} is a number without a unit"


def test_hermes_keys_keep_hermes_defaults():
    config = cfg.build({})
    assert (config.grpo.temperature, config.grpo.iterations_per_batch, config.grpo.use_liger_loss) == (0.7, 4, True)
    assert (config.grpo.clip_low, config.grpo.clip_high) == (0.2, 0.2)
    env = config.env
    assert (env.group_size, env.max_agent_turns, env.max_token_length, env.agent_temperature) == (4, 30, 2048, 1.0)
    assert (env.total_steps, env.steps_per_eval, env.terminal_timeout, env.tool_call_parser) == (
        1000,
        100,
        120,
        "hermes",
    )
    assert env.terminal_backend == "bubblewrap", "Hermes' local needs the user's own word"


def test_outcome_policy_covers_exactly_the_outcomes():
    assert set(OutcomePolicy.model_fields) == {outcome.value for outcome in Outcome}
    assert set(get_args(OutcomeRule)) == {"keep", "mask", "penalise", "drop"}


def test_tables_name_options_that_exist():
    paths = set(cfg.option_paths())
    assert set(cfg.ALIASES.values()) <= paths
    assert not (set(cfg.ALIASES) | set(GONE)) & paths
    for use in USES:
        assert set(use.switches) <= paths
        assert {option for option in use.options if not option.endswith(".*")} <= paths


# -- layers --------------------------------------------------------------------------------------------------------


def test_later_layers_win(tmp_path):
    base = write(tmp_path / "base.yaml", "env: {group_size: 3, options: {words: 9, kinds: [a]}}\ngrpo: {beta: 0.1}\n")
    (tmp_path / "sub").mkdir()
    top = write(tmp_path / "sub" / "top.yaml", "base: ../base.yaml\nenv: {group_size: 5, options: {words: 4}}\n")
    config = cfg.load(top, overrides=["env.options.seed=1", "grpo.kl_kind=k2"])
    assert config.env.group_size == 5
    assert config.env.options == {"words": 4, "kinds": ["a"], "seed": 1}
    assert (config.grpo.beta, config.grpo.kl_kind) == (0.1, "k2")
    assert cfg.load(base, top).env.group_size == 5


def test_base_that_leads_back_is_an_error(tmp_path):
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "leads back" in error_of(files=[tmp_path / "a.yaml"])


def test_a_later_layer_may_switch_off_what_an_earlier_one_set_up(tmp_path):
    file = write(tmp_path / "a.yaml", "warm_start: {steps: 100, learning_rate: 1e-3}\ngrpo: {beta: 0.1, kl_kind: k2}\n")
    config = cfg.load(file, overrides=["warm_start.steps=0", "grpo.beta=0"])
    assert config.warm_start.steps == 0
    assert config == cfg.load(write(tmp_path / "b.yaml", cfg.dump(config)))


def test_numbers_without_a_point_and_words_that_old_yaml_calls_booleans(tmp_path):
    file = write(
        tmp_path / "a.yaml", "optimizer: {learning_rate: 1e-3}\nenv: {name: no, options: {day: 2025-01-01, n: 010}}\n"
    )
    config = cfg.load(file)
    assert (config.optimizer.learning_rate, config.env.name) == (1e-3, "no")
    assert config.env.options == {"day": "2025-01-01", "n": 10}


@pytest.mark.parametrize("text", ["", "env:\n", "# nothing\n", "env: {}\n"])
def test_empty_files_and_blocks_mean_defaults(tmp_path, text):
    assert cfg.load(write(tmp_path / "a.yaml", text)) == cfg.build({})


# -- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["env.group_size=6"], ["--env.group_size=6"], ["--env.group_size", "6"], ["env.group_size=2", "env.group_size=6"]],
)
def test_the_ways_to_write_an_override(arguments):
    assert cfg.load(overrides=arguments).env.group_size == 6


def test_values_of_overrides():
    config = cfg.load(
        overrides=[
            *("--env.enabled_toolsets", "[terminal, file]", "--mesh.data", "-1", "env.terminal_timeout=5"),
            *("env.system_prompt=Be precise: use tools.", "model.path=123", "model.template_arguments.think=false"),
            *("grpo.dual_clip=null", "learner.row_widths=[4096, 8192]", "grpo.outcome_policy.timeout=drop"),
        ]
    )
    assert config.env.enabled_toolsets == ("terminal", "file")
    assert (config.env.terminal_timeout, config.env.system_prompt) == (5.0, "Be precise: use tools.")
    assert (config.model.path, config.model.template_arguments) == ("123", {"think": False})
    assert config.row_widths == (4096, 8192)
    assert config.grpo.outcome_policy.timeout == "drop"


@given(
    group_size=st.integers(2, 10**6),
    rate=st.floats(0, 1, allow_nan=False),
    prompt=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1),
    toolsets=st.none() | st.lists(st.sampled_from(["terminal", "file", "no", "1", "1e3", "null"])),
    options=st.dictionaries(
        st.text("abc", min_size=1),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab1 .:"),
    ),
)
def test_what_is_dumped_loads_again(tmp_path_factory, group_size, rate, prompt, toolsets, options):
    config = cfg.build(
        {
            "env": {
                "group_size": group_size,
                "system_prompt": prompt,
                "enabled_toolsets": toolsets,
                "options": options,
            },
            "optimizer": {"learning_rate": rate},
        }
    )
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    assert cfg.load(write(file, cfg.dump(config))) == config


@given(value=st.integers() | st.booleans() | st.floats(allow_nan=False) | st.none() | st.lists(st.integers()))
def test_overrides_carry_any_plain_value(value):
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    assert cfg.load(overrides=[f"env.options.x={text}"]).env.options == {"x": value}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *(
            (text, text)
            for text in ("a # b", "#a", "a\nb", "&a b", "*a*", "!a", "---", "- a", "%a", "@a", "{a", "[1, 2]")
        ),
        *((text, text) for text in ("a=b=c", "a: b", "true", "1e3", "2024-01-01", " a ", "\ta", "a\0", "é\u2028")),
        *(("'null'", "null"), ("'it''s'", "it's"), ('"a\\nb"', "a\nb"), ('"', '"'), ("'a' b", "'a' b"), ("null", None)),
    ],
)
def test_text_of_an_override_stays_as_it_stands(written, meant):
    assert cfg.load(overrides=[f"env.system_prompt={written}"]).env.system_prompt == meant


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("env.system_prompt=a\udcffb", "no UTF-8"),
        (f"seed={'9' * 5000}", "not valid YAML"),
        ("env.options={a: &a [*a]}", "not valid YAML"),
        ("env.options={a: 1, a: 2}", "`a` is given twice"),
        (f"env.options={'[' * 3000}", "nested too deeply"),
        ("seed=!!int abc", "does not fit its tag"),
    ],
)
def test_bad_overrides(override, part):
    assert part in error_of(override)


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_override_raises_anything_but_a_config_error(key, value):
    for arguments in ([f"{key}={value}"], [f"--{key}", value], [key]):
        with contextlib.suppress(cfg.ConfigError):
            cfg.load(overrides=arguments)


def test_dump_holds_every_option_and_no_secret():
    text = cfg.dump(cfg.build({}))
    for path, _ in fields_of():
        assert re.search(rf"^\s*(# )?{path.rpartition('.')[2]}:", text, re.M), path
    assert "k3" in text
    assert "grpo.beta is 0" in text


# -- other names ---------------------------------------------------------------------------------------------------


def test_other_names_set_the_same_option(tmp_path):
    file = write(
        tmp_path / "a.yaml", "grpo: {epsilon_clip: 0.1, epsilon_clip_upper: 0.3}\ntinker: {learning_rate: 4.0e-5}\n"
    )
    config = cfg.load(file)
    assert (config.grpo.clip_low, config.grpo.clip_high, config.optimizer.learning_rate) == (0.1, 0.3, 4e-5)
    assert cfg.load(file, overrides=["grpo.clip_low=0.05"]).grpo.clip_low == 0.05
    assert cfg.load(file, overrides=["--grpo.epsilon_clip", "0.07"]).grpo.clip_low == 0.07


@pytest.mark.parametrize("alias", sorted(cfg.ALIASES))
def test_an_option_under_two_names_is_an_error(alias, tmp_path):
    message = error_of(f"{alias}=1", f"{cfg.ALIASES[alias]}=1")
    assert alias in message
    assert cfg.ALIASES[alias] in message
    assert "remove one" in message


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("env.group_siz=3", ["`env.group_siz`", "did you mean `env.group_size`?"]),
        ("learning_rate=1", ["did you mean `optimizer.learning_rate`?"]),
        ("grpo.clip_lo=1", ["did you mean `grpo.clip_low`?"]),
        ("grpo.epsilon_clip_uper=1", ["did you mean `grpo.epsilon_clip_upper`?"]),
        ("grpo.outcome_policy.timeouts=drop", ["did you mean `grpo.outcome_policy.timeout`?"]),
        ("envv.group_size=1", ["did you mean `env`?"]),
        ("mesh.xyzzy=1", ["`mesh.xyzzy`", "mesh knows: data, fsdp, tensor"]),
        ("env.tokenizer_name=x", ["option of Hermes", "set model.path"]),
        ("env.group_size=x", ["`env.group_size` needs an integer, >= 1", "got 'x' (str)"]),
        ("env.group_size=true", ["needs an integer", "got True (bool)"]),
        ("env.group_size=2.0", ["needs an integer", "got 2.0 (float)"]),
        ("env.terminal_timeout=0", ["needs a number, > 0", "got 0 (int)"]),
        ("env.terminal_timeout=null", ["needs a number", "null"]),
        ("env.terminal_timeout=.inf", ["needs a number", "got inf"]),
        ("env.enabled_toolsets=terminal", ["needs a list of texts or null", "got 'terminal' (str)"]),
        ("env.enabled_toolsets=[terminal, 3]", ["needs a list of texts", "got 3 (int)"]),
        ("env.terminal_backend=modal", ["needs one of bubblewrap, local", "got 'modal'"]),
        ("logging.tensorboard=yes", ["needs true or false", "got 'yes'"]),
        ("grpo.outcome_policy.timeout=ignore", ["one of keep, mask, penalise, drop", "got 'ignore'"]),
        ("mesh=3", ["`mesh` needs a mapping of options", "got 3 (int)"]),
        ("env.options=3", ["`env.options` needs a mapping", "got 3 (int)"]),
        ("openai.server_type=vllm", ["not part of this version", "`openai.server_type: jax`"]),
        ("openai.server_type=openai", ["not part of this version", "`openai.server_type: jax`"]),
        ("env.group_size=[", ["not valid YAML"]),
        ("env.group_size", ["has no value", "env.group_size=8"]),
        ("=3", ["no override"]),
    ],
)
def test_messages_say_what_is_wrong_and_what_is_needed(override, parts):
    message = error_of(override)
    assert all(part in message for part in parts), message


def test_messages_name_file_and_line_or_override(tmp_path):
    file = write(tmp_path / "run.yaml", "env:\n  group_size: 4\n  max_agent_turn: 3\ngrpo:\n  temperature: hot\n")
    assert f"{file}:3: unknown key `env.max_agent_turn`; did you mean `env.max_agent_turns`?" in error_of(files=[file])
    file = write(tmp_path / "run.yaml", "env:\n  group_size: 4\ngrpo:\n  temperature: hot\n  beta: -1\n")
    message = error_of("mesh.fsdp=0", files=[file])
    assert f"{file}:4: `grpo.temperature` needs a number, > 0; got 'hot' (str)" in message
    assert f"{file}:5: `grpo.beta`" in message
    assert "override mesh.fsdp=0: `mesh.fsdp`" in message, "all problems are reported at once"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("env: {group_size: 3, group_size: 4}", ":1: `env.group_size` is given twice"),
        ("env: [1, 2]", "`env` needs a mapping of options; got [1, 2] (list)"),
        ("- 1", "holds a mapping of options"),
        ("env: {", "not valid YAML"),
        ("base: 3", "`base` needs the path"),
        ("base: nowhere.yaml", "can't read this config file"),
        ("env: {options: {a: !!python/object:os.system x}}", "not valid YAML"),
        ("seed: !!int abc", "not valid YAML: a value does not fit its tag"),
        ("grpo: {temperature: !!float abc}", "not valid YAML: a value does not fit its tag"),
        ("grpo: {use_liger_loss: !!bool maybe}", "not valid YAML: a value does not fit its tag"),
        (f"seed: {'9' * 5000}", "not valid YAML"),
        ("seed: 1\0", "not valid YAML"),
        ("seed: 1\n---\nseed: 2", "not valid YAML"),
        ("env: &e {options: *e}", "an alias of itself"),
        ("env: {options: {a: &a [*a]}}", "not valid YAML"),
        (f"env: {{options: {{a: {'[' * 3000}{']' * 3000}}}}}", "nested too deeply"),
        ("env: {options: {a: [{b: 1, b: 2}]}}", "`b` is given twice"),
        ("env: {options: !!set {a, a}}", "given twice"),
    ],
)
def test_bad_files(tmp_path, text, part):
    assert part in error_of(files=[write(tmp_path / "a.yaml", text)])


def test_missing_file_and_wrong_encoding(tmp_path):
    assert "can't read" in error_of(files=[tmp_path / "none.yaml"])
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    assert "can't read" in error_of(files=[tmp_path / "bad.yaml"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["grpo.kl_kind=k3"], "grpo.beta is 0"),
        (["grpo.kl_in=reward"], "grpo.beta is 0"),
        (["grpo.use_liger_loss=false", "grpo.head_chunk=64"], "grpo.use_liger_loss is false"),
        (["grpo.objective=reinforce", "grpo.clip_low=0.2"], "no ratio"),
        (["grpo.objective=reinforce", "grpo.epsilon_clip=0.2"], "no ratio"),
        (["grpo.objective=reinforce", "grpo.dual_clip=3.0"], "no ratio"),
        (["grpo.objective=sapo", "grpo.clip_high=0.2"], "no ratio is clipped"),
        (["grpo.objective=gspo", "grpo.dual_clip=3.0"], "no ratio is clipped twice"),
        (["grpo.objective=dppo", "grpo.clip_low=0.2"], "no ratio is clipped"),
        (["grpo.tv_max=0.2"], "grpo.objective is not dppo"),
        (["grpo.pass_k=2"], "grpo.advantage is not pass_at_k"),
        (["grpo.tau_neg=1.1"], "grpo.objective is not sapo"),
        (["grpo.correction_high=3.0"], "grpo.correction is none"),
        (["grpo.correction=token_truncate", "grpo.correction_low=0.1"], "grpo.correction does not mask"),
        (["grpo.overlong_penalty=0.5"], "grpo.overlong_cache is null"),
        (["grpo.penalised_reward=-1"], "no outcome"),
        (["openai.base_url=http://localhost:8000"], "openai.server_type is jax"),
        (["openai.api_key=k"], "openai.server_type is jax"),
        (["optimizer.end_fraction=0.5"], "optimizer.schedule is constant"),
        (["warm_start.learning_rate=1"], "warm_start.steps is 0"),
        (["warm_start.steps=50", "warm_start.schedule=constant", "warm_start.end_fraction=0"], "schedule is constant"),
        (["checkpoint.keep_best=0", "checkpoint.best_metric=x"], "checkpoint.keep_best is 0"),
        (["logging.wandb_name=x"], "logging.wandb is false"),
    ],
)
def test_an_option_without_effect_is_an_error(overrides, why):
    message = error_of(*overrides)
    assert "has no effect" in message
    assert why in message


def test_options_with_effect_are_none():
    cfg.load(overrides=["grpo.beta=0.1", "grpo.kl_kind=k2", "warm_start.steps=50", "warm_start.learning_rate=1"])
    cfg.load(overrides=["grpo.outcome_policy.timeout=penalise", "grpo.penalised_reward=-1"])
    cfg.load(overrides=["grpo.dual_clip=null", "openai.base_url=null"])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.path=a", "model.builder=b:c"], ["model.path and model.builder", "choose one"]),
        (["model.context_length=2048"], ["must exceed env.max_token_length (2048)"]),
        (["env.group_size=1"], ["set env.group_size to 2 or more"]),
        (["grpo.mini_batches=9"], ["env.groups_per_step (8)"]),
        (["grpo.dual_clip=1.1"], ["at least 1 + grpo.clip_high"]),
        (
            ["env.group_size=1", "grpo.advantage=leave_one_out"],
            ["leave_one_out compares", "or grpo.advantage to batch_norm"],
        ),
        (["grpo.clip_low=-0.1"], ["`grpo.clip_low` needs a number or null, >= 0, < 1; got -0.1"]),
        (["grpo.clip_high=-0.1"], ["`grpo.clip_high` needs a number or null, >= 0; got -0.1"]),
        (["grpo.correction=token_mask", "grpo.correction_low=3.0"], ["(3.0) lies above grpo.correction_high (2.0)"]),
        (["grpo.advantage=pass_at_k"], ["grpo.pass_k (4) must be below env.group_size (4)", "lower it"]),
        (["grpo.advantage=gdpo", "grpo.beta=0.1", "grpo.kl_in=reward"], ["gdpo normalises each part", "kl_in to loss"]),
        (["grpo.advantage=gdpo", "grpo.outcome_policy.length=penalise"], ["no outcome to penalise"]),
        (["grpo.advantage=batch_norm", "grpo.dynamic_sampling=1"], ["learns from them, too", "dynamic_sampling to 0"]),
        (["grpo.overlong_cache=10"], ["env.max_episode_tokens, which is null", "set it"]),
        (["grpo.overlong_cache=10", "env.max_episode_tokens=9"], ["grpo.overlong_cache (10) exceeds", "(9)"]),
        (["learner.row_widths=[512, 128, 4096]"], ["ascending"]),
        (["learner.row_widths=[512]"], ["model.context_length (4096)", "add a width"]),
        (["learner.row_widths=[]"], ["learner.row_widths"]),
        (["learner.micro_tokens=4095"], ["learner.micro_tokens (4095)"]),
        (["mesh.data=2", "mesh.fsdp=2"], ["4096 * 4"]),
        (["learner.max_tokens=10"], ["learner.max_tokens (10)"]),
        (["mesh.data=0"], ["mesh.data is 0"]),
        (["warm_start.steps=30"], ["warm_start.warmup_steps (30)", "lower it"]),
        (["env.total_steps=2", "optimizer.schedule=linear", "optimizer.warmup_steps=8"], ["the run's 8 updates"]),
    ],
)
def test_rules_between_options(overrides, parts):
    message = error_of(*overrides)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("config_json", "given", "expected"),
    [
        ('{"max_position_embeddings": 512}', (), 512),
        ('{"max_position_embeddings": 512}', ("learner.row_widths=[128, 512]",), 512),
        ('{"max_position_embeddings": 512}', ("model.context_length=256",), 256),
        ('{"max_position_embeddings": 512}', ("model.context_length=1024",), 1024),  # refused with the model
        ('{"max_position_embeddings": 8192}', (), 4096),
        ('{"max_position_embeddings": "many"}', (), 4096),
        ("[]", (), 4096),
        ("{", (), 4096),
        (None, (), 4096),
    ],
)
def test_the_default_context_is_one_that_the_model_can_hold(config_json, given, expected, tmp_path):
    if config_json is not None:
        write(tmp_path / "config.json", config_json)
    overrides = [f"model.path={tmp_path}", "env.max_token_length=32", *given]
    config = cfg.load(overrides=overrides)
    assert config.model.context_length == expected
    assert config == cfg.load(write(tmp_path / "resolved.yaml", cfg.dump(config)))


def test_a_context_of_the_model_that_holds_no_reply_is_an_error(tmp_path):
    write(tmp_path / "config.json", '{"max_position_embeddings": 512}')
    message = error_of(f"model.path={tmp_path}")
    assert "model.context_length (512) must exceed env.max_token_length (2048)" in message
    assert "lower env.max_token_length" in message


def test_a_config_can_not_be_changed():
    config = cfg.build({})
    with pytest.raises(ValueError, match="frozen"):
        config.env.group_size = 3
    assert all(isinstance(getattr(config, name), Block | int | str | None) for name in cfg.Config.model_fields)


ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("envs/*/default.yaml")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_shipped_files_load(file, tmp_path):
    config = cfg.load(file)
    assert cfg.load(write(tmp_path / "a.yaml", cfg.dump(config))) == config
