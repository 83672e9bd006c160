"""Transfers of other tunings as the prior of this one."""

import numpy as np
import pytest

from autotune.search.residual import carried_prior

PRIOR = np.diag([0.3**2, 0.2**2])


def test_without_transfers_the_prior_stays() -> None:
    mean, covariance = carried_prior(np.zeros((0, 2)), np.zeros(0), np.zeros(0), PRIOR)
    assert np.all(mean == 0.0)
    assert np.array_equal(covariance, PRIOR)


def test_many_transfers_find_the_parameters_and_leave_doubt() -> None:
    rng = np.random.default_rng(0)
    slopes = rng.uniform(0, 1, (200, 2))
    truth = np.array([0.4, -0.2])
    mean, covariance = carried_prior(slopes, slopes @ truth, np.full(200, 0.1), PRIOR)
    assert mean == pytest.approx(truth, abs=0.02)
    assert np.sqrt(np.diag(covariance)) == pytest.approx([0.15, 0.1], rel=0.05)  # half of the prior's stays


def test_one_lesson_by_hand() -> None:
    """Slopes 1 and 0.5, noise 0.1: the variance of what it shows is 0.09 + 0.25 * 0.04 + 0.01 = 0.11, of which 0.09 and
    0.5 * 0.04 = 0.02 come with the parameters. A quarter of the prior's variance is doubt between two tunings. Three
    standard deviations off at the mean that follows, it would count less: here it is 0.02 / 0.1 = 0.2 of one."""
    mean, covariance = carried_prior(np.array([[1.0, 0.5]]), np.array([0.22]), np.array([0.1]), PRIOR)
    assert mean == pytest.approx([0.18, 0.04])
    left = [[0.09 - 0.09**2 / 0.11, -0.09 * 0.02 / 0.11], [-0.09 * 0.02 / 0.11, 0.04 - 0.02**2 / 0.11]]
    assert covariance == pytest.approx(np.array(left) + PRIOR / 4.0)


def test_a_wild_transfer_changes_little() -> None:
    residuals = np.full(20, 0.1)
    residuals[7] = 3.0
    mean, _ = carried_prior(np.tile([1.0, 0.0], (20, 1)), residuals, np.full(20, 0.1), PRIOR)
    assert mean[0] == pytest.approx(0.1, abs=0.03)
    assert mean[1] == 0.0
