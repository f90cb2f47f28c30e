"""Flax NNX blocks, one forward, the chunked LM head, Hugging Face loading and saving."""
