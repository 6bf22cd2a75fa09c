"""The split depends on the id, the seed and the percentage, and on nothing else."""

from __future__ import annotations

from mtp.data.split import is_held_out


def test_known_answers():
    # Frozen: a change would move conversations of published heads across the split.
    assert [i for i in range(60) if is_held_out(f"chat-{i}")] == []
    assert is_held_out("anything", percent=100) and not is_held_out("anything", percent=0)


def test_share_seed_and_growth():
    ids = [f"conversation {number}" for number in range(4000)]
    five = {name for name in ids if is_held_out(name, percent=5)}
    ten = {name for name in ids if is_held_out(name, percent=10)}
    assert 0.035 < len(five) / len(ids) < 0.065
    assert five < ten
    assert five != {name for name in ids if is_held_out(name, percent=5, seed=1)}
