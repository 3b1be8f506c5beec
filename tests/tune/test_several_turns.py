"""Whose turn it is and for how long, where studies share a budget: real parts and summaries, no Ray and no process."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock

from tinyllm_ray.clock import Deadline, format_duration
from tinyllm_ray.config import load
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import Fate, TrialRecord
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.space import load_space
from tinyllm_ray.tune import claim as claims
from tinyllm_ray.tune.channel import Channel, Lines
from tinyllm_ray.tune.folder import begin_study
from tinyllm_ray.tune.request import StudyRequest, check_request
from tinyllm_ray.tune.several import Part, Whole, _size, open_part, run_in_turn, why_over
from tinyllm_ray.tune.several_folder import Standing, begin_whole, read_whole
from tinyllm_ray.tune.several_session import PartChannel, SeveralSession

NAMES = ["small", "middle", "large"]
BUDGET_SECONDS = 3000.0


@dataclass
class Turns:
    """Three recipes of nano's shape with one, two and three layers; `spend` is what each study takes of its share."""

    whole: Whole
    clock: FakeClock
    lines: Lines
    said: list[str]
    spend: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, float, int]] = field(default_factory=list)
    """Name, share in seconds and records of others it began with."""

    def study(self, request: StudyRequest, asked: Any, earlier: Any, out: Path, part: Part, *rest: Any) -> int:
        deadline, _, learned = rest
        name = out.name
        self.calls.append((name, request.budget_seconds, sum(len(study.records) for study in learned)))
        assert deadline.remaining() <= request.budget_seconds
        if name in self.faults:
            raise ConfigError(self.faults[name])
        took = min(self.spend.get(name, 100.0), request.budget_seconds)
        self.clock.advance(took)
        part.channel.send("record", record=_record(part).model_dump(mode="json"))
        out.mkdir(exist_ok=True)
        exhausted = took == request.budget_seconds
        summary = {
            "study": name,
            "selected": {"candidate": "c1", "targets_per_second": 2e3},
            "baseline": {"candidate": "c1" if name == "small" else "c2"},
            "speedup": {"ratio": 1.0 if name == "small" else 1.1, "verified": False},
            "candidates": [{"candidate": "c1", "label": "mb8 eager", "seconds": 20.0}],
            "ended": self.ends.get(name) or ("budget: more to do" if exhausted else "space exhausted"),
            "budget_exhausted": exhausted,
        }
        (out / "summary.json").write_text(json.dumps(summary))
        return 0

    def run(self, *states: str) -> list[str]:
        for part, state in zip(self.whole.parts, states, strict=False):
            part.standing.state = state  # type: ignore[assignment]
        run_in_turn(self.whole)
        return [part.standing.state for part in self.whole.parts]

    @property
    def ran(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def _record(part: Part) -> TrialRecord:
    assert part.fitted is not None
    return TrialRecord(
        study="s", candidate="c1", kind="measurement", fate=Fate.COMPLETE, recipe_identity="r", execution_identity="e",
        cache_identity=None, source_identity="0", source_dirty=None, execution=part.fitted[1].baseline,
        targets_per_second=2e3, seconds_per_update=1.0, timestamp=0.0,
    )  # fmt: skip


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    reading, writing = os.pipe()
    lines, line, clock = Lines(reading), Channel({}, writing), FakeClock()
    request = StudyRequest(
        budget="50m",
        budget_seconds=BUDGET_SECONDS,
        total_seconds=BUDGET_SECONDS,
        age_seconds=0.0,
        out=str(tmp_path),
        presets=NAMES,
    )
    standings = [Standing(name) for name in NAMES]
    said: list[str] = []
    session = SeveralSession(request, line, standings, said.append)
    begin_whole(tmp_path, NAMES)
    parts = [_part(request, place, standing, line) for place, standing in enumerate(standings)]
    deadline = Deadline.after(BUDGET_SECONDS, clock)
    whole = Whole(parts, session, None, deadline, said.append)  # type: ignore[arg-type]
    made = Turns(whole, clock, lines, said)
    whole.study = made.study
    yield made
    lines.close()
    os.close(writing)


def _part(request: StudyRequest, place: int, standing: Standing, line: Channel) -> Part:
    config = load("nano", [f"model.layers={place + 1}"])
    out = Path(request.out) / standing.name
    asked = request.model_copy(update={"recipe": config.model_dump(mode="json"), "out": str(out)})
    records: list[TrialRecord] = []
    fitted = config, fit_space(load_space("smoke"), config, "cpu", 2)
    return Part(asked, check_request(asked), None, standing, records, PartChannel(line, records.append), fitted=fitted)


def test_each_has_its_turn_and_what_one_leaves_goes_to_those_after_it(turns: Turns) -> None:
    assert turns.run() == ["done"] * 3
    assert turns.ran == NAMES
    shares = [seconds for _, seconds, _ in turns.calls]
    assert shares[2] == pytest.approx(BUDGET_SECONDS - 200), "the last has all that is left"
    assert BUDGET_SECONDS / 6 <= shares[0] < BUDGET_SECONDS / 3 < shares[1] < shares[2]


def test_each_begins_with_what_those_before_it_measured(turns: Turns) -> None:
    turns.run()
    assert [learned for _, _, learned in turns.calls] == [0, 1, 2]
    assert any("beginning with what 2 other(s) showed in 2 trial(s)" in line for line in turns.said)


def test_one_that_uses_its_share_up_takes_nothing_from_the_others(turns: Turns) -> None:
    turns.spend = {"small": math.inf}
    assert turns.run() == ["short", "done", "done"]
    (_, first, _), (_, second, _), _ = turns.calls
    assert first < BUDGET_SECONDS / 3
    assert second > (BUDGET_SECONDS - first) / 4


def test_what_others_left_is_said_where_one_had_more_to_measure(turns: Turns) -> None:
    turns.spend = {"small": math.inf}
    turns.run()
    left = format_duration(turns.whole.deadline.remaining())
    said = f"budget: small had more to measure, and {left} were left by others: --resume goes on with small"
    assert why_over(turns.whole) == said
    turns.clock.advance(turns.whole.deadline.remaining() - 1)
    assert why_over(turns.whole) == "budget: small had more to measure"


def test_studies_that_are_done_want_no_share(turns: Turns) -> None:
    turns.run("done", "done", "waiting")
    assert turns.calls == [("large", pytest.approx(BUDGET_SECONDS), 0)]


def test_those_that_were_short_of_time_go_on_only_where_no_other_waits(turns: Turns) -> None:
    assert turns.run("short", "interrupted", "done") == ["short", "done", "done"]
    assert turns.ran == ["middle"]
    assert turns.run("short", "done", "done") == ["done"] * 3
    assert turns.ran == ["middle", "small"]


def test_one_that_cannot_be_studied_here_is_left_out_and_the_others_go_on(turns: Turns) -> None:
    turns.faults = {"middle": "data.cache: the vocabulary is another"}
    assert turns.run() == ["done", "left out", "done"]
    assert "middle is left out: data.cache: the vocabulary is another" in turns.said
    assert read_whole(turns.whole.session.out)["studies"][1]["reason"] == "data.cache: the vocabulary is another"


def test_where_a_cluster_lost_its_nodes_what_ran_was_cut_and_the_others_wait(turns: Turns) -> None:
    """A resumption, on a cluster that has nodes again, goes on with all of them."""
    turns.ends["middle"] = "nodes lost: a trial takes 1 GPU, and the nodes alive have 0 GPU"
    assert turns.run() == ["done", "interrupted", "waiting"]
    assert turns.ran == ["small", "middle"]
    assert why_over(turns.whole) == turns.ends["middle"]


def test_one_that_goes_on_with_something_else_than_it_began_with_is_a_mistake(turns: Turns) -> None:
    turns.faults = {"small": "--resume: the recipe is not that of the study"}
    turns.whole.parts[0].earlier = _earlier()
    with pytest.raises(ConfigError, match="the recipe is not that of the study"):
        turns.run("interrupted")


def _earlier() -> Any:
    class Spent:
        spent_seconds = 50.0

    return Spent()


def test_without_time_none_is_begun_and_one_that_has_measured_keeps_its_answer(turns: Turns) -> None:
    turns.clock.advance(BUDGET_SECONDS - 1)
    turns.whole.parts[1].records.append(_record(turns.whole.parts[1]))
    assert turns.run("waiting", "interrupted", "waiting") == ["left out", "short", "left out"]
    assert turns.calls == []


def test_one_that_has_measured_goes_on_where_there_is_time_for_one_more(turns: Turns) -> None:
    part = turns.whole.parts[0]
    part.records.append(_record(part))
    turns.clock.advance(BUDGET_SECONDS - 1.5 * _size(part, turns.whole).baseline_seconds)
    turns.run("interrupted", "done", "done")
    assert turns.ran == ["small"]


def test_the_seconds_of_earlier_sessions_are_added_to_a_share(turns: Turns) -> None:
    turns.whole.parts[2].earlier = _earlier()
    turns.run("done", "done", "interrupted")
    assert turns.calls[0][1] == pytest.approx(BUDGET_SECONDS), "what it may still use"
    assert turns.whole.parts[2].standing.seconds == pytest.approx(BUDGET_SECONDS + 50), "and what it has had in all"


def test_the_whole_ends_once_and_says_what_came_of_each(turns: Turns) -> None:
    turns.faults = {"middle": "no"}
    turns.run()
    session = turns.whole.session
    assert session.close("left out: middle") == 0
    assert session.close("SIGTERM", interrupted=True) == 0
    sent = [message for message in turns.lines.read(0) or [] if message["type"] == "done"]
    assert [message["exit_status"] for message in sent] == [0], "and not with each study's end"
    assert "small: mb8 eager, 2,000 targets/s, the baseline itself" in turns.said
    assert "large: mb8 eager, 2,000 targets/s, 1.100x its baseline, not verified" in turns.said
    assert "middle: no answer (left out: no)" in turns.said
    assert read_whole(session.out)["ended"] == "left out: middle"


def test_a_signal_ends_the_study_that_runs_and_all(turns: Turns) -> None:
    ended: list[str | None] = []

    class Running:
        def close(self, why: str | None, *, interrupted: bool = False) -> int:
            ended.append(why)
            return 3

    def interrupted(*arguments: Any) -> int:
        part: Part = arguments[4]
        part.session = Running()
        assert turns.whole.session.close("SIGINT", interrupted=True) == 3
        return 3

    turns.whole.study = interrupted
    turns.run()
    assert ended[0] == "SIGINT"
    assert read_whole(turns.whole.session.out)["ended"] == "SIGINT"
    assert any(line.startswith("small: no answer (interrupted: SIGINT)") for line in turns.said)


@pytest.mark.parametrize(
    ("retry", "state"),
    [([], "done"), (["out_of_memory"], "done"), (["failed"], "waiting")],
    ids=["none", "other", "it"],
)
def test_one_that_was_done_goes_on_where_its_failed_candidates_are_to_be_tried_again(
    turns: Turns, retry: list[str], state: str
) -> None:
    session, (part, *_) = turns.whole.session, turns.whole.parts
    assert part.fitted is not None
    begin_study(part.out, None, *part.fitted, part.request)
    failed = _record(part).model_copy(update={"fate": Fate.FAILED, "targets_per_second": None})
    (part.out / "trials.jsonl").write_text(failed.model_dump_json() + "\n")
    (part.out / "summary.json").write_text('{"elapsed_seconds": 5.0}')
    request = part.request.model_copy(update={"out": str(session.out), "resume": True, "retry": retry})
    again = open_part(request, part.request.recipe, Standing("small", "done"), session, Channel({}, -1))  # type: ignore[arg-type]
    claims._HELD.popitem()[1].close()
    assert (again.standing.state, again.request.retry, len(again.records)) == (state, retry, 1)
