"""Seeds by place."""

from __future__ import annotations

import itertools

import pytest
from scipy import stats

from hermes_jax.data.seeds import SEED_BITS, fold_seed


def test_the_same_in_every_process():
    assert fold_seed(7, 3, "task", 2, 0) == 5255482949509002741
    assert fold_seed() == fold_seed()


def test_other_parts_other_seeds():
    parts = [
        (1, 23),
        (12, 3),
        (123,),
        ("1", 23),
        (1, "23"),
        ("12", "3"),
        ("123",),
        (1, 2, 3),
        (),
        ("",),
        ("", ""),
        (-1, 23),
    ]
    assert len({fold_seed(*p) for p in parts}) == len(parts)
    assert len({fold_seed(*p) for p in itertools.product(range(20), repeat=3)}) == 8000


def test_bits_are_even():
    seeds = [fold_seed(0, i) for i in range(4096)]
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)
    for bit in range(SEED_BITS):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert stats.binomtest(ones, len(seeds)).pvalue > 1e-6


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"integers and strings, got 1\.5"):
        fold_seed(1, 1.5)
