"""Options of the model, the environment and the engine: what is run, and where."""

from __future__ import annotations

from typing import Any, Literal

from hermes_jax.config.fields import Block, Names, option


class ModelConfig(Block):
    """The policy: an HF folder, or a model made on the spot."""

    path: str | None = option(None, "HF model folder (config.json, safetensors, tokenizer, chat template).")
    builder: str | None = option(
        None, "Makes the model instead of reading one: 'module:function', called as function(folder, seed)."
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "Compute dtype of learner and engine; parameters stay float32 masters."
    )
    context_length: int = option(
        4096,
        "Longest trajectory: prompt, replies and tool results together. Unless it is given, no more than the model of "
        "model.path can hold (its max_position_embeddings).",
        "tokens",
        ge=8,
    )
    template_arguments: dict[str, Any] = option(
        {}, "Extra variables for the chat template, such as enable_thinking: false."
    )


class EnvConfig(Block):
    """The environment, its tools and the length of a run (Hermes' names)."""

    name: str = option("terminal_test", "Folder under envs/ that holds the environment.")
    enabled_toolsets: Names | None = option(
        None, "Toolsets offered to the policy; null = all that the environment can offer."
    )
    disabled_toolsets: Names | None = option(
        None, "Toolsets taken away after enabled_toolsets was applied; null = none."
    )
    max_agent_turns: int = option(30, "Model turns per episode; then its outcome is max_turns.", "turns", ge=1)
    max_token_length: int = option(2048, "New tokens per model turn; then its outcome is length.", "tokens", ge=1)
    max_episode_tokens: int | None = option(
        None, "New tokens per episode, over all turns; null = no limit but the context.", "tokens", ge=1
    )
    group_size: int = option(4, "Episodes per task; their rewards are compared with each other.", "episodes", ge=1)
    groups_per_step: int = option(8, "Tasks per training step; one step collects all their groups.", "groups", ge=1)
    total_steps: int = option(1000, "Training steps (collections) of the whole run.", "steps", ge=0)
    steps_per_eval: int = option(
        100, "Evaluate on held-out tasks every so many steps; 0 = before and after training only.", "steps", ge=0
    )
    eval_episodes: int = option(
        64,
        "Held-out episodes per evaluation, each for sampled and greedy decoding; 0 = never evaluate.",
        "episodes",
        ge=0,
    )
    agent_temperature: float = option(
        1.0, "Sampling temperature in evaluation; training episodes use grpo.temperature.", ge=0
    )
    system_prompt: str | None = option(None, "System message of every episode; null = the environment's own, if any.")
    terminal_backend: Literal["bubblewrap", "local"] = option(
        "bubblewrap",
        "Where tools run. local = on this machine without a sandbox: the policy can do whatever you can. "
        "(Hermes: local; here it must be written by you.)",
    )
    terminal_timeout: float = option(120.0, "Deadline of one tool call; then all its processes are ended.", "s", gt=0)
    episode_timeout: float = option(
        600.0, "Deadline of one episode, waiting for the engine included (Hermes: worker_timeout).", "s", gt=0
    )
    tool_output_limit: int = option(
        8192,
        "Longest tool result shown to the policy, in UTF-8; of more it sees head and tail and how much was left out "
        "(Hermes: 100000).",
        "bytes",
        ge=64,
    )
    tool_call_parser: str = option("hermes", "Format in which the policy writes tool calls.")
    reward_timeout: float = option(60.0, "Deadline of the reward function for one episode.", "s", gt=0)
    max_concurrent_episodes: int | None = option(
        None, "Episodes that run at once; null = all of a step.", "episodes", ge=1
    )
    options: dict[str, Any] = option({}, "Passed to the environment, which checks them.")


class OpenAIConfig(Block):
    """The engine that generates, under Hermes' name for this block."""

    server_type: Literal["jax", "vllm", "openai"] = option(
        "jax", "jax = the embedded engine. vllm and openai are reserved: not part of this version."
    )
    slots: int = option(32, "Sequences decoded at once; each owns a row of the KV cache.", "sequences", ge=4)
    prefill_chunk: int = option(256, "Most prompt tokens of one sequence read per device call.", "tokens", ge=1)
    decode_steps: int = option(
        8,
        "Tokens generated per device call and slot; more = less overhead, later arrival of new requests.",
        "tokens",
        ge=1,
    )
    base_url: str | None = option(None, "Address of the server, for server_type vllm and openai.")
    model_name: str | None = option(None, "Name of the model on the server, for server_type vllm and openai.")
    api_key: str | None = option(None, "Key for the server; never written to the run folder.")
    timeout: float = option(1200.0, "Deadline of one request to the server.", "s", gt=0)


class LoggingConfig(Block):
    """What a run writes down besides checkpoints."""

    tensorboard: bool = option(True, "Write metrics for TensorBoard into the run folder.")
    wandb: bool = option(False, "Send metrics to Weights & Biases (needs the extra 'wandb'; Hermes: true).")
    wandb_project: str = option("hermes-jax", "Project on Weights & Biases.")
    wandb_name: str | None = option(None, "Name of the run on Weights & Biases; null = the run folder's name.")
    save_episodes: bool = option(True, "Save every episode: messages, tokens, masks, log-probs, rewards, timings.")
    progress: Literal["auto", "live", "plain", "none"] = option(
        "auto", "Progress on the terminal; auto = live on a terminal, one plain line per step elsewhere."
    )


class CheckpointConfig(Block):
    """When a run is saved, and what is kept."""

    every_steps: int = option(25, "Save every so many steps; 0 = only at the end and when stopped.", "steps", ge=0)
    keep_last: int = option(2, "Newest checkpoints kept.", "checkpoints", ge=1)
    keep_best: int = option(1, "Best checkpoints kept besides; 0 = none.", "checkpoints", ge=0)
    best_metric: str = option("eval/success", "Metric that ranks checkpoints; higher is better.")
    asynchronous: bool = option(True, "Write while the next episodes are collected; false = wait for the disk.")


class MeshConfig(Block):
    """How devices are arranged; the product of the axes is the number of devices used."""

    data: int = option(-1, "Copies of the model that share a batch; -1 = all devices that are left.", "devices", ge=-1)
    fsdp: int = option(1, "Devices among which parameters and batch are split.", "devices", ge=1)
    tensor: int = option(1, "Devices among which each matrix is split.", "devices", ge=1)
