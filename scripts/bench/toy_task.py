"""The toy task of the end-to-end benchmark, the same for every side; standard library only."""

from __future__ import annotations

import re

PROMPTS = 4
REPLIES = 4
NEW_TOKENS = 64
TEMPERATURE = 1.0

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def bound(index: int) -> int:
    """The N of task `index`."""
    return 10 + 7 * index % 90


def prompt(index: int) -> str:
    """What the policy is asked."""
    return f"Reply with a number larger than {bound(index)}."


def reward(reply: str, larger_than: int) -> float:
    """1 if the first number of the reply is larger, 0.2 if there is one, else 0; shorter replies get a little more.

    The last part keeps the rewards of a group from being equal, which would leave nothing to learn.
    """
    found = _NUMBER.search(reply)
    right = 0.0 if found is None else 1.0 if float(found[0]) > larger_than else 0.2
    return right - 0.0005 * len(reply)
