"""From the config to the parts of a run: policy, learner, engine, environment, tools."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hermes_jax.config import Config, ConfigError, WarmStartConfig
from hermes_jax.config import OptimizerConfig as OptimizerOptions
from hermes_jax.data.buckets import Buckets, make_buckets
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import check_mesh, make_mesh, row_shards
from hermes_jax.learner.optimizer import Optimizer, OptimizerConfig, make_optimizer
from hermes_jax.learner.update import UpdateStep, make_update_step
from hermes_jax.models import (
    ModelConfig,
    ModelFolderError,
    UnsupportedModelError,
    banned_ids,
    load_config,
    load_tokenizer,
    stop_ids,
)
from hermes_jax.models.folder import stored_tensors
from hermes_jax.objectives import Correction, LossError, ObjectiveSpec, try_loss
from hermes_jax.rollout.codec import as_codec, placeholder_ids
from hermes_jax.run_folder import RunFolder


@dataclass(frozen=True, eq=False)
class Policy:
    """The model folder that a run starts from, and what follows from it.

    Args:
        folder: HF folder.
        config: shape of the model.
        tokenizer: of the folder, with its chat template.
        banned: ids that are never sampled and have probability 0 in the learner: padding of the vocabulary, and
            placeholders of images and the like.
        stop_ids: ids that end a turn, by the folder's generation config and tokenizer.
    """

    folder: Path
    config: ModelConfig
    tokenizer: Any
    banned: np.ndarray
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Phase:
    """A part of training with its own objective and optimizer: the warm start, then GRPO."""

    spec: ObjectiveSpec
    optimizer: Optimizer
    update_step: UpdateStep


def open_policy(config: Config, run: RunFolder | None) -> Policy:
    """The policy of the config: read from `model.path`, or made by `model.builder` inside the run folder.

    Raises:
        ConfigError: neither is set, or the builder can't be imported.
        ModelFolderError: the folder is not usable.
    """
    if config.model.path is not None:
        return read_policy(Path(config.model.path))
    if config.model.builder is None or run is None:
        raise ConfigError("no model: set model.path to an HF model folder (or model.builder to module:function)")
    if not run.policy.exists():
        load_function(config.model.builder, "model.builder")(run.policy, config.seed)
    return read_policy(run.policy)


def read_policy(folder: Path) -> Policy:
    """The policy in an HF folder, without its weights: of these only the headers are read, and checked.

    Raises:
        ModelFolderError: the folder is not usable.
        UnsupportedModelError: the model needs something that is not built.
    """
    try:
        model_config = load_config(folder)
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    stored_tensors(folder, model_config)
    tokenizer = load_tokenizer(folder)
    banned = banned_ids(model_config, tokenizer)
    banned[list(placeholder_ids(as_codec(tokenizer)))] = True
    return Policy(folder, model_config, tokenizer, banned, stop_ids(folder, tokenizer))


def load_function(reference: str, option: str) -> Any:
    """The function that `module:name` names.

    Raises:
        ConfigError: it can't be found; names the option.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option}: {reference!r} is no 'module:function' that can be imported: {error}") from error
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(f"{option}: importing {module} fails: {type(error).__name__}: {error}") from error


