"""Every option of a run: typed, with default, unit and one line of help.

`load` reads YAML files and command-line overrides, `dump` writes the resolved configuration,
`help_config` lists all options.
"""

from hermes_jax.config.blocks_learn import GRPOConfig, LearnerConfig, OptimizerConfig, OutcomePolicy, WarmStartConfig
from hermes_jax.config.blocks_run import (
    CheckpointConfig,
    EnvConfig,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    OpenAIConfig,
)
from hermes_jax.config.load import build, load, option_paths
from hermes_jax.config.rules import ALIASES
from hermes_jax.config.schema import Config
from hermes_jax.config.text import dump, help_config
from hermes_jax.config.yaml_text import ConfigError

__all__ = [
    "ALIASES",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "EnvConfig",
    "GRPOConfig",
    "LearnerConfig",
    "LoggingConfig",
    "MeshConfig",
    "ModelConfig",
    "OpenAIConfig",
    "OptimizerConfig",
    "OutcomePolicy",
    "WarmStartConfig",
    "build",
    "dump",
    "help_config",
    "load",
    "option_paths",
]
