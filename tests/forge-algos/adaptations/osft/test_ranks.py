"""Free share and importance → number of free directions of each target."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from forge_algos import AdapterError, AdapterSettings
from forge_algos.adaptations.osft._ranks import free_ranks

NAMES = ["layers.0.attn.q", "layers.0.mlp.up", "layers.1.attn.q", "layers.1.mlp.up"]
SHAPES = dict(zip(NAMES, [(576, 576), (1536, 576), (576, 576), (1536, 576)], strict=True))


def osft(**settings):
    return AdapterSettings(adapter="osft", **settings)


@pytest.mark.parametrize(
    ("d", "ratio", "free"),
    [
        (576, 0.25, 144),
        (10, 0.1, 1),
        (30, 0.1, 3),
        (100, 0.29, 29),
        (6, 0.25, 2),
        (2, 0.25, 1),
        (3, 0.1, 0),
        (7, 1, 7),
        (7, 0, 0),
    ],
)
def test_uniform_is_the_nearest_whole_number(d, ratio, free):
    """r is the decimal share of d, halves rounded up; in binary, 0.29 of 100 is below 29."""
    assert free_ranks({"q": (d, d + 5)}, osft(unfreeze_rank_ratio=ratio)) == {"q": free}


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=8),
    ratio=st.integers(0, 1000).map(lambda n: n / 1000),
    weights=st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 100.0]), min_size=8, max_size=8),
    rank=st.sampled_from(["uniform", "adaptive"]),
)
def test_the_mean_share_is_the_ratio(shapes, ratio, weights, rank):
    """The mean of the free shares over the targets is the ratio, for any importance.
    But for rounding to whole numbers; 0 is none, 1 all.
    """
    named = {f"t{i}": shape for i, shape in enumerate(shapes)}
    free = free_ranks(named, osft(unfreeze_rank_ratio=ratio, osft_rank=rank), dict(zip(named, weights, strict=False)))
    assert all(0 <= free[name] <= min(shape) for name, shape in named.items())
    exact = Fraction(str(ratio))
    off = sum(Fraction(free[name], min(shape)) - exact for name, shape in named.items())
    assert abs(off) <= sum(Fraction(1, 2 * min(shape)) for shape in shapes)
    if ratio in (0, 1):
        assert all(free[name] == min(shape) * ratio for name, shape in named.items())


def test_adaptive_is_the_papers_formula():
    """Where no share is above 1: protected = mrr + I (trr − mrr), mrr 0.1, trr = 1 − ratio."""
    importance = dict(zip(NAMES, [0.5, 0.0, 1.3, 2.2], strict=True))
    free = free_ranks(SHAPES, osft(osft_rank="adaptive", unfreeze_rank_ratio=0.6), importance)
    assert free == {name: round(576 * (1 - (0.1 + i * (0.4 - 0.1)))) for name, i in importance.items()}


def test_adaptive_least_share_follows_a_high_ratio():
    """mrr is never above trr: at ratio 0.95 all targets protect the same share."""
    importance = dict(zip(NAMES, [0.5, 0.0, 1.3, 2.2], strict=True))
    assert set(free_ranks(SHAPES, osft(osft_rank="adaptive", unfreeze_rank_ratio=0.95), importance).values()) == {547}


def test_adaptive_gives_what_is_cut_to_the_others():
    """A share above 1 becomes 1, and the others rise by importance until the mean is the ratio."""
    importance = dict(zip(NAMES, [0.4, 0.4, 0.8, 2.4], strict=True))
    free = free_ranks(SHAPES, osft(osft_rank="adaptive", unfreeze_rank_ratio=0.25), importance)
    # 4 · 0.75 − 1 − 3 · 0.1 = 1.7 is above the least share, and is divided as 0.4 : 0.4 : 0.8; 0.1 + 0.85 stays below 1.
    shares = [0.1 + 1.7 / 4, 0.1 + 1.7 / 4, 0.1 + 1.7 / 2, 1]
    assert list(free.values()) == [round(576 * (1 - share)) for share in shares]


def test_pattern_overrides_and_the_last_entry_counts():
    """Names, ends of names and patterns set the number; of several the last applies."""
    settings = osft(rank_pattern={"attn.q": 7, "layers.1.*": 0, "layers.1.mlp.up": 576})
    assert list(free_ranks(SHAPES, settings).values()) == [7, 144, 0, 576]


@pytest.mark.parametrize(
    ("settings", "importance", "message"),
    [
        ({"rank_pattern": ["q=577"]}, None, r"'q=577': layers.0.attn.q is \[576, 576\] and has 576 directions"),
        ({"rank_pattern": ["upp=5"]}, None, "upp matches no target. Did you mean up\\? Targets here: q, up"),
        ({"osft_rank": "adaptive"}, None, "needs the importance of each target"),
        ({"osft_rank": "adaptive"}, {"layers.0.attn.q": 1.0}, r"layers.0.mlp.up is not there \(3 of 4 targets\)"),
        ({"osft_rank": "adaptive"}, dict.fromkeys(NAMES, -1.0), "is -1.0, which is no finite number"),
        ({"osft_rank": "adaptive"}, dict.fromkeys(NAMES, float("nan")), "is nan, which is no finite number"),
    ],
)
def test_bad_input_is_named(settings, importance, message):
    """Impossible values are refused with the target's name, the value and the valid range."""
    with pytest.raises(AdapterError, match=message):
        free_ranks(SHAPES, osft(**settings), importance)
