"""The real SmolLM2-135M-Instruct: our logits and greedy words are those of transformers' torch model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hermes_jax.models import banned_ids, forward, head_weight, load_model, load_tokenizer, logits, stop_ids

LENGTH = 48


def test_logits_and_greedy_answer_equal_transformers(smollm2):
    tokenizer = load_tokenizer(smollm2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(smollm2, attn_implementation="eager").eval()
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_length=LENGTH)[0].numpy()
        want = model(torch.tensor(ids[None])).logits[0].numpy()
    del model
    config, params = load_model(smollm2)
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    hidden, _ = jax.jit(forward, static_argnums=1)(params, config, tokens, jnp.arange(LENGTH)[None])
    got = np.asarray(logits(hidden, head_weight(params)))[0, : len(ids)]
    np.testing.assert_allclose(got, want, atol=2e-3, rtol=1e-4)
    assert got[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == ids[len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(ids[len(prompt) :])
    assert ids[-1] in stop_ids(smollm2, tokenizer)
    assert not banned_ids(config, tokenizer).any()
