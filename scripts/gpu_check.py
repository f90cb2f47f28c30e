"""Checks this checkout on a GPU and prints what it found as JSON: `bash scripts/gpu_check.sh` (usage there).

The sections (`gpu_sections.py`) run one after the other, each in a process of its own: a crash, a hang or a full memory
of one leaves the others their results. This process never imports jax.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
LIMIT_S = 450.0
SECTIONS = {"parity": 180.0, "learner_bf16": 130.0, "engine": 110.0, "learner_fp32": 130.0}
"""Sections in the order of their importance, and how many seconds each may take at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON, besides stdout")
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU, check tiny sizes on the CPU")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of them, separated by commas")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for everything")
    options = parser.parse_args(arguments)
    names = options.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"unknown sections {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    report, status = check(names, allow_cpu=options.allow_cpu, limit_s=options.limit_s)
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return status


def check(names: Sequence[str], *, allow_cpu: bool, limit_s: float) -> tuple[dict[str, Any], int]:
    """The report of these sections, and the exit status."""
    began = time.monotonic()
    report: dict[str, Any] = {"gpu": None, "status": "failed", "driver": nvidia_smi()}
    started = section("devices", limit_s=min(limit_s, 120.0))
    found = started["items"].get("devices", {})
    if "platform" not in found:
        report["reason"] = found.get("error") or f"looking for devices {started['status']}"
        say(report["reason"])
        return report, 2 if "missing" in found else 1
    report["versions"] = found["versions"]
    if found["platform"] == "gpu":
        report["gpu"] = {key: found[key] for key in ("kind", "count", "memory_bytes")}
    else:
        report["reason"] = no_gpu_reason(found["platform"], report["driver"])
        say(f"no GPU: {report['reason']}")
        if not allow_cpu:
            return report | {"status": "no_gpu"}, 3
    tiny = report["gpu"] is None
    report |= {"tiny": tiny, "sections": {}}
    for name in names:
        left = limit_s - (time.monotonic() - began)
        report["sections"][name] = result = section(name, limit_s=min(left, SECTIONS[name]), tiny=tiny)
        say(f"{name}: {result['status']} after {result['seconds']:.0f} s")
    good = all(result["status"] == "ok" for result in report["sections"].values())
    report |= {"status": "ok" if good else "failed", "seconds": round(time.monotonic() - began, 1)}
    return report, 0 if good else 1


def section(name: str, *, limit_s: float, tiny: bool = False) -> dict[str, Any]:
    """Runs one section, or the look for devices; see `run_section`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "items.json"
        program = SCRIPTS / ("gpu_devices.py" if name == "devices" else "gpu_sections.py")
        return run_section(
            [sys.executable, str(program), name, str(file), *(["--tiny"] if tiny else [])], file, limit_s
        )


def run_section(command: Sequence[str], file: Path, limit_s: float) -> dict[str, Any]:
    """Runs a command that writes its items to `file`, one after the other; what it wrote is kept whatever it does next.

    Returns:
        status: "ok"; "failed" (an item has an error or did not pass); "crashed", with the `exit` status; "timed_out";
        or "skipped", when there is hardly any time left. seconds. items.
    """
    if limit_s < 5:
        return {"status": "skipped", "seconds": 0.0, "items": {}}
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment(), start_new_session=True)
    result: dict[str, Any] = {"status": "ok"}
    try:
        if code := process.wait(limit_s):
            result = {"status": "crashed", "exit": code}
    except subprocess.TimeoutExpired:
        result = {"status": "timed_out"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    items = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if result["status"] == "ok" and any("error" in item or item.get("passed") is False for item in items.values()):
        result["status"] = "failed"
    return {**result, "seconds": round(time.monotonic() - began, 1), "items": items}


def environment() -> dict[str, str]:
    """The environment of a section: it imports this checkout, and a stand-in where jaxtyping is missing."""
    folders = [str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        import jaxtyping  # noqa: F401
    except ModuleNotFoundError:
        folders.insert(0, str(SCRIPTS / "without_jaxtyping"))
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def nvidia_smi() -> str | None:
    """Name, driver, memory and power limit of the GPUs as the driver tells them; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def no_gpu_reason(platform: str, driver: str | None) -> str:
    """Why jax sees no GPU, as far as that can be told."""
    wanted = os.environ.get("JAX_PLATFORMS")
    if wanted and not {"cuda", "gpu", "rocm"} & set(wanted.split(",")):
        return f"JAX_PLATFORMS={wanted} keeps jax from using one"
    if driver is not None:
        return f"jax sees only {platform} devices, but there is a GPU ({driver}): this jax was installed without CUDA"
    return f"jax sees only {platform} devices, and nvidia-smi finds no GPU either"


def say(line: str) -> None:
    """A line for people; stdout holds the JSON only."""
    print(f"gpu_check: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
