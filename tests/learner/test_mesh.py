"""Where parameters lie: rules by path, replication where an axis does not divide, errors where it would cut a head."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import PartitionSpec as P

from hermes_jax.learner import mesh as meshes
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.transformer import abstract_params, unstack_layers


def tiny_config(**changes) -> ModelConfig:
    hf = {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return ModelConfig.from_hf(hf | changes)


def specs_of(config: ModelConfig, data: int, fsdp: int, tensor: int):
    fake = SimpleNamespace(shape={"data": data, "fsdp": fsdp, "tensor": tensor})
    return meshes.param_specs(abstract_params(config), fake, config)


def test_matrices_are_sharded_over_fsdp_and_tensor_and_norms_are_whole():
    specs = specs_of(tiny_config(), 2, 2, 2)
    assert specs["embed"]["embedding"] == specs["head"]["weight"] == P("tensor", "fsdp")
    assert specs["final_norm"]["scale"] == P(None)
    layers = specs["layers"]
    assert layers["attn_norm"]["scale"] == P(None, None)
    for name in ("q", "k", "v"):
        assert layers["attn"][name] == {"kernel": P(None, "fsdp", "tensor"), "bias": P(None, "tensor")}
    assert layers["attn"]["o"]["kernel"] == layers["mlp"]["down"]["kernel"] == P(None, "tensor", "fsdp")
    assert layers["mlp"]["gate"]["kernel"] == layers["mlp"]["up"]["kernel"] == P(None, "fsdp", "tensor")


def test_every_matrix_has_a_rule():
    specs = jax.tree_util.tree_leaves_with_path(specs_of(tiny_config(), 1, 2, 2), is_leaf=lambda x: isinstance(x, P))
    whole = {jax.tree_util.keystr(path[-2:]) for path, spec in specs if all(axis is None for axis in spec)}
    assert whole == {"['attn_norm']['scale']", "['mlp_norm']['scale']", "['final_norm']['scale']"}


def test_what_does_not_divide_is_replicated():
    specs = specs_of(tiny_config(vocab_size=63), 1, 3, 4)  # 63 % 4, 32 % 3, 2 kv heads for 4 shards
    assert specs["embed"]["embedding"] == P(None, None)
    assert specs["layers"]["attn"]["k"] == {"kernel": P(None, None, None), "bias": P(None, None)}
    assert specs["layers"]["attn"]["q"]["kernel"] == P(None, None, "tensor")


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (3, {}, "mesh.tensor=3 must divide the model's 4 attention heads"),
        (4, {"intermediate_size": 50}, "50 MLP channels"),
    ],
)
def test_a_tensor_axis_that_cuts_a_head_is_refused(tensor, changes, message):
    with pytest.raises(ValueError, match=message):
        specs_of(tiny_config(**changes), 1, 1, tensor)


def test_rules_hold_for_layers_in_a_tuple():
    config = tiny_config()
    one_by_one = jax.eval_shape(unstack_layers, abstract_params(config))
    mesh = SimpleNamespace(shape={"data": 1, "fsdp": 2, "tensor": 2})
    layer = meshes.param_specs(one_by_one, mesh, config)["layers"][1]
    assert layer["attn"]["q"] == {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}


def test_too_few_devices_say_how_many_are_needed():
    with pytest.raises(ValueError, match=r"data=1000, fsdp=2, tensor=1 needs 2000 devices, there are \d+"):
        meshes.make_mesh(1000, 2)
    with pytest.raises(ValueError, match="sizes are >= 1"):
        meshes.make_mesh(0)


def test_rows_must_spread_evenly():
    mesh = SimpleNamespace(shape={"data": 2, "fsdp": 3, "tensor": 1})
    meshes.check_rows((4, 12, 64), mesh)
    with pytest.raises(ValueError, match=r"multiple of data x fsdp = 6, got \[4, 8, 64\].*row_multiple=6"):
        meshes.check_rows((4, 8, 64), mesh)
