"""Environments: defaults, messages, finding them by name."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from hermes_jax.rollout.environment import Environment, call, load_environment


class Counting(Environment):
    system_prompt = "Be brief."

    def train_item(self, index):
        return {"number": index}

    def format_prompt(self, item):
        return f"Count to {item['number']}."


def test_one_integer_says_where_a_run_is():
    environment = Counting()
    assert [environment.get_next_item()["number"] for _ in range(3)] == [0, 1, 2]
    environment.cursor = 1
    assert environment.get_next_item() == {"number": 1}


def test_task_ids_are_stable_and_differ():
    environment = Counting()
    assert environment.task_id({"id": 3}) == "3"
    assert environment.task_id({"task_id": "a"}) == "a"
    assert environment.task_id({"number": 1}) == environment.task_id({"number": 1}) == "4e6a309cf466"
    assert environment.task_id({"number": 1}) != environment.task_id({"number": 2})


def test_messages_begin_with_the_system_prompt_once():
    environment = Counting()
    assert environment.messages({"number": 2}) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to 2."},
    ]
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]
    environment.format_prompt = lambda item: own
    assert environment.messages({}) == own
    assert environment.messages({})[0] is not own[0]


def test_what_must_be_defined_says_so():
    environment = Environment()
    for attempt in (
        lambda: environment.train_item(0),
        lambda: environment.format_prompt({}),
        lambda: environment.compute_reward({}, None, None),
    ):
        with pytest.raises(NotImplementedError, match="Environment must define"):
            attempt()
    assert list(environment.eval_items()) == []
    assert list(environment.demonstrate({}, 0)) == []


def test_call_takes_both_kinds_of_function():
    async def later(x):
        return x + 1

    async def run():
        assert await call(later, 1) == 2
        assert await call(lambda x: later(x), 1) == 2
        assert await call(threading.current_thread) is not threading.current_thread()

    asyncio.run(run())


@pytest.fixture
def envs(tmp_path, monkeypatch):
    """A folder `envs` with environments in it, in place of the project's."""
    for name, source in {
        "good": "from hermes_jax.rollout.environment import Environment\nclass Good(Environment):\n"
        "    def __init__(self, settings=None):\n        super().__init__(settings)\n",
        "plain": "from hermes_jax.rollout.environment import Environment\nclass Plain(Environment):\n    pass\n",
        "empty": "from hermes_jax.rollout.environment import Environment\n",
        "broken": "import not_there\n",
    }.items():
        (tmp_path / "envs" / name).mkdir(parents=True)
        (tmp_path / "envs" / name / "env.py").write_text(source)
        (tmp_path / "envs" / name / "__init__.py").touch()
    (tmp_path / "envs" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = [name for name in sys.modules if name.split(".")[0] == "envs"]
    for name in mine:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "envs"]:
        del sys.modules[name]


@pytest.mark.usefixtures("envs")
def test_environments_are_found_by_name():
    environment = load_environment("good", {"level": 3})
    assert type(environment).__name__ == "Good"
    assert (environment.name, environment.settings) == ("good", {"level": 3})
    assert load_environment("plain").settings == {}
    with pytest.raises(ValueError, match="environment plain takes no options, got level"):
        load_environment("plain", {"level": 3})
    known = r"no envs/god/env\.py \(did you mean good\?\); environments: broken, empty, good, plain"
    with pytest.raises(ValueError, match=known):
        load_environment("god")
    with pytest.raises(ValueError, match="one subclass of Environment, it defines none"):
        load_environment("empty")
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        load_environment("broken")
