"""Ranks, workers, two tuners, the API, the beat and both servers, killed at random moments of tunings."""

from __future__ import annotations

import pytest
from crew import Crew, assert_gone
from kills import Onslaught
from supervisor import WITH_TWO_TUNERS, Supervisor

KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_random_moments_leave_only_the_truth(crew: Crew) -> None:
    supervisor = Supervisor(crew, WITH_TWO_TUNERS)
    supervisor.start()
    record = Onslaught(crew, supervisor, kills=KILLS, seed=1).run()
    assert sum(record.kills.values()) == KILLS
    assert record.states.keys() <= {"done", "failed"}
    assert_gone([process for process in supervisor.seen if process not in supervisor.living()])
    assert supervisor.strays() == []
    for name in ("api", "tuner-2"):
        crew.part.pop(name).end()
