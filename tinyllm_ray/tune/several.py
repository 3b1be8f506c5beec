"""Several recipes studied within one budget: on one Ray, one after the other, each beginning with what others showed.

Each has a share of the budget by what its answer is worth (`search.shares`); what it leaves goes to those after it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm_ray.clock import Deadline, format_duration
from tinyllm_ray.cluster.returns import NODES_LOST
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord
from tinyllm_ray.search.cost import CostModel
from tinyllm_ray.search.earlier import EarlierStudy
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.retry import fates_to_retry, retried
from tinyllm_ray.search.shares import Size, share
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.recipe import check_fits
from tinyllm_ray.train.show import PipeConsole
from tinyllm_ray.tune.channel import Channel
from tinyllm_ray.tune.decisions import DECISIONS
from tinyllm_ray.tune.folder import DEFINITION, Earlier, open_folder, refuse_early
from tinyllm_ray.tune.live import say
from tinyllm_ray.tune.request import Asked, StudyRequest, check_request
from tinyllm_ray.tune.session import Closing
from tinyllm_ray.tune.several_folder import Standing, begin_whole, open_whole, study_figures
from tinyllm_ray.tune.several_session import PartChannel, SeveralSession
from tinyllm_ray.tune.study_run import closing_seconds, started_ray, study_on_ray
from tinyllm_ray.tune.supervisor import process_age_seconds

if TYPE_CHECKING:
    from tinyllm_ray.cluster.connect import Connection
    from tinyllm_ray.tune.study_process import Work


@dataclass
class Part:
    """One of the studies."""

    request: StudyRequest
    asked: Asked
    earlier: Earlier | None
    standing: Standing
    records: list[TrialRecord]
    """All of its, oldest first."""
    channel: Channel
    session: Closing | None = None
    fitted: tuple[Config, FittedSpace] | None = None
    """Once the machine is known; None for one that is left out."""

    @property
    def out(self) -> Path:
        return Path(self.request.out)

    @property
    def learned(self) -> EarlierStudy | None:
        """What it tells the others."""
        if self.fitted is None or not self.records:
            return None
        _, space = self.fitted
        return EarlierStudy.of(space.parameters, space.targets_per_update, self.records)


@dataclass
class Whole:
    """All of them, on one Ray."""

    parts: Sequence[Part]
    session: SeveralSession
    ray: "tuple[Connection, bool]"
    deadline: Deadline
    """For measuring."""
    say: Callable[[str], None]
    study: Callable[..., int] = study_on_ray
    lost: str | None = None
    """Why no study can go on, where the cluster lost its nodes."""


def run_presets(work: "Work") -> int:
    """Run the studies that `work` was asked for; returns the exit status. Raises ConfigError for a mistake in them."""
    request = StudyRequest.model_validate(work.channel.request)
    deadline = Deadline.after(request.budget_seconds - process_age_seconds())
    console = PipeConsole(stderr=True)
    tell = functools.partial(say, console)
    fates_to_retry(request.retry, request.resume)
    standings = open_whole(Path(request.out).resolve(), request.presets, request.resume)
    session = SeveralSession(request, work.channel, standings, tell)
    pairs = zip(request.presets, standings, strict=True)
    parts = [open_part(request, preset, standing, session, work.channel) for preset, standing in pairs]
    session.count_earlier()  # opening the studies has waited for what a killed session's helpers still bring
    compile_cache_folder()
    with started_ray(request, console) as ray:
        for part in parts:
            _fit(part, ray[0])
        if not any(part.fitted for part in parts):
            raise ConfigError("; ".join(f"{one.name}: {one.reason}" for one in standings))
        begin_whole(session.out, request.presets)
        work.session = session
        measuring = deadline.earlier_by(closing_seconds(request.total_seconds))
        whole = Whole(parts, session, ray, measuring, tell)
        run_in_turn(whole)
        status = session.close(why_over(whole))
    session.write()
    return status


def why_over(whole: Whole) -> str:
    """Why no study goes on, and what a resumption would do."""
    short, out = ([part for part in whole.parts if part.standing.state == state] for state in ("short", "left out"))
    left = whole.deadline.remaining()
    if whole.lost is not None:
        return whole.lost
    why = [f"budget: {_names(short)} had more to measure"] if short else []
    if again := [part for part in short if _size(part, whole).least_seconds <= left]:
        # A study is closed with its share: who comes after it may need what is left.
        why[0] += f", and {format_duration(left)} were left by others: --resume goes on with {_names(again)}"
    why += [f"left out: {_names(out)}"] if out else []
    return "; ".join(why) or "every recipe was studied"


def _names(parts: Sequence[Part]) -> str:
    return ", ".join(part.standing.name for part in parts)


def open_part(request: StudyRequest, preset: str, standing: Standing, session: SeveralSession, line: Channel) -> Part:
    """What is there of a study to go on with, and what is asked of it. Raises ConfigError; nothing is written."""
    out = session.out / standing.name
    resume = (out / DEFINITION).exists()
    decisions = [session.out / DECISIONS, *(file.resolve() for file in request.decisions)]
    retry = request.retry if resume else []
    own = {"presets": [], "recipe": preset, "out": str(out), "resume": resume, "retry": retry, "decisions": decisions}
    asked = request.model_copy(update=own)
    sound, earlier = check_request(asked), open_folder(out, resume)
    if earlier is not None:
        refuse_early(earlier, sound, out)
    records = list(earlier.records) if earlier else []
    if standing.state == "done" and retried(records, fates_to_retry(retry, resume)) != records:
        standing.state = "waiting"

    def heard(record: TrialRecord) -> None:
        records.append(record)
        session.write()

    return Part(asked, sound, earlier, standing, records, PartChannel(line, heard))


def _fit(part: Part, connection: "Connection") -> None:
    """Settle a part for the machine, or leave it out."""
    from tinyllm_ray.cluster.trials import resources

    try:
        config, space, _ = part.asked.for_machine(connection.device_kind)
        fitted = fit_space(space, config, connection.device_kind, int(resources(connection)["CPU"]))
        if config.data.cache is not None:
            check_fits(config, open_cache(config.data.cache))
    except ConfigError as error:
        part.standing.state, part.standing.reason = "left out", str(error)
        return
    part.fitted = config, fitted


def run_in_turn(whole: Whole) -> None:
    """Each study within its share of what is left; those whose share was over once more only where no other waits."""
    for part in whole.parts:
        if part.standing.state == "left out":
            whole.say(f"{part.standing.name} is left out: {part.standing.reason}")
    waiting = [part for part in whole.parts if part.standing.state in ("waiting", "interrupted")]
    waiting = waiting or [part for part in whole.parts if part.standing.state == "short"]
    while waiting:
        shares = share([_size(part, whole) for part in waiting], whole.deadline.remaining())
        for part in waiting:
            if reason := shares.left_out.get(part.standing.name):
                # One that has measured before keeps what it found.
                part.standing.state, part.standing.reason = "short" if part.records else "left out", reason
                whole.say(f"{part.standing.name} {'ends here' if part.records else 'is left out'}: {reason}")
        waiting = [part for part in waiting if part.standing.name in shares.seconds]
        if waiting:
            part = waiting.pop(0)
            _run(part, shares.seconds[part.standing.name], whole)
            if str(part.standing.reason).startswith(NODES_LOST):
                whole.lost = part.standing.reason  # the others wait for a cluster that has nodes
                return


def _size(part: Part, whole: Whole) -> Size:
    """What it needs and what its answer is worth, as far as its own records and the others' show."""
    assert part.fitted is not None
    config, space = part.fitted
    priors = Priors(space.device_kind, earlier=_others(part, whole))
    work = space.parameters * space.targets_per_update
    cost = CostModel(space.device_kind, work, space.protocol, tuple(part.records), priors)
    objective = part.request.objective_of(config)
    trained = objective.targets * space.parameters / priors.work_per_second(space.baseline["update"])
    worth = trained if objective.kind == "training" else 1.0
    return Size(part.standing.name, worth, cost.predict(space.baseline).expected_seconds, bool(part.records))


