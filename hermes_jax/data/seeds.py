"""Seeds by place, not by history: the same (run, step, task, member, turn) always gives the same number."""

from __future__ import annotations

import hashlib

SEED_BITS = 63


def fold_seed(*parts: int | str) -> int:
    """One seed from what names the place where it is used, as in `fold_seed(run_seed, step, task_id, member, turn)`.

    Stable across processes, machines and Python versions (unlike `hash`), and different parts give different seeds for
    all practical purposes: `fold_seed(1, 23)`, `fold_seed(12, 3)` and `fold_seed("1", 23)` have nothing in common.

    Args:
        parts: integers of any size, and strings.

    Returns:
        An integer in [0, 2**63): it fits a signed 64-bit field.

    Raises:
        TypeError: a part is neither an integer nor a string.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if not isinstance(part, int | str):
            raise TypeError(f"a seed is folded from integers and strings, got {part!r} in {parts!r}")
        kind, value = ("s", part) if isinstance(part, str) else ("i", str(int(part)))
        data = value.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest(), "big") >> (64 - SEED_BITS)
