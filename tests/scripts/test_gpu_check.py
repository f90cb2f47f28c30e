"""The GPU check, with tiny sizes on the CPU: `scripts/gpu_check.sh`."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.bench_runs import is_running

REPOSITORY = Path(__file__).parent.parent.parent
QUICK_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
MAY_BE_MISSING = (
    "jaxtyping",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "torch",
    "jinja2",
    "tensorboardX",
)


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", REPOSITORY / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, cwd: Path, missing: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    """Runs the command as a user does, with some packages made to look as if they were not installed."""
    hidden = cwd / "hidden"
    hidden.mkdir(exist_ok=True)
    for name in missing:
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name={name!r})")
    return subprocess.run(
        ["bash", REPOSITORY / "scripts" / "gpu_check.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(hidden), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a whole run on a machine that has little more than jax and flax."""
    folder = tmp_path_factory.mktemp("gpu_check")
    sections = ("--sections", "parity,learner_bf16,engine")  # learner_fp32 is the same code
    command = ("--allow-cpu", "--out", "report.json", *sections)
    done = run(*command, cwd=folder, missing=MAY_BE_MISSING, XLA_FLAGS=QUICK_COMPILER)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "report.json").read_text()) == json.loads(done.stdout)
    return json.loads(done.stdout)


def test_every_section_passes_where_only_jax_and_flax_are_installed(report):
    assert report["status"] == "ok"
    assert {name: found["status"] for name, found in report["sections"].items()} == {
        "parity": "ok",
        "learner_bf16": "ok",
        "engine": "ok",
    }
    items = [item for found in report["sections"].values() for item in found["items"].values()]
    assert all(item["seconds"] > 0 and "compile_s" in item and "peak_memory_bytes" in item for item in items)


def test_says_that_there_was_no_gpu_although_cpus_were_allowed(report):
    assert report["gpu"] is None
    assert report["tiny"] is True
    assert "JAX_PLATFORMS=cpu" in report["reason"]


def test_parity_is_measured_on_both_turns_of_every_episode(report):
    fp32, bf16 = (report["sections"]["parity"]["items"][name] for name in ("fp32", "bf16"))
    assert 2 * 6 * 2 <= fp32["tokens"] <= 2 * 6 * 10  # six episodes of two replies of 2 to 10 tokens
    assert 0 < fp32["mean_abs_diff"] <= 1e-4
    assert fp32["max_abs_diff"] <= 2e-3
    assert 1e-4 < bf16["mean_abs_diff"] < 0.05  # another dtype really ran
    assert -4.6 < fp32["mean_logprob"] < -0.5  # neither uniform over 97 ids nor certain


def test_learner_has_rates_and_mfu_against_the_measured_peak(report):
    items = report["sections"]["learner_bf16"]["items"]
    peak = items["peak_default"]["tflops_per_s"]
    for name in ("update", "update_remat"):
        assert items[name]["mfu"] == pytest.approx(items[name]["model_tflops_per_s"] / peak)
        assert items[name]["tokens_per_s"] > 0
    assert items["update"]["loss"] == pytest.approx(items["update_remat"]["loss"], abs=1e-3)


def test_engine_has_rates(report):
    found = report["sections"]["engine"]["items"]["slots_4"]
    assert found["tokens"] == 4 * 8
    assert 0 < found["tokens_per_s"] <= found["decode_tokens_per_s"]


def test_without_a_gpu_it_says_so(tmp_path):
    done = run(cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["gpu"], report["status"]) == (3, None, "no_gpu")
    assert "JAX_PLATFORMS=cpu keeps jax from using one" in report["reason"]
    assert f"no GPU: {report['reason']}" in done.stderr


def test_a_missing_package_is_named(tmp_path):
    done = run("--allow-cpu", cwd=tmp_path, missing=("optax",))
    assert done.returncode == 2
    assert "optax" in json.loads(done.stdout)["reason"]
    assert "optax" in done.stderr


def test_a_platform_that_does_not_start_is_no_missing_package(tmp_path):
    done = run("--allow-cpu", cwd=tmp_path, JAX_PLATFORMS="nonsense")
    assert done.returncode == 1
    assert "nonsense" in json.loads(done.stdout)["reason"]


def test_a_python_without_jax_is_refused(tmp_path):
    done = run(cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2
    assert "PYTHON=/bin/false" in done.stderr


@pytest.mark.parametrize(
    ("driver", "wanted", "words"),
    [
        (None, "", "nvidia-smi finds no GPU"),
        ("NVIDIA H100, 570.1, 81559 MiB, 700 W", "", "without CUDA"),
        (None, "cpu", "JAX_PLATFORMS=cpu"),
        ("NVIDIA H100, 570.1, 81559 MiB, 700 W", "cuda,cpu", "without CUDA"),
    ],
)
def test_reasons_for_no_gpu(gpu_check, monkeypatch, driver, wanted, words):
    monkeypatch.setenv("JAX_PLATFORMS", wanted)
    assert words in gpu_check.no_gpu_reason("cpu", driver)


def section(gpu_check, tmp_path, code: str, limit_s: float = 60.0):
    """Runs Python code as a section; `keep(item=...)` saves an item as sections do."""
    file = tmp_path / "items.json"
    start = f"import json\ndef keep(**items): open({str(file)!r}, 'w').write(json.dumps(items))\n"
    return gpu_check.run_section([sys.executable, "-c", start + code], file, limit_s)


def test_a_crashed_section_keeps_what_it_had(gpu_check, tmp_path):
    result = section(gpu_check, tmp_path, "import os\nkeep(first={'seconds': 1})\nos.abort()")
    assert (result["status"], result["items"]) == ("crashed", {"first": {"seconds": 1}})
    assert result["exit"] != 0


def test_a_hanging_section_is_ended_with_all_its_processes(gpu_check, tmp_path):
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
keep(first={"pid": child.pid})
time.sleep(600)
"""
    began = time.monotonic()
    result = section(gpu_check, tmp_path, code, limit_s=6)
    assert result["status"] == "timed_out"
    assert time.monotonic() - began < 60
    assert not is_running(result["items"]["first"]["pid"])


@pytest.mark.parametrize("item", ["{'error': 'out of memory'}", "{'passed': False}"])
def test_a_section_with_a_bad_item_failed(gpu_check, tmp_path, item):
    assert section(gpu_check, tmp_path, f"keep(first={item}, second={{'passed': True}})")["status"] == "failed"


def test_a_section_without_time_is_skipped(gpu_check, tmp_path):
    assert section(gpu_check, tmp_path, "keep(first={})", limit_s=1)["status"] == "skipped"
