"""Calibration by regression on parameters and plan features, against closed forms."""

import numpy as np
import pytest

from autotune.search.residual import BLOCK, Evidence, Floats, fit

PRIOR = np.diag([0.3**2, 0.2**2])


def evidence(points: Floats, slopes: Floats, residuals: Floats, noise: float) -> Evidence:
    return Evidence(points=points, slopes=slopes, residuals=residuals, noise_sd=np.full(len(residuals), noise))


def test_without_observations_it_is_the_prior() -> None:
    found = fit(evidence(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), 0.1), PRIOR)
    mean, sd = found.predict(np.zeros((3, 2)), np.tile([1.0, 0.5], (3, 1)))
    assert np.all(mean == 0.0)
    assert sd == pytest.approx(np.sqrt(0.3**2 + 0.25 * 0.2**2 + 0.09**2))
    assert np.all(found.parameters == 0.0)
    assert np.all(found.covariance == PRIOR)


def test_one_observation_moves_only_what_it_exercises() -> None:
    """For one point y: parameter = prior·slope / (slope²·prior + amplitude² + noise²) * y."""
    found = fit(evidence(np.zeros((1, 1)), np.array([[1.0, 0.0]]), np.array([0.2]), 0.1), PRIOR)
    total = 0.3**2 + found.amplitude**2 + 0.1**2 + 1e-9
    assert found.parameters == pytest.approx([0.3**2 / total * 0.2, 0.0])
    assert found.covariance[1, 1] == 0.2**2
    assert found.covariance[0, 0] < 0.3**2


def test_parameters_are_recovered_from_trials_that_tell_them_apart() -> None:
    rng = np.random.default_rng(0)
    slopes = rng.uniform(0, 1, size=(40, 2))
    found = fit(evidence(rng.uniform(0, 4, (40, 2)), slopes, slopes @ [0.25, -0.15], 0.01), PRIOR)
    assert found.parameters == pytest.approx([0.25, -0.15], abs=0.03)


def test_a_residual_that_plans_alike_share_is_predicted_between_points() -> None:
    grid = np.linspace(0, 4, 9)[:, None]
    found = fit(evidence(grid, np.zeros((9, 2)), 0.2 * np.sin(grid[:, 0]), 0.01), PRIOR)
    mean, _ = found.predict(np.array([[1.75], [3.25]]), np.zeros((2, 2)))
    assert mean == pytest.approx(0.2 * np.sin([1.75, 3.25]), abs=0.03)


def test_one_wild_reading_does_not_move_the_others() -> None:
    """A trial that a passing fault made ten times slower, among seven sound ones."""
    grid = np.linspace(0, 3.5, 8)[:, None]
    residuals = np.array([0.0, 0.0, 0.0, 2.3, 0.0, 0.0, 0.0, 0.0])
    found = fit(evidence(grid, np.ones((8, 2)), residuals, 0.02), PRIOR)
    mean, _ = found.predict(np.array([[2.75]]), np.ones((1, 2)))
    assert abs(float(mean[0]) + found.parameters.sum()) < 0.1


def test_plans_that_share_nothing_teach_the_parameters_only() -> None:
    grid, slopes = np.linspace(0, 4, 9)[:, None], np.tile([[1.0, 0.0]], (9, 1))
    found = fit(evidence(grid, slopes, np.full(9, 0.2), 0.01), PRIOR, 0.0)
    assert found.parameters == pytest.approx([0.2, 0.0], abs=0.01)
    alike, spread = found.predict(grid, slopes)
    assert alike.tolist() == [0.0] * 9
    assert spread.max() < 0.01


def test_many_plans_are_predicted_as_each_alone() -> None:
    rng = np.random.default_rng(0)
    found = fit(evidence(rng.uniform(0, 4, (10, 2)), rng.uniform(0, 1, (10, 2)), rng.normal(0, 0.2, 10), 0.05), PRIOR)
    points, slopes = rng.uniform(0, 4, (2 * BLOCK + 3, 2)), rng.uniform(0, 1, (2 * BLOCK + 3, 2))
    mean, spread = found.predict(points, slopes)
    assert np.ptp(mean) > 0.01
    assert found.alike(points) == pytest.approx(mean)
    for i in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 2):
        alone = found.predict(points[i : i + 1], slopes[i : i + 1])
        assert (mean[i], spread[i]) == (pytest.approx(alone[0][0]), pytest.approx(alone[1][0]))
