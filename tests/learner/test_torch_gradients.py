"""The gradient of a GRPO update against transformers' own model and a loss written in torch, in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import transformers

from hermes_jax.data.buckets import Buckets
from hermes_jax.data.packing import TrainingSequence, pack
from hermes_jax.data.trajectory import Trajectory
from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.update import make_gradient
from hermes_jax.models.hf import load_model
from hermes_jax.objectives.spec import ObjectiveSpec

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
TEMPERATURE, BETA, CLIP_LOW, CLIP_HIGH = 0.7, 0.1, 0.1, 0.15

# transformers' parameter → (path in the project's tree, layer, whether the matrix is stored transposed)
LEAVES = {
    "model.embed_tokens.weight": (("embed", "embedding"), None, False),
    "model.norm.weight": (("final_norm", "scale"), None, False),
    "model.layers.0.self_attn.q_proj.weight": (("layers", "attn", "q", "kernel"), 0, True),
    "model.layers.1.self_attn.k_proj.weight": (("layers", "attn", "k", "kernel"), 1, True),
    "model.layers.0.self_attn.v_proj.weight": (("layers", "attn", "v", "kernel"), 0, True),
    "model.layers.1.self_attn.o_proj.weight": (("layers", "attn", "o", "kernel"), 1, True),
    "model.layers.0.mlp.gate_proj.weight": (("layers", "mlp", "gate", "kernel"), 0, True),
    "model.layers.1.mlp.down_proj.weight": (("layers", "mlp", "down", "kernel"), 1, True),
    "model.layers.1.input_layernorm.weight": (("layers", "attn_norm", "scale"), 1, False),
}
FAMILY_LEAVES = {
    "qwen3": {"model.layers.0.self_attn.q_norm.weight": (("layers", "attn", "q_norm", "scale"), 0, False)},
    "llama": {"lm_head.weight": (("head", "weight"), None, False)},
}


def new_model(family: str):
    torch.manual_seed(0)
    if family == "qwen3":
        config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
    else:
        config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def torch_logprobs(model, tokens):
    logits = model(torch.tensor(tokens[None], dtype=torch.long)).logits[0, :-1] / TEMPERATURE
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:], dtype=torch.long)]


def torch_loss(model, data):
    """Mean over all generated tokens of `max(-rA, -clip(r)A) + beta k3`, one sequence at a time."""
    total, count = 0.0, 0
    for tokens, mask, old, ref, advantage in data:
        logprobs = torch_logprobs(model, tokens)
        ratio = torch.exp(logprobs - torch.tensor(old[1:]))
        surrogate = torch.maximum(-ratio * advantage, -ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
        log_ratio = logprobs - torch.tensor(ref[1:])
        kl = torch.exp(-log_ratio) - 1 + log_ratio
        total = total + ((surrogate + BETA * kl) * torch.tensor(mask[1:])).sum()
        count += int(mask.sum())
    return total / count


def new_data(model, rng):
    """(tokens, mask, old, ref, advantage) of sequences; log-probs lie near the model's own."""
    data = []
    for advantage in (1.3, -0.8, 0.4, -1.1, 0.9):
        tokens = rng.integers(0, SIZES["vocab_size"], rng.integers(8, 28))
        mask = np.arange(len(tokens)) >= 3
        mask[5:7] = False
        with torch.no_grad():
            own = np.concatenate([[0.0], torch_logprobs(model, tokens).numpy()])
        old, ref = (np.where(mask, np.minimum(own + rng.normal(0, 0.15, own.shape), 0.0), 0.0) for _ in range(2))
        data.append((tokens, mask, np.float32(old).astype(float), np.float32(ref).astype(float), advantage))
    return data


def packed(data):
    sequences = [
        TrainingSequence(
            Trajectory(
                tokens=tokens,
                mask=mask,
                logprobs=old,
                temperature=np.where(mask, TEMPERATURE, 1.0),
                policy_version=np.where(mask, 0, -1),
                turn=np.where(mask, 0, -1),
            ),
            advantage,
        )
        for tokens, mask, old, _, advantage in data
    ]
    batch, layout = pack(sequences, Buckets(((2, 2, 48),)))
    old, ref = (layout.scatter([np.float32(d[column]) for d in data]) for column in (2, 3))
    return batch._replace(old_logprobs=old, ref_logprobs=ref)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gradient_equals_torch(family, tmp_path):
    model = new_model(family)
    model.save_pretrained(tmp_path)
    model = model.double()
    data = new_data(model, np.random.default_rng(1))
    loss = torch_loss(model, data)
    loss.backward()

    config, params = load_model(tmp_path)
    spec = ObjectiveSpec("clip", clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl="k3", beta=BETA)
    gradient = make_gradient(
        config, spec, make_mesh(), ForwardOptions(head_chunk=20), known=("old_logprobs", "ref_logprobs")
    )
    got_loss, grads, metrics = jax.jit(gradient)(params, packed(data))

    assert float(metrics["clip_frac"]) > 0.05
    assert float(got_loss) == pytest.approx(loss.item(), rel=1e-5)
    parameters = dict(model.named_parameters())
    for name, (path, layer, transposed) in (LEAVES | FAMILY_LEAVES[family]).items():
        want = parameters[name].grad.numpy()
        got = grads
        for key in path:
            got = got[key]
        got = np.asarray(got if layer is None else got[layer])
        got = got.T if transposed else got
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=name)