def open_mesh(config: Config, policy: Policy) -> Mesh:
    """The device mesh of the config; `mesh.data: -1` takes all devices that are left.

    Raises:
        ConfigError: there are too few devices, or `mesh.tensor` does not divide the model.
    """
    import jax

    rest = config.mesh.fsdp * config.mesh.tensor
    data = config.mesh.data if config.mesh.data > 0 else max(len(jax.devices()) // rest, 1)
    try:
        mesh = make_mesh(data, config.mesh.fsdp, config.mesh.tensor)
        check_mesh(mesh, policy.config)
    except ValueError as error:
        raise ConfigError(f"mesh: {error}") from error
    return mesh


def compute_dtype(config: Config) -> Any:
    """Dtype of the matrix products of learner and engine."""
    return jnp.dtype(config.model.dtype)


def forward_options(config: Config, policy: Policy) -> ForwardOptions:
    """How learner and scorers run the model."""
    return ForwardOptions(
        compute_dtype=compute_dtype(config),
        head_chunk=config.grpo.head_chunk if config.grpo.use_liger_loss else None,
        remat=config.learner.remat,
        banned=policy.banned if policy.banned.any() else None,
    )


def objective_spec(config: Config, policy_loss: Callable[..., Any] | None = None) -> ObjectiveSpec:
    """What the `grpo` block minimises; a loss of the user's own is tried on a small batch first.

    Args:
        config: of the run.
        policy_loss: in place of `grpo.policy_loss`.

    Raises:
        ConfigError: the loss can't be imported, or is not what it should be.
    """
    option = "policy_loss" if policy_loss is not None else "grpo.policy_loss"
    if policy_loss is not None and config.grpo.policy_loss is not None:
        raise ConfigError(f"policy_loss and grpo.policy_loss ({config.grpo.policy_loss}) are both given: choose one")
    if config.grpo.policy_loss is not None:
        policy_loss = load_function(config.grpo.policy_loss, option)
    try:
        spec = _objective_spec(config, policy_loss)
        if policy_loss is not None:
            try_loss(spec)
    except LossError as error:
        raise ConfigError(f"{option}: {error}") from error
    return spec


def _objective_spec(config: Config, policy_loss: Callable[..., Any] | None) -> ObjectiveSpec:
    grpo = config.grpo
    clips = grpo.objective not in ("reinforce", "sapo", "dppo") or policy_loss is not None
    in_loss = grpo.beta > 0 and grpo.kl_in == "loss"
    return ObjectiveSpec(
        objective=grpo.objective if policy_loss is None else policy_loss,
        clip_low=grpo.clip_low if clips else None,
        clip_high=grpo.clip_high if clips else None,
        dual_clip=grpo.dual_clip,
        tau_pos=grpo.tau_pos,
        tau_neg=grpo.tau_neg,
        tv_max=grpo.tv_max,
        log_ratio_clamp=grpo.log_ratio_clamp,
        aggregation=grpo.aggregation,
        max_tokens=config.model.context_length if grpo.aggregation == "constant" else None,
        kl=grpo.kl_kind if in_loss else None,
        beta=grpo.beta if in_loss else 0.0,
        entropy_coef=grpo.entropy_coef,
        correction=_correction(config),
    )


def objective_lines(config: Config, spec: ObjectiveSpec) -> list[str]:
    """The effective objective in one formula, rewards and advantages included; then what is hardly meant in it."""
    grpo, reward, notes = config.grpo, "R", list(spec.warnings())
    if grpo.overlong_cache is not None and config.env.max_episode_tokens is not None:
        start = config.env.max_episode_tokens - grpo.overlong_cache
        reward += f" - {grpo.overlong_penalty:g} * overlong(tokens, {start}..{config.env.max_episode_tokens})"
    if grpo.beta and grpo.kl_in == "reward":
        reward += f" - {grpo.beta:g} * sum {grpo.kl_kind}(old - ref)"
        if grpo.kl_kind != "k1":
            notes.append(
                f"grpo.kl_kind {grpo.kl_kind} in the reward: its gradient is not that of the KL; use k1, or "
                "grpo.kl_in: loss"
            )
        if grpo.advantage == "group_mean_std":
            notes.append(
                "grpo.advantage group_mean_std with the KL in the reward: in a group of otherwise equal rewards the KL "
                "alone is scaled up to a standard deviation of 1; use leave_one_out or group_mean_batch_norm"
            )
    best = f", k = {grpo.pass_k}" if grpo.advantage == "pass_at_k" else ""
    return [f"objective: {spec.formula()}; A = {grpo.advantage}({reward}{best})", *notes]


def _correction(config: Config) -> Correction | None:
    mode, low, high = config.grpo.correction, config.grpo.correction_low, config.grpo.correction_high
    if mode == "none":
        return None
    return Correction(mode, max=high) if "truncate" in mode else Correction(mode, low=low, high=high)


def grpo_optimizer(config: Config) -> Optimizer:
    """The optimizer of the `optimizer` block."""
    return make_optimizer(_optimizer_config(config.optimizer, config.total_updates))


def grpo_phase(config: Config, policy: Policy, mesh: Mesh, spec: ObjectiveSpec | None = None) -> Phase:
    """The objective (by default that of `objective_spec`) and optimizer of the `grpo` and `optimizer` blocks."""
    spec, optimizer = spec or objective_spec(config), grpo_optimizer(config)
    options = forward_options(config, policy)
    known = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    return Phase(spec, optimizer, make_update_step(policy.config, spec, optimizer, mesh, options, known=known))


def warm_start_optimizer(config: Config) -> Optimizer:
    """The optimizer of the `warm_start` block."""
    return make_optimizer(_optimizer_config(config.warm_start, config.warm_start.steps, config.optimizer))


def warm_start_phase(config: Config, policy: Policy, mesh: Mesh) -> Phase:
    """Imitation by the same learner: `reinforce` with advantage 1 on scripted episodes."""
    spec = ObjectiveSpec(objective="reinforce", aggregation="token_mean")
    optimizer = warm_start_optimizer(config)
    options = forward_options(config, policy)
    return Phase(spec, optimizer, make_update_step(policy.config, spec, optimizer, mesh, options, known=()))


def _optimizer_config(
    block: OptimizerOptions | WarmStartConfig, updates: int, moments: OptimizerOptions | None = None
) -> OptimizerConfig:
    adam = moments or block
    assert isinstance(adam, OptimizerOptions)
    return OptimizerConfig(
        learning_rate=block.learning_rate,
        schedule=block.schedule,
        warmup_steps=block.warmup_steps,
        total_steps=updates,
        end_fraction=block.end_fraction,
        b1=adam.b1,
        b2=adam.b2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=block.max_grad_norm,
    )


def packing_buckets(config: Config, policy: Policy, mesh: Mesh, sequences: int) -> Buckets:
    """Shapes of packed batches for up to `sequences` trajectories of full length."""
    return make_buckets(
        widths=config.row_widths,
        micro_tokens=config.learner.micro_tokens,
        max_tokens=config.learner.max_tokens or sequences * max(config.row_widths),
        row_multiple=row_shards(mesh),
        attention_width=6.0 * policy.config.hidden_size,
    )


def expected_sequences(config: Config) -> int:
    """Trajectories of a mini-batch, if the chat template makes one of each episode."""
    return config.env.group_size * -(-config.env.groups_per_step // config.grpo.mini_batches)


def training_buckets(config: Config, policy: Policy, mesh: Mesh, sequences: int) -> Buckets:
    """One shape per row width, with room for `sequences` trajectories of full length.

    So nothing compiles again when episodes become longer or shorter; micro-batches that stay empty cost nothing.
    """
    shards, widest = row_shards(mesh), max(config.row_widths)
    cells = config.learner.max_tokens or sequences * widest
    shapes = []
    for width in config.row_widths:
        rows = max(config.learner.micro_tokens // (width * shards), 1)  # per device
        needed = -(-cells // (width * shards))
        micros = -(-needed // rows)
        shapes.append((micros, -(-needed // micros) * shards, width))
    return Buckets(tuple(shapes), attention_width=6.0 * policy.config.hidden_size)


def open_engine(config: Config, policy: Policy, params: Any, device: DeviceThread, version: int) -> JaxEngine:
    """The embedded engine with a copy of `params`."""
    return JaxEngine(
        params,
        policy.config,
        slots=config.openai.slots,
        width=config.model.context_length,
        device_thread=device,
        banned=policy.banned,
        chunk=config.openai.prefill_chunk,
        decode_steps=config.openai.decode_steps,
        dtype=compute_dtype(config),
        version=version,
    )
