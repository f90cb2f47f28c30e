"""Policy losses of a user's own."""

import jax.numpy as jnp


def soft_clip(logprobs, old_logprobs, advantages, *, clip_low=0.2):
    """The log ratio through tanh, and how often that matters."""
    ratio = 1 + clip_low * jnp.tanh((logprobs - old_logprobs) / clip_low)
    return -ratio * advantages, {"far": jnp.abs(logprobs - old_logprobs) > clip_low}


def of_the_whole(logprobs, advantages):
    """A sum, which is refused."""
    return -(logprobs * advantages).sum()