def _others(part: Part, whole: Whole) -> tuple[EarlierStudy, ...]:
    return tuple(learned for one in whole.parts if one is not part and (learned := one.learned) is not None)


def _run(part: Part, seconds: float, whole: Whole) -> None:
    """One study, to the end of its share."""
    standing, learned = part.standing, _others(part, whole)
    total = seconds + (part.earlier.spent_seconds if part.earlier else 0.0)
    times = {"budget": format_duration(total), "total_seconds": total, "budget_seconds": seconds}
    # Its own clock starts now, not with the process.
    request = part.request.model_copy(update={**times, "age_seconds": -process_age_seconds()})
    standing.state, standing.reason, standing.seconds = "running", None, total
    whole.session.running = standing, lambda: part.session
    whole.session.write_page()
    trials = sum(len(study.records) for study in learned)
    begins = f", beginning with what {len(learned)} other(s) showed in {trials} trial(s)" if learned else ""
    whole.say(f"{standing.name}: {format_duration(seconds)} of the budget{begins}")
    try:
        whole.study(request, part.asked, part.earlier, part.out, part, Deadline.after(seconds), whole.ray, learned)
    except ConfigError as error:
        if part.earlier is not None:
            raise  # it goes on with another device or another corpus than it began with
        standing.state, standing.reason = "left out", str(error)
        whole.say(f"{standing.name} is left out: {error}")
    else:
        found = study_figures(part.out)
        standing.reason = found["ended"]
        standing.state = "left out" if not found["trials"] else "short" if found["budget_exhausted"] else "done"
        if str(found["ended"]).startswith(NODES_LOST):
            standing.state = "interrupted"
    whole.session.running = None
    whole.session.write_page()
