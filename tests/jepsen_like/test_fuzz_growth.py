"""The fuzzer tells a node that grows from one that grew."""

from __future__ import annotations

import pytest

from jepsen_like.fuzz.run import GROWTH_S, growth

MIB = 1 << 20
LEVEL = [54 * MIB + min(second, 120) * MIB // 10 for second in range(600)]
LEAK = [54 * MIB + second * MIB // 60 for second in range(600)]


@pytest.mark.parametrize(
    ("sizes", "seconds", "told"),
    [
        (LEVEL, 600.0, []),
        (LEAK, 600.0, ["node 1 grows by 1.0 MiB a minute, to 63 MiB"]),
        (LEAK[:200], 200.0, []),
        (LEAK[:3], GROWTH_S, []),
    ],
    ids=["level", "leak", "too short to say", "hardly looked at"],
)
def test_growth(sizes: list[int], seconds: float, told: list[str]) -> None:
    assert list(growth({1: sizes}, seconds)) == told
