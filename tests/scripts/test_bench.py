"""The benchmarks of `scripts/bench/` at tiny sizes, without peers: they run, and what they print is what was done."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from envs.terminal_test.policy import build
from tests.scripts.bench_runs import REPOSITORY, bench, figures, is_running


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "model"
    build(folder, seed=0)
    return folder


@pytest.fixture
def modules(monkeypatch):
    """Imports a module of scripts/bench."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts" / "bench"))
    return importlib.import_module


def test_the_variable_case_is_the_one_that_is_described(modules):
    case = modules("cases").make_case("variable")
    assert (len(case.lengths), case.tokens, max(case.lengths), case.width) == (32, 10_228, 1024, 1024)
    assert len(case.lengths) * case.width == 32_768  # what padding makes of it
    assert list(case.lengths) == sorted(case.lengths)
    assert max(case.prompts) + max(a - b for a, b in zip(case.lengths, case.prompts, strict=True)) == case.width
    ids = case.ids(31, 49_152)
    assert len(ids) == 1024
    assert len(set(ids)) > 1000  # no repetition
    assert all(10 <= one < 49_152 for one in ids)


def test_learner_counts_real_tokens_and_times_a_real_update(model):
    found = figures("learner.py", "--case", "variable", "--tokens", "1024", "--updates", "2", "--model", model)
    ours = found["ours"]
    assert sum(found["case"]["lengths"]) == ours["tokens"] == found["case"]["tokens"] == 1024
    prompts = sum(max(length // 8, 1) for length in found["case"]["lengths"])
    assert ours["trained_tokens"] == 1024 - prompts
    assert ours["tokens_per_s"] == pytest.approx(1024 / ours["update_s"], rel=1e-4)
    assert ours["update_s"] == min(ours["updates_s"]["all"])
    assert len(ours["updates_s"]["all"]) == 2
    assert 0 <= ours["padding_share"] < 1
    assert ours["mfu"] == pytest.approx(ours["model_gflop"] / ours["update_s"] / ours["matmul_peak_gflops"], rel=1e-3)
    assert ours["first_grad_norm"] > 0
    assert ours["first_ratio_deviation"] < 1e-5  # the old log-probs are those of the policy
    assert ours["updates_skipped"] == 0
    assert 0.1 < ours["peak_rss_gib"] < 8


def test_remat_and_options_reach_the_learner(model):
    arguments = ("learner.py", "--tokens", "128", "--updates", "1", "--model", model)
    found = figures(*arguments, "--remat", "off", "--set", "learner.micro_tokens=32")["ours"]
    assert found["remat"] is False
    assert found["shape"] == [4, 2, 16]
    assert found["tokens"] == 8 * 16


def test_both_versions_of_the_head_compute_the_same_and_chunks_need_less_memory(tmp_path):
    sizes = ("--tokens", "256", "--time-tokens", "64", "--vocab", "1000", "--hidden", "32", "--chunk", "16")
    found = figures("loss_head.py", *sizes)
    chunked, full = found["chunked"], found["full"]
    assert chunked["loss"] == pytest.approx(full["loss"], rel=1e-4)
    assert chunked["gradient_norms"] == pytest.approx(full["gradient_norms"], rel=1e-4)
    assert full["temporary_bytes"] >= 256 * 1000 * 4  # one copy of the logits at least
    assert found["ratio_temporary_bytes"] == pytest.approx(
        chunked["temporary_bytes"] / full["temporary_bytes"], rel=1e-4
    )
    assert found["ratio_temporary_bytes"] < 0.5
    assert found["ratio_time"] == pytest.approx(chunked["call_s"] / full["call_s"], rel=1e-4)


def test_engine_counts_the_tokens_of_its_waves(model):
    arguments = ("--case", "many", "--slots", "5", "--reply", "8", "--waves", "2", "--model", model)
    ours = figures("engine.py", *arguments)["ours"]
    assert ours["tokens"] == 5 * 8
    assert ours["generated"] == 2 * 5 * 8
    assert ours["tokens_per_s"] == pytest.approx(40 / ours["seconds"], rel=1e-4)
    assert ours["ms_per_token"] == pytest.approx(1000 * ours["seconds"] / 8, rel=1e-4)
    assert ours["compilations_after_warm_up"] == 0


def test_engine_holds_an_episode_against_its_prefill_and_steps(model):
    arguments = ("--case", "episode", "--turns", "2", "--reply", "8", "--waves", "2", "--model", model)
    ours = figures("engine.py", *arguments)["ours"]
    assert ours["decode_steps"] == 2 * 8
    assert ours["prompt_ids"] == 64 + 8 + 200
    floor = ours["prefill_s"]["min"] + 16 * ours["decode_step_s"]["min"]
    assert ours["floor_s"] == pytest.approx(floor, rel=1e-3)
    assert ours["ratio_to_floor"] == pytest.approx(ours["seconds"] / floor, rel=1e-3)


def test_end_to_end_times_whole_steps_of_the_trainer(model):
    ours = figures("end_to_end.py", "--steps", "1", "--model", model)["ours"]
    assert ours["step_s"] == pytest.approx(ours["generate_s"] + ours["learn_s"], rel=1e-4)
    parts = ours["parts_s"]
    assert ours["generate_s"] == parts["collect"]
    assert min(parts.values()) > 0  # everything was done: an update, too
    assert parts["score"] + parts["update"] + parts["publish"] <= ours["learn_s"]
    (tokens,), (reward,) = ours["generated_tokens"], ours["reward"]
    assert 16 <= tokens <= 16 * 64
    assert -0.1 < reward <= 1
    assert ours["reward_missing"] == [0]


def test_the_toy_reward_wants_a_larger_number(modules):
    reward = modules("toy_task").reward
    assert reward("17", 10) > 0.99
    assert 0.1 < reward("9.5 apples, not 17", 10) < 0.2
    assert -0.1 < reward("no number", 10) < 0
    assert reward("17", 10) > reward("17 and more words", 10)  # replies of a group differ


def test_host_packs_everything_and_plays_whole_episodes(model):
    found = figures("host.py", "--trajectories", "64", "--turns", "3", "--repeats", "2", "--model", model)
    work, load = found["work"], found["load"]
    assert work["packed_tokens"] == 64 * 320
    assert 0 <= work["padding_share"] < 0.5
    assert work["pack_ms"] > 0
    assert work["advantage_std"] == pytest.approx(1, abs=0.2)  # normalised in groups of eight
    assert work["advantages_ms"] > 0
    assert work["turns"] == 3
    assert 2 * 100 < work["episode_tokens"] - work["sampled_tokens"] < 2 * 300  # two tool results
    assert work["turn_ms"] > 0
    assert load["model_bytes"] == (model / "model.safetensors").stat().st_size
    assert load["share_of_read_speed"] == pytest.approx(load["read_s"] / load["load_s"], rel=1e-3)
    assert load["rss_over_model"] > 0


def test_a_missing_peer_is_named_with_its_remedy(model, tmp_path):
    done = bench("learner.py", "--peer", "trl", "--tokens", "64", "--model", model, HERMES_JAX_PEERS=str(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path / ".venv-trl") in done.stderr
    assert "setup_peers.sh trl" in done.stderr


def test_a_process_that_fails_shows_its_last_words(tmp_path):
    done = bench("learner.py", "--tokens", "64", "--model", tmp_path / "no such model")
    assert done.returncode == 1
    assert "ended with status" in done.stderr
    assert "no such model" in done.stderr
    assert done.stdout == ""


IN_TURN = """
import json, sys
import processes

code = '''
import json, sys
mib, log, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
held = bytearray(mib << 20)
open(log, "a").write(name)
print(json.dumps({"n": mib}))
'''
mib = {"a": 10, "b": 300}
commands = {name: processes.Command([sys.executable, "-c", code, mib[name], sys.argv[1], name]) for name in mib}
runs = processes.alternate(commands, rounds=2)
print(json.dumps({name: [vars(one) for one in found] for name, found in runs.items()}))
"""


def test_processes_run_in_turn_and_report_what_they_took(tmp_path):
    log = tmp_path / "log"
    # in a process of its own: one started from here would inherit this one's peak memory
    folder = REPOSITORY / "scripts" / "bench"
    done = subprocess.run([sys.executable, "-c", IN_TURN, log], cwd=folder, capture_output=True, text=True, check=True)
    runs = json.loads(done.stdout)
    assert log.read_text() == "abab"
    assert [one["result"] for one in runs["b"]] == [{"n": 300}] * 2
    assert all(one["peak_rss_bytes"] > 300 << 20 for one in runs["b"])
    assert all(one["peak_rss_bytes"] < 150 << 20 for one in runs["a"])  # nothing of b's
    assert all(0 < one["cpu_s"] < 2 * (os.cpu_count() or 1) * one["wall_s"] for one in runs["b"])


def test_a_process_that_prints_no_json_or_never_ends_is_an_error(modules):
    processes = modules("processes")
    with pytest.raises(processes.BenchError, match="printed no JSON"):
        processes.run(processes.Command([sys.executable, "-c", "print('hello')"]))
    with pytest.raises(processes.BenchError, match="took more than 1 s"):
        processes.run(processes.Command([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=1))


def test_a_benchmark_that_is_ended_takes_its_processes_along(tmp_path):
    code = """
import sys
import processes

pids = sys.argv[1]
script = f"sleep 600 & echo $$ $! > {pids}.partial; mv {pids}.partial {pids}; wait"
command = processes.Command(["sh", "-c", script])
processes.main(lambda: {"result": processes.run(command).result})
"""
    pids, folder = tmp_path / "pids", REPOSITORY / "scripts" / "bench"
    driver = subprocess.Popen([sys.executable, "-c", code, pids], cwd=folder)
    while not pids.exists():
        assert driver.poll() is None
        time.sleep(0.05)
    driver.terminate()
    assert driver.wait(30) == 128 + signal.SIGTERM
    for pid in map(int, pids.read_text().split()):
        assert not is_running(pid)
