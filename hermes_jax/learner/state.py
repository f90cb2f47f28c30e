"""What training changes: parameters, optimizer moments and counters, as one tree of sharded arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from hermes_jax.learner.mesh import param_shardings, replicated
from hermes_jax.learner.optimizer import Optimizer
from hermes_jax.models.config import ModelConfig


class TrainState(NamedTuple):
    """The whole state of the learner; `update_step` consumes one and returns the next.

    Fields:
        params: fp32 masters, layers stacked.
        opt_state: Optax state, fp32 moments.
        update: optimizer updates applied so far; what schedules count.
        skipped: updates skipped so far because loss or gradient was not finite.
        skipped_in_a_row: of these, since the last applied update.

    The counters are int32 scalars; a tree of the same structure may hold shardings or abstract arrays instead.
    """

    params: Any
    opt_state: Any
    update: Any
    skipped: Any
    skipped_in_a_row: Any


def init_state(params: Any, optimizer: Optimizer, mesh: Mesh, config: ModelConfig) -> TrainState:
    """A state at update 0 that owns copies of `params`, placed on the mesh.

    The copy is on purpose: `update_step` donates the state's arrays, so nothing else may hold them.

    Raises:
        ValueError: a parameter is not float32 (small updates would be lost in it).
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"parameter {name} is {leaf.dtype}; training needs float32 masters, load it as float32")
    shardings = state_shardings(params, optimizer, mesh, config)
    placed = jax.tree.map(_place, params, shardings.params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(placed)
    return TrainState(placed, opt_state, *(_place(jnp.zeros((), jnp.int32), replicated(mesh)) for _ in range(3)))


def state_shardings(params: Any, optimizer: Optimizer, mesh: Mesh, config: ModelConfig) -> TrainState:
    """Sharding of every array of the state: moments lie as their parameter does, counters everywhere.

    `params` may be abstract. For restoring a checkpoint onto another mesh, too.
    """
    shardings = param_shardings(params, mesh, config)
    whole = replicated(mesh)
    abstract = jax.eval_shape(optimizer.init, params)
    moments = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, abstract, shardings, transform_non_params=lambda _: whole
    )
    return TrainState(shardings, moments, whole, whole, whole)


def abstract_state(params: Any, optimizer: Optimizer, mesh: Mesh, config: ModelConfig) -> TrainState:
    """Shape, dtype and sharding of every array of the state, without arrays: what a checkpoint is restored into."""
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(params, jax.eval_shape(optimizer.init, params), counter, counter, counter)
    shardings = state_shardings(params, optimizer, mesh, config)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _place(leaf: Any, sharding: Any) -> Array:
    """A copy of `leaf` on the mesh that shares no memory with it."""
    return jax.device_put(jnp.array(leaf, copy=True), sharding)
