"""Model folders in and out: every tensor comes back, transformers loads the export, damage is named."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hermes_jax.models import ModelFolderError, UnsupportedModelError, load_model, save_model, unstack_layers
from tests.data.cases import make_hf_logits
from tests.models.conftest import TINY

WEIGHTS = "model.safetensors"


def make_folder(folder: Path, name: str, dtype: torch.dtype = torch.float32, *, shards: bool = False) -> Path:
    """A checkpoint as transformers writes it, random weights by recipe, with the companions of a real one."""
    entry = {"config": TINY[name], "seed": 5, "weights_dtype": str(dtype).removeprefix("torch.")}
    make_hf_logits.write_model(entry, folder)
    if shards:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        (folder / WEIGHTS).unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / file).write_text(json.dumps({"made for": file}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "optimizer.pt").write_bytes(b"no part of a model")
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path / "source", "llama")


def raw_tensors(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name to (dtype, shape, bytes) of all tensors, read by the format's own library."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                tensor = tensors.get_tensor(name)
                raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[name] = (str(tensor.dtype), list(tensor.shape), raw)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_every_tensor_comes_back(name, dtype, tmp_path):
    source = make_folder(tmp_path / "source", name, dtype, shards=dtype == torch.bfloat16)
    config, params = load_model(source)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    save_model(params, config, source, tmp_path / "out", max_shard_bytes=20_000)
    want, got = raw_tensors(source), raw_tensors(tmp_path / "out")
    assert got == want
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(want)
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in want.values())
    assert len(set(index["weight_map"].values())) > 1
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_dtypes_are_kept_tensor_by_tensor(folder, tmp_path):
    weights = load_file(folder / WEIGHTS)
    mixed = {name: x if "norm" in name else x.to(torch.bfloat16) for name, x in weights.items()}
    save_file(mixed, folder / WEIGHTS)
    config, params = load_model(folder)
    save_model(unstack_layers(params), config, folder, tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == raw_tensors(folder)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["single", "sharded"])
def test_transformers_loads_the_export(name, limit, tmp_path):
    source = make_folder(tmp_path / "source", name)
    config, params = load_model(source)
    changed = jax.tree.map(lambda x: x * 1.5, params)
    save_model(changed, config, source, tmp_path / "out", max_shard_bytes=limit)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    old = load_file(source / WEIGHTS)
    for key, value in model.state_dict().items():
        if key in old:
            np.testing.assert_array_equal(value.numpy(), old[key].numpy() * np.float32(1.5))


def test_another_dtype_is_written_and_named_in_the_config(folder, tmp_path):
    config, params = load_model(folder)
    save_model(params, config, folder, tmp_path / "out", dtype=jnp.bfloat16)
    assert {dtype for dtype, _, _ in raw_tensors(tmp_path / "out").values()} == {"torch.bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_companions_are_copied_and_nothing_else(folder, tmp_path):
    config, params = load_model(folder)
    save_model(params, config, folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"optimizer.pt"}
    for name in names - {WEIGHTS}:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_tied_head_that_is_stored_stays_stored(tmp_path):
    source = make_folder(tmp_path / "source", "qwen3-tied")
    weights = load_file(source / WEIGHTS)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, source / WEIGHTS)
    config, params = load_model(source)
    assert "head" not in params
    save_model(params, config, source, tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)


def test_frequencies_stored_by_old_llama_files_are_recomputed(folder):
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / WEIGHTS)
    load_model(folder)


def test_loaded_arrays_are_jax_s_own(folder):
    """Donation works (nothing shares memory with numpy or the file), and the file may vanish."""
    _, params = load_model(folder)
    want = jax.tree.map(lambda x: np.array(x) + 1, params)
    before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    shutil.rmtree(folder)
    result = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(params)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(result)} == before
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), result, want))


def run_python(code: str, **env: str) -> str:
    """Runs code in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_onto_a_mesh(folder):
    """Eight devices: every leaf has the sharding asked for and the values of a plain load; saving collects them."""
    out = run_python(
        f"""
        import jax, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from hermes_jax.models import abstract_params, load_config, load_model, save_model
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        def place(path, leaf):
            axes = {{1: ("b",), 2: ("b", "a")}}[leaf.ndim if path[0].key != "layers" else leaf.ndim - 1]
            axes = [axis if size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, leaf.shape[-len(axes):])]
            return NamedSharding(mesh, P(*[None] * (leaf.ndim - len(axes)), *axes))
        config = load_config({str(folder)!r})
        shardings = jax.tree_util.tree_map_with_path(place, abstract_params(config))
        _, sharded = load_model({str(folder)!r}, shardings)
        _, plain = load_model({str(folder)!r})
        for x, y, s in zip(*map(jax.tree.leaves, (sharded, plain, shardings)), strict=True):
            assert x.sharding.is_equivalent_to(s, x.ndim), (x.sharding, s)
            assert np.array_equal(x, y)
        part = sharded["layers"]["mlp"]["up"]["kernel"].addressable_shards[0].data.shape
        save_model(sharded, config, {str(folder)!r}, {str(folder.parent / "out")!r})
        print(part)
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    assert out.strip() == "(2, 8, 24)"
    assert raw_tensors(folder.parent / "out") == raw_tensors(folder)


def test_torch_is_never_imported(folder):
    """Load, tokenise with the chat template, compute, save: torch is installed here, but stays outside."""
    from tests.models.test_tokenizer import write_tokenizer

    write_tokenizer(folder)
    out = run_python(
        f"""
        import importlib.util, sys
        import numpy as np
        from hermes_jax.models import forward, load_model, load_tokenizer, save_model, stop_ids
        folder = {str(folder)!r}
        tokenizer = load_tokenizer(folder)
        text = tokenizer.apply_chat_template([{{"role": "user", "content": "one two"}}], tokenize=False)
        ids = np.array([tokenizer.encode(text)])
        config, params = load_model(folder)
        forward(params, config, ids, np.arange(ids.size)[None])
        save_model(params, config, folder, folder + "-out")
        print(importlib.util.find_spec("torch") is not None, "torch" in sys.modules)
        """
    )
    assert out.split() == ["True", "False"]


# what can be wrong with a folder


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def truncate(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def truncate_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:40])


def empty_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def html_instead(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 20) + b"<html>not found</html> and more")


def with_weights(**changes: Any):
    """Changes tensors by name (None removes)."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        for name, value in changes.items():
            weights.pop(name, None)
            if value is not None:
                weights[name] = value
        save_file(weights, folder / WEIGHTS)

    return change


def with_config(**changes: Any):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


NORM = "model.layers.1.input_layernorm.weight"
BROKEN = {
    "folder-missing": (shutil.rmtree, ["no model folder", "source", "path"]),
    "config-missing": (lambda f: (f / "config.json").unlink(), ["config.json", "missing", "copy"]),
    "config-no-json": (break_json, ["config.json", "JSON"]),
    "no-weights": (lambda f: (f / WEIGHTS).unlink(), [WEIGHTS, "index", "save_pretrained"]),
    "half-written": (truncate, [WEIGHTS, "half-written", "again"]),
    "header-cut": (truncate_header, [WEIGHTS, "half-written", "header"]),
    "empty": (empty_file, [WEIGHTS, "0 bytes"]),
    "html": (html_instead, [WEIGHTS, "header is unreadable"]),
    "tensor-missing": (with_weights(**{NORM: None}), [NORM, "lacks"]),
    "tensor-unexpected": (with_weights(**{"model.layers.2.extra": torch.ones(2)}), [WEIGHTS, "layers.2.extra"]),
    "tensor-shape": (with_weights(**{NORM: torch.ones(31)}), [WEIGHTS, NORM, "[31]", "[32]"]),
    "tensor-dtype": (with_weights(**{NORM: torch.ones(32, dtype=torch.int32)}), [WEIGHTS, NORM, "I32", "BF16"]),
    "head-missing": (with_weights(**{"lm_head.weight": None}), ["lm_head.weight", "tie_word_embeddings"]),
    "head-not-tied": (with_config(tie_word_embeddings=True), ["lm_head.weight", "differs", "tie_word_embeddings"]),
    "wrong-config": (with_config(intermediate_size=50), ["shape", "mlp.", "different models"]),
    "more-layers": (with_config(num_hidden_layers=4), ["model.layers.2", "and 29 more"]),
    "fewer-layers": (with_config(num_hidden_layers=1), ["model.layers.1", "does not have"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_named(what, folder):
    change, words = BROKEN[what]
    change(folder)
    with pytest.raises(ModelFolderError) as caught:
        load_model(folder)
    for word in words:
        assert word in str(caught.value)


def test_a_shard_missing_from_the_folder_is_named(tmp_path):
    source = make_folder(tmp_path / "source", "llama", shards=True)
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFolderError, match=rf"{shard.name} is missing.*index.json.*copy"):
        load_model(source)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path):
    source = make_folder(tmp_path / "source", "llama", shards=True)
    shard = sorted(source.glob("*.safetensors"))[1]
    save_file(dict(list(load_file(shard).items())[1:]), shard)
    with pytest.raises(ModelFolderError, match=rf"{shard.name} lacks tensor model\..*promises"):
        load_model(source)


def test_an_index_without_a_map_is_named(tmp_path):
    source = make_folder(tmp_path / "source", "llama", shards=True)
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"index.json has no weight_map"):
        load_model(source)


def test_an_unsupported_model_is_no_broken_folder(folder):
    with_config(model_type="mamba")(folder)
    with pytest.raises(UnsupportedModelError, match=r"model_type='mamba'.*llama, mistral, qwen2, qwen3"):
        load_model(folder)


# putting an export in its place


def test_an_earlier_export_is_replaced_whole(folder, tmp_path):
    config, params = load_model(folder)
    save_model(params, config, folder, tmp_path / "out", max_shard_bytes=20_000)
    save_model(params, config, folder, tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == raw_tensors(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"], "something was left aside"


def test_an_empty_folder_is_filled(folder, tmp_path):
    (tmp_path / "out").mkdir()
    config, params = load_model(folder)
    save_model(params, config, folder, tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == raw_tensors(folder)


def test_other_folders_are_never_replaced(folder, tmp_path):
    config, params = load_model(folder)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelFolderError, match="no model folder"):
        save_model(params, config, folder, home)
    with pytest.raises(ModelFolderError, match="starts from"):
        save_model(params, config, folder, folder)
    assert (home / "thesis.tex").read_text() == "years of work"
    load_model(folder)


def test_parameters_of_another_model_are_refused(folder, tmp_path):
    other = make_folder(tmp_path / "other", "qwen3-tied")
    config, params = load_model(other)
    with pytest.raises(ModelFolderError, match="another model"):
        save_model(params, config, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_old_export(folder, tmp_path):
    """The size limit of the process stands for the end of the disk: writing fails midway through the weights."""
    config, params = load_model(folder)
    save_model(params, config, folder, tmp_path / "out")
    old = raw_tensors(tmp_path / "out")
    out = run_python(
        f"""
        import resource
        from hermes_jax.models import ModelFolderError, load_model, save_model
        config, params = load_model({str(folder)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        try:
            save_model(params, config, {str(folder)!r}, {str(tmp_path / "out")!r})
        except ModelFolderError as error:
            print(error)
        """
    )
    for word in (str(tmp_path / "out"), "File too large", "unchanged", "free space"):
        assert word in out
    assert raw_tensors(tmp_path / "out") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_killed_while_writing_leaves_the_old_export(folder, tmp_path):
    config, params = load_model(folder)
    save_model(params, config, folder, tmp_path / "out")
    old = raw_tensors(tmp_path / "out")
    code = f"""
        import os, signal
        from hermes_jax.models import hf, load_model, save_model
        config, params = load_model({str(folder)!r})
        whole = hf.copy_companions
        hf.copy_companions = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        save_model(params, config, {str(folder)!r}, {str(tmp_path / "out")!r})
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ, check=False)
    assert done.returncode == -9
    assert raw_tensors(tmp_path / "out") == old
    save_model(params, config, folder, tmp_path / "out", dtype=jnp.bfloat16)
    assert {dtype for dtype, _, _ in raw_tensors(tmp_path / "out").values()} == {"torch.bfloat16"}
