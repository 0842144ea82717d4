"""The gap between a sampling server and the trained model: a figure, a weight of advantages, or an error."""

import numpy as np
import pytest

from forge_algos import GRPOSettings, RLOOSettings, RolloutError
from forge_algos.online._sampler_gap import gap_weights

SERVED = {"sampler": "vllm", "sampler_url": "http://127.0.0.1:1"}
LENGTHS = np.array([3, 1, 2])
SERVER = np.array([-1.0, -2.0, -0.5, -1.5, -1.0, -1.0], np.float32)
GAP = np.array([0.1, -0.2, 0.3, 0.9, -0.1, 0.05], np.float32)


def test_a_small_gap_weighs_nothing():
    """At the limit or below it the advantages stay as they are."""
    settings = GRPOSettings(**SERVED, tis_above=0.06)
    assert gap_weights(settings, SERVER + np.float32(0.05), SERVER, LENGTHS) is None


@pytest.mark.parametrize("cap", [1.2, 2.0])
def test_each_token_has_its_truncated_ratio(cap):
    """A weight is min(p/q, cap) of the token, in whichever direction the two differ."""
    settings = GRPOSettings(**SERVED, tis_cap=cap, max_sampler_gap=1.0)
    found = gap_weights(settings, SERVER + GAP, SERVER, LENGTHS)
    np.testing.assert_allclose(found, [min(np.exp(float(gap)), cap) for gap in GAP], rtol=1e-5)


@pytest.mark.parametrize("settings", [GRPOSettings, RLOOSettings])
def test_a_completion_with_one_ratio_has_one_weight(settings):
    """For gspo and rloo it is min(P/Q, cap) of the whole completion."""
    own = {"loss_type": "gspo"} if settings is GRPOSettings else {}
    found = gap_weights(settings(**SERVED, **own, max_sampler_gap=1.0), SERVER + GAP, SERVER, LENGTHS)
    sums = [float(part.sum()) for part in np.split(GAP, [3, 4])]
    np.testing.assert_allclose(found, np.repeat([min(np.exp(s), 2.0) for s in sums], LENGTHS), rtol=1e-5)


def test_tokens_that_were_not_measured_count_for_nothing():
    """Completions that teach nothing have no log-probability of the trained model."""
    old = SERVER + GAP
    old[3] = np.nan
    found = gap_weights(GRPOSettings(**SERVED), old, SERVER, LENGTHS)
    assert np.isfinite(found).all()
    assert gap_weights(GRPOSettings(**SERVED), np.full(6, np.nan, np.float32), SERVER, LENGTHS) is None


def test_what_no_weight_mends_is_an_error():
    """A gap above the limit, and a token for which the server gave no number."""
    with pytest.raises(RolloutError, match=r"0.5 nats a token .* max_sampler_gap=0.2: it computes with other weights"):
        gap_weights(GRPOSettings(**SERVED), SERVER - np.float32(0.5), SERVER, LENGTHS)
    with pytest.raises(RolloutError, match="no log-probability for some"):
        gap_weights(GRPOSettings(**SERVED), SERVER, np.append(SERVER[:5], np.float32(np.nan)), LENGTHS)
