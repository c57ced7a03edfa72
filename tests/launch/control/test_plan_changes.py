"""The launcher's side of a change of the plan: all ranks or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torsh_distributed.launch.control import plan_changes
from torsh_distributed.launch.control.plan_changes import ChangeWord, PlanChanges
from torsh_distributed.launch.local.loop import Loop


class Lines:
    """What the launcher prints."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(f"warning: {text}")


def changes(loop: Loop, lines: Lines, told: list[dict[str, Any]], **options: Any) -> PlanChanges:
    settled = options.get("is_settled", lambda: True)
    output: Any = lines
    return PlanChanges(loop, output, ranks=lambda: (0, 1), is_settled=settled, tell=told.append)


def test_ranks_change_where_the_last_of_them_could_stop() -> None:
    lines, told = Lines(), list[dict[str, Any]]()
    with Loop() as loop:
        plan = changes(loop, lines, told)
        plan.want('{"a": 1}', "alert hot")
        plan.want('{"b": 2}', "alert cold")
        assert told == [{"number": 1, "what": "prepare"}], "one at a time"
        plan.said(0, ChangeWord(1, "ready", 5, 0, ""))
        plan.said(7, ChangeWord(1, "ready", 99, 0, ""))
        assert len(told) == 1
        plan.said(1, ChangeWord(1, "ready", 6, 0, ""))
        assert told[1] == {"number": 1, "what": "commit", "at": 6, "change": '{"a": 1}', "reason": "alert hot"}
        plan.said(0, ChangeWord(1, "changed", 0, 6, "a = 1"))
        assert lines.said == []
        plan.said(1, ChangeWord(1, "changed", 0, 6, "a = 1"))
        assert lines.said == ["the plan changed after step 6: a = 1 (alert hot)"]
        assert told[2] == {"number": 2, "what": "prepare"}
        plan.cancel("the members of the world change")
        assert told[3] == {"number": 2, "what": "cancel"}
        assert lines.said[1] == "warning: the plan does not change (alert cold): the members of the world change"
        plan.close()


def test_a_rank_that_does_not_answer_is_a_reason_to_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_changes, "_ANSWER_S", 0.01)
    monkeypatch.setattr(plan_changes, "_RETRY_S", 0.01)
    lines, told = Lines(), list[dict[str, Any]]()
    settled = iter([False, False, True, True])
    with Loop() as loop:
        plan = changes(loop, lines, told, is_settled=lambda: next(settled))
        plan.want("{}", "alert hot")
        assert told == [], "not before the world has settled"

        def answer() -> None:
            if told:
                plan.said(0, ChangeWord(1, "ready", 5, 0, ""))
            if lines.said:
                loop.stop(0)
            else:
                loop.call_later(0.001, answer)

        answer()
        loop.run()
        plan.close()
    assert [one["what"] for one in told] == ["prepare", "cancel"]
    assert "rank 1 did not answer" in lines.said[0]


def test_ranks_hold_before_the_same_update_until_they_are_released() -> None:
    lines, told = Lines(), list[dict[str, Any]]()
    with Loop() as loop:
        plan = changes(loop, lines, told)
        plan.hold(60.0, "500 g/kWh")
        plan.hold(60.0, "500 g/kWh")  # asked for with every reading
        plan.said(0, ChangeWord(1, "ready", 5, 0, ""))
        plan.said(1, ChangeWord(1, "ready", 6, 0, ""))
        assert [one["what"] for one in told] == ["prepare", "commit"]
        assert json.loads(told[1]["change"]) == {"hold_s": 60.0}
        # Released before all are there: who comes later does not stop.
        assert plan.release()
        assert told[2] == {"number": 1, "what": "release"}
        assert not plan.release()
        for rank in (0, 1):
            plan.said(rank, ChangeWord(1, "changed", 0, 6, "a hold"))
        assert lines.said == ["training holds after step 6 (500 g/kWh)"]
        plan.hold(60.0, "again")
        assert plan.release(), "it was not agreed on yet"
        assert told[-1] == {"number": 2, "what": "cancel"}
        plan.close()
