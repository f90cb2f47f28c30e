"""Terminal tasks made from words and numbers, and the scripted, imperfect ways of doing them.

Every task is a pure function of (split, index). Held out are *combinations*: each word, number and wording of a
held-out task also occurs in training, but a hash of the combination puts it on one side only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

# Where a usual mistake leaves the expected text in the target, half the reward for it would be a place to settle in:
# `mv` for `cp`, `cp` for `mv`, and `wc -l FILE`, which prints the name too.
SMALL_PARTIAL = 0.1

WORDS = (
    "amber apple arrow aspen badge basin beach birch blade bloom board brick brook brush cabin camel candle canyon "
    "castle cedar chalk cherry cliff cloud clover coast copper coral cotton crane creek crown daisy delta desert "
    "eagle ember engine falcon feather fern field flame forest fossil garden ginger glacier grape gravel harbor hazel "
    "heron honey island ivory jade jungle kettle ladder lagoon lantern lemon lilac linen lotus maple marble meadow "
    "melon mirror moss nectar oak ocean olive orchid otter palm pearl pepper pine plum quartz raven reed river "
    "saffron willow"
).split()

FAMILIES = ("write", "write", "numbers", "sum", "copy", "rename", "count")  # "write" has double weight
HELD_OUT_SHARE = 5  # one combination in five is held out


@dataclass(frozen=True)
class Task:
    """One task and how it is checked.

    Args:
        family: kind of task.
        prompt: what the user asks.
        target: file (in the sandbox's work directory) that is read for the reward.
        expected: text that the target must hold, compared without surrounding white space.
        partial: reward when the target contains the expected text, but something about the task is wrong.
        files: files that exist before the episode starts.
        must_exist, must_not_exist: further conditions of full reward.
        numbers: the numbers of the task, in order (for the script).
    """

    family: str
    prompt: str
    target: str
    expected: str
    partial: float = 0.5
    files: Mapping[str, str] = field(default_factory=dict)
    must_exist: str | None = None
    must_not_exist: str | None = None
    numbers: tuple[int, ...] = ()


def make_task(split: str, index: int) -> Task:
    """The task number `index` of a split ("train" or "held_out")."""
    if split not in ("train", "held_out"):
        raise ValueError(f"split must be 'train' or 'held_out', got {split!r}")
    rng = np.random.default_rng([index, 0 if split == "train" else 1])
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    while True:
        combination, task = _MAKERS[family](rng)
        if is_held_out(f"{family}/{combination}") == (split == "held_out"):
            return task


def is_held_out(combination: str) -> bool:
    """On which side of the split a combination of words and numbers lies."""
    return hashlib.blake2b(combination.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def _word(rng: np.random.Generator) -> str:
    return WORDS[int(rng.integers(len(WORDS)))]


def _file(rng: np.random.Generator) -> str:
    return f"{_word(rng)}{int(rng.integers(10))}.txt"


def _two_files(rng: np.random.Generator) -> tuple[str, str]:
    first, second = _file(rng), _file(rng)
    return (first, second) if first != second else _two_files(rng)


def _write(rng: np.random.Generator) -> tuple[str, Task]:
    text, target = f"{_word(rng)} {_word(rng)}", _file(rng)
    return text, Task("write", f"Write {text} to {target}", target, text)


def _numbers(rng: np.random.Generator) -> tuple[str, Task]:
    n, target = int(rng.integers(3, 31)), _file(rng)
    expected = "\n".join(str(i) for i in range(1, n + 1))
    prompt = f"Put the numbers 1 to {n}, one per line, in {target}"
    return f"{n} {target}", Task("numbers", prompt, target, expected, numbers=(n,))


def _sum(rng: np.random.Generator) -> tuple[str, Task]:
    x, y, target = int(rng.integers(10, 100)), int(rng.integers(10, 100)), _file(rng)
    return f"{x} {y}", Task("sum", f"Put the sum of {x} and {y} in {target}", target, str(x + y), numbers=(x, y))


def _copy(rng: np.random.Generator) -> tuple[str, Task]:
    source, target = _two_files(rng)
    text = f"{_word(rng)} {_word(rng)}"
    task = Task(
        "copy", f"Copy {source} to {target}", target, text, SMALL_PARTIAL, files={source: text}, must_exist=source
    )
    return f"{source} {target}", task


def _rename(rng: np.random.Generator) -> tuple[str, Task]:
    source, target = _two_files(rng)
    text = f"{_word(rng)} {_word(rng)}"
    prompt = f"Rename {source} to {target}"
    task = Task("rename", prompt, target, text, SMALL_PARTIAL, files={source: text}, must_not_exist=source)
    return f"{source} {target}", task


def _count(rng: np.random.Generator) -> tuple[str, Task]:
    source, target = _two_files(rng)
    lines = int(rng.integers(2, 10))
    text = "".join(f"{_word(rng)}\n" for _ in range(lines))
    prompt = f"Count the lines of {source} into {target}"
    task = Task("count", prompt, target, str(lines), SMALL_PARTIAL, files={source: text}, numbers=(lines,))
    return f"{source} {target}", task


_MAKERS: dict[str, Callable[[np.random.Generator], tuple[str, Task]]] = {
    "write": _write,
    "numbers": _numbers,
    "sum": _sum,
    "copy": _copy,
    "rename": _rename,
    "count": _count,
}

_SHARES = {  # right, the family's dominant mistake; the rest are other mistakes
    "write": (0.50, 0.30),
    "rename": (0.50, 0.30),
    "count": (0.50, 0.30),
    "sum": (0.32, 0.56),
    "copy": (0.32, 0.56),
    "numbers": (0.32, 0.56),
}


def scripted_command(task: Task, rng: np.random.Generator) -> tuple[str, str]:
    """A shell command that a beginner would write for the task, and what the terminal tool answers to it."""
    right, dominant = _SHARES[task.family]
    draw = rng.random()
    if draw < right:
        return _right(task, rng), "(no output)"
    if draw < right + dominant:
        return _dominant_mistake(task)
    return _other_mistake(task), "(no output)"


def _right(task: Task, rng: np.random.Generator) -> str:
    source = next(iter(task.files), "")
    match task.family:
        case "write":
            return f"echo {task.expected} > {task.target}"
        case "numbers":
            return f"seq 1 {task.numbers[0]} > {task.target}"
        case "sum":
            x, y = task.numbers
            form = f"expr {x} + {y}" if rng.random() < 0.5 else f"echo $(({x} + {y}))"
            return f"{form} > {task.target}"
        case "copy":
            return f"cp {source} {task.target}"
        case "rename":
            return f"mv {source} {task.target}"
        case _:
            return f"wc -l < {source} > {task.target}"


def _dominant_mistake(task: Task) -> tuple[str, str]:
    source = next(iter(task.files), "")
    match task.family:
        case "write":
            return f"echo {task.expected}", task.expected
        case "numbers":
            return f"seq 0 {task.numbers[0]} > {task.target}", "(no output)"
        case "sum":
            return f"echo {task.numbers[0]} + {task.numbers[1]} > {task.target}", "(no output)"
        case "copy":
            return f"cat {source}", task.expected
        case "rename":
            return f"cp {source} {task.target}", "(no output)"
        case _:
            return f"wc -l {source} > {task.target}", "(no output)"


def _other_mistake(task: Task) -> str:
    source = next(iter(task.files), "")
    match task.family:
        case "write":
            return f"echo {task.expected.split()[0]} > {task.target}"
        case "numbers":
            return f"echo {task.numbers[0]} > {task.target}"
        case "sum":
            return f"echo {task.numbers[0]} > {task.target}"
        case "copy":
            return f"touch {task.target}"
        case "rename":
            return f"touch {task.target}"
        case _:
            return f"cp {source} {task.target}"
