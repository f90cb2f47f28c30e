"""A JAX/Flax reinforcement-learning trainer for tool-calling language-model agents."""
