"""Ranks, workers, the tuner, the API and the beat, killed at random moments of tunings."""

from __future__ import annotations

import pytest
from crew import Crew, assert_gone
from kills import Onslaught
from supervisor import Supervisor

KILLS = 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_random_moments_leave_only_the_truth(crew: Crew) -> None:
    supervisor = Supervisor(crew)
    supervisor.start()
    record = Onslaught(crew, supervisor, kills=KILLS, seed=1).run()
    assert sum(record.kills.values()) == KILLS
    assert record.states.keys() <= {"done", "failed"}
    assert_gone([process for process in supervisor.seen if process not in supervisor.living()])
    assert supervisor.strays() == []
    crew.part.pop("api").end()
