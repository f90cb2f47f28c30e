"""Every hf_models case of the built families: logits equal transformers' torch model, and no switch is ignored."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters_models import hf_logits
from tests.data.cases import make_hf_logits

CASES = json.loads((Path(make_hf_logits.__file__).parent / "hf_models.json").read_text(encoding="utf-8"))["models"]
BUILT = [case for case in CASES if case["family"] in ("llama", "qwen2", "qwen3", "mistral")]
SWITCHES = [(case, change) for case in BUILT for change in case["sensitivity"]]


@pytest.fixture(scope="module")
def base() -> Any:
    """Writes each checkpoint and computes its logits once."""
    made: dict[str, tuple[Path, np.ndarray]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def of(case: dict) -> tuple[Path, np.ndarray]:
            if case["id"] not in made:
                path = Path(folder) / case["id"]
                make_hf_logits.write_model(case, path)
                made[case["id"]] = path, ours(case, path)
            return made[case["id"]]

        yield of


def kept(case: dict) -> np.ndarray:
    """True at positions that count."""
    ids = np.array(case["input_ids"])
    return np.arange(ids.shape[1]) < np.array(case.get("lengths", [ids.shape[1]] * ids.shape[0]))[:, None]


def ours(case: dict, folder: Path) -> np.ndarray:
    return hf_logits(folder, np.array(case["input_ids"]), case.get("lengths"))


def test_no_case_is_forgotten():
    assert len(BUILT) >= 15
    assert {case["family"] for case in CASES} - {case["family"] for case in BUILT} == {
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
    }


@pytest.mark.parametrize("case", BUILT, ids=lambda case: case["id"])
def test_logits_equal_transformers(case, base):
    folder, got = base(case)
    keep, tolerance = kept(case), case["tolerance"]["float32"]
    want, _ = make_hf_logits.logits(make_hf_logits.load(folder), case)
    np.testing.assert_allclose(got[keep], want.numpy()[keep], **tolerance)


@pytest.mark.parametrize("case", BUILT, ids=lambda case: case["id"])
def test_logits_equal_the_stored_spots(case, base):
    got, tolerance = base(case)[1].astype(np.float64), case["tolerance"]["float32"]
    assert case["expected"]["spots"]
    for spot in case["expected"]["spots"]:
        z = got[spot["row"], spot["position"]]
        np.testing.assert_allclose(z[:8], spot["logits_0_to_7"], **tolerance)
        np.testing.assert_allclose(np.logaddexp.reduce(z), spot["logsumexp"], **tolerance)
        assert z.argmax() == spot["argmax"]


@pytest.mark.parametrize(("case", "change"), SWITCHES, ids=lambda x: x.get("id") or x["what"].replace(" ", "-"))
def test_a_switch_moves_the_logits_as_it_moves_theirs(case, change, base, tmp_path):
    """A switch that we ignored would move nothing, one that we misread something else."""
    config = {**case["config"], **change.get("config", {})}
    for key in change.get("drop", []):
        config.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(base(case)[0] / "model.safetensors")
    for pattern, value in change.get("weights", {}).items():
        weights |= {name: torch.full_like(x, value) for name, x in weights.items() if re.search(pattern, name)}
    save_file(weights, tmp_path / "model.safetensors")
    moved = np.abs(ours(case, tmp_path) - base(case)[1])[kept(case)].max()
    assert moved == pytest.approx(change["largest_change"], rel=0.06)


@pytest.mark.parametrize("case", [case for case in CASES if case not in BUILT], ids=lambda case: case["id"])
def test_families_that_are_not_built_say_so(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    with pytest.raises(NotImplementedError, match=case["family"]):
        hf_logits(tmp_path, np.array(case["input_ids"]))
