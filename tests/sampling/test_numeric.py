"""Numbers bounded by a hyperbolic tangent, against float64."""

from __future__ import annotations

import numpy as np

from ngramspec.sampling.numeric import soft_cap


def test_what_is_capped_is_near_tanh_and_keeps_what_is_no_number() -> None:
    cap = np.float32(30)
    x = np.concatenate([np.linspace(-200, 200, 999), [0.0, 1e-30, 1e30, -1e30, np.inf, -np.inf]]).astype(np.float32)
    got = np.array([soft_cap(each, cap) for each in x])
    np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), atol=5e-6)
    assert np.isnan(soft_cap(np.float32(np.nan), cap))
