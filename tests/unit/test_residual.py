"""The Gaussian process over log residuals, against closed forms."""

import numpy as np
import pytest

from autotune.search.residual import OFFSET_SD, PRIOR_AMPLITUDE, posterior


def test_without_observations_it_is_the_prior() -> None:
    found = posterior(np.zeros((0, 2)), np.zeros(0), np.zeros(0), np.zeros((3, 2)))
    assert np.all(found.mean == 0.0)
    assert found.sd == pytest.approx(np.hypot(OFFSET_SD, PRIOR_AMPLITUDE))


def test_one_observation_moves_every_plan_by_the_shared_factor() -> None:
    """For one point y at x: mean(x') = k(x', x) / (k(x, x) + noise²) * y."""
    points, at = np.array([[0.0]]), np.array([[0.0], [100.0]])
    found = posterior(points, np.array([0.5]), np.array([0.1]), at)
    total = OFFSET_SD**2 + found.amplitude**2 + 0.1**2 + 1e-9
    assert found.mean[0] == pytest.approx((OFFSET_SD**2 + found.amplitude**2) / total * 0.5)
    assert found.mean[1] == pytest.approx(OFFSET_SD**2 / total * 0.5)
    assert found.sd[0] < found.sd[1]


def test_observed_points_are_reproduced_within_their_noise() -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 3, size=(30, 2))
    truth = 0.3 + 0.2 * np.sin(points[:, 0])
    found = posterior(points, truth, np.full(30, 0.01), points)
    assert np.max(np.abs(found.mean - truth)) < 0.03


def test_a_smooth_residual_is_predicted_between_points() -> None:
    grid = np.linspace(0, 4, 9)[:, None]
    truth = 0.2 * grid[:, 0]
    middle = np.array([[1.75], [3.25]])
    found = posterior(grid, truth, np.full(9, 0.01), middle)
    assert found.mean == pytest.approx(0.2 * middle[:, 0], abs=0.03)
