"""A JAX/Flax reinforcement-learning trainer for tool-calling language-model agents.

The names below are the public ones; each is imported when it is first used, so that `import hermes_jax` stays light.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "ChatRenderer": "hermes_jax.rollout.chat",
    "Checkpoints": "hermes_jax.learner.checkpoint",
    "Config": "hermes_jax.config",
    "Environment": "hermes_jax.rollout.environment",
    "Episode": "hermes_jax.data.trajectory",
    "Group": "hermes_jax.data.trajectory",
    "JaxEngine": "hermes_jax.engines.jax_engine",
    "ObjectiveSpec": "hermes_jax.objectives",
    "Outcome": "hermes_jax.data.trajectory",
    "Reward": "hermes_jax.rollout.environment",
    "RewardFunction": "hermes_jax.rollout.rewards",
    "Sampling": "hermes_jax.engines.base",
    "Tool": "hermes_jax.tools.registry",
    "Trainer": "hermes_jax.trainer",
    "Trajectory": "hermes_jax.data.trajectory",
    "WorkerServer": "hermes_jax.tools.worker",
    "forward": "hermes_jax.models.transformer",
    "group_advantages": "hermes_jax.objectives",
    "load_config": "hermes_jax.models.folder",
    "load_episodes": "hermes_jax.telemetry.episodes",
    "load_model": "hermes_jax.models.hf",
    "make_update_step": "hermes_jax.learner.update",
    "open_run_folder": "hermes_jax.run_folder",
    "pack": "hermes_jax.data.packing",
    "policy_objective": "hermes_jax.objectives",
    "run_episode": "hermes_jax.rollout.agent_loop",
    "save_model": "hermes_jax.models.hf",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"hermes_jax has no public name {name!r}; it has {', '.join(_PLACES)}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
