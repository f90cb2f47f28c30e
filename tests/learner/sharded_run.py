"""Run as a script with 8 virtual devices: gradients and two updates on several meshes, as one JSON line.

Prints per mesh the largest difference to a single device (relative to the largest value of its leaf), and how many
bytes of the state one device holds.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from hermes_jax.learner.mesh import make_mesh, param_shardings
from hermes_jax.learner.optimizer import OptimizerConfig, make_optimizer
from hermes_jax.learner.score import make_score
from hermes_jax.learner.state import init_state
from hermes_jax.learner.update import make_gradient, make_update_step
from hermes_jax.objectives.spec import ObjectiveSpec
from tests.learner.tiny import OPTIONS, Step, tiny_config, tiny_params, tiny_sequences

SHAPE = (2, 8, 48)
SPEC = ObjectiveSpec("clip", kl="k3", beta=0.1, entropy_coef=0.01, aggregation="sequence_mean")
KNOWN = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
CONFIG = tiny_config()
OPTIMIZER = make_optimizer(OptimizerConfig(1e-2))


def run(params, batch, sizes: tuple[int, int, int]) -> dict:
    mesh = make_mesh(*sizes)
    placed = jax.device_put(params, param_shardings(params, mesh, CONFIG))
    gradient = jax.jit(make_gradient(CONFIG, SPEC, mesh, OPTIONS, known=KNOWN))
    step = make_update_step(CONFIG, SPEC, OPTIMIZER, mesh, OPTIONS, known=KNOWN)
    state = init_state(params, OPTIMIZER, mesh, CONFIG)
    bytes_per_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    grads = jax.device_get(gradient(placed, step.place(batch))[1])
    score = jax.device_get(make_score(CONFIG, mesh, OPTIONS)(placed, batch))
    state, metrics = step(state, batch)
    kept = jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state.params, placed))
    metrics = {name: float(value) for name, value in metrics.items()}
    return {"grads": grads, "score": score, "bytes": bytes_per_device, "metrics": metrics, "kept": kept}


def worst(got, want) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def main(meshes: list[tuple[int, int, int]]) -> None:
    params = tiny_params(CONFIG)
    batch = Step(CONFIG, params, tiny_sequences(14)).batch(SHAPE)
    single = run(params, batch, (1, 1, 1))
    report = {}
    for sizes in meshes:
        got = run(params, batch, sizes)
        report[str(sizes)] = {
            "gradient": worst(got["grads"], single["grads"]),
            "score": worst(got["score"], single["score"]),
            "metrics": max(abs(got["metrics"][name] - value) for name, value in single["metrics"].items()),
            "bytes_share": got["bytes"] / single["bytes"],
            "sharding_kept": got["kept"],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main([tuple(map(int, mesh.split(","))) for mesh in sys.argv[1:]])
