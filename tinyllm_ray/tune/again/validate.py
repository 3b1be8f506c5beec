"""Whether a study's decision still holds on this machine and these versions: its winner and its baseline again."""

import json
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from tinyllm_ray import journal
from tinyllm_ray.clock import Deadline
from tinyllm_ray.cluster.gpu_models import refuse_mixture
from tinyllm_ray.config import Config, load
from tinyllm_ray.data.cache import open_cache
from tinyllm_ray.errors import EXIT_DONE, EXIT_NO_RESULT, ConfigError
from tinyllm_ray.measure.environment import devices, usable_cores
from tinyllm_ray.measure.gpu_sensors import uuid_of
from tinyllm_ray.records import SCHEMA_VERSION
from tinyllm_ray.search.fitting import DeviceKind
from tinyllm_ray.search.noise import Spread
from tinyllm_ray.search.pairs import CAUTIOUS_SPREAD
from tinyllm_ray.search.validation import Validation
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.recipe import check_fits
from tinyllm_ray.train.show import PipeConsole
from tinyllm_ray.tune.again.decision import Decision, read_decision, refuse_early, study_beside
from tinyllm_ray.tune.again.recorded import held_to_kind_of, measured_on
from tinyllm_ray.tune.again.request import ValidateRequest
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.folder import CANDIDATES
from tinyllm_ray.tune.live import say
from tinyllm_ray.tune.page.compare import differences
from tinyllm_ray.tune.report import Report, shortest_path
from tinyllm_ray.tune.session import Session
from tinyllm_ray.tune.study_run import claim_machine, closing_seconds, measure, open_tokens
from tinyllm_ray.tune.supervisor import process_age_seconds

if TYPE_CHECKING:
    from tinyllm_ray.cluster.connect import Connection
    from tinyllm_ray.tune.study_process import Work

ANSWER: Final = "validation.json"


def run(work: "Work") -> int:
    """Put the decision that `work` was asked for to the test; returns the exit status. Raises ConfigError."""
    request = ValidateRequest.model_validate(work.channel.request)
    deadline = Deadline.after(request.budget_seconds - process_age_seconds())
    config = load(str(Path(request.selected).resolve()))
    if Path(request.out).exists():
        raise ConfigError(f"--out {request.out}: there is something already; name a folder that is not there yet")
    refuse_early(Path(request.selected).resolve(), config, _kinds_here(request), usable_cores())
    if config.data.cache is not None:
        check_fits(config, open_cache(config.data.cache))
    compile_cache_folder()
    return _run_on_ray(request, config, work, deadline)


def _kinds_here(request: ValidateRequest) -> tuple[DeviceKind, ...]:
    """Of devices on which trials may run; none that are known before a cluster is joined."""
    if request.address:
        return ()
    return ("cpu",) if uuid_of("0") is None else ("cuda", "cpu")


def _run_on_ray(request: ValidateRequest, config: Config, work: "Work", deadline: Deadline) -> int:
    from tinyllm_ray.cluster.connect import connect
    from tinyllm_ray.cluster.trials import resources

    console = PipeConsole(stderr=True)
    out = Path(request.out).resolve()
    say(console, f"validating {shortest_path(Path(request.selected))} within {request.budget}; starting Ray")
    with ExitStack() as stack:
        with nullcontext() if request.address else one_gpu(os.environ):
            cluster = stack.enter_context(connect(request.address, request.by_device))
        connection = _on_one_kind(cluster, Path(request.selected).resolve(), config, console)
        alone = stack.enter_context(claim_machine(console, connection))
        cores = int(resources(connection)["CPU"])
        decision = read_decision(Path(request.selected).resolve(), config, connection.device_kind, cores)
        _check_device(decision, connection)
        for note in decision.notes:
            say(console, note)
        cache = open_tokens(config, decision.space)
        study = f"validation-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        _make_folder(out)
        work.channel.send("out", study=study, path=str(out))
        driver = StudyDriver(
            study=Validation(decision.space, decision.question, _spread(decision, connection)),
            study_id=study,
            config=config,
            cache=cache,
            out=out,
            deadline=deadline.earlier_by(closing_seconds(request.total_seconds)),
        )
        report = ValidationReport(
            out=out,
            study_id=study,
            config=config,
            budget_seconds=request.total_seconds,
            elapsed=lambda: request.age_seconds + process_age_seconds(),
            facts={"configuration": str(Path(request.selected).resolve()), "alone_on_machine": alone},
            decision=decision,
        )
        session = work.session = Session(driver, report, work.channel, console)
        lost = measure(driver, report, connection, cache, nullcontext([]))
        status = session.close(driver.end or lost)
    session.settle()
    return status


@contextmanager
def one_gpu(environment: MutableMapping[str, str]) -> Iterator[None]:
    """While entered, a Ray that starts here sees the first GPU only: the two sides of a pair belong on one device."""
    name = "CUDA_VISIBLE_DEVICES"
    before = environment.get(name)
    environment[name] = "0" if before is None else before.split(",")[0]
    try:
        yield
    finally:
        del environment[name]
        if before is not None:
            environment[name] = before


def _on_one_kind(cluster: "Connection", selected: Path, config: Config, console: Console) -> "Connection":
    """The cluster for trials on one kind of GPU: the study's, where it has several. Raises ConfigError."""
    was = measured_on(study_beside(selected, config)[0])
    connection = held_to_kind_of(was, cluster)
    where = f"the study measured on {was.name}: " if was else ""
    refuse_mixture(connection.accelerators, f"{where}name the kind that you ask about, by --by-device {{}}")
    if connection is not cluster:
        say(
            console, f"on the study's kind of GPU, {connection.only}; the cluster has {', '.join(cluster.accelerators)}"
        )
    return connection


def _check_device(decision: Decision, connection: "Connection") -> None:
    """Raises ConfigError where the study's devices are of a kind that is not here."""
    was = measured_on(decision.records)
    if was is not None and was.kind != connection.device_kind:
        raise ConfigError(
            f"the study measured on {was.kind} devices, and trials here run on {connection.device_kind}: its decision "
            "is about others; validate it on such a machine, or name a cluster with --address"
        )


def _spread(decision: Decision, connection: "Connection") -> Spread:
    """What is known of the device before it is used: on a CPU it is this host's, if it is here."""
    if connection.device_kind != "cpu" or not connection.started:
        return CAUTIOUS_SPREAD
    (here,) = devices()
    return decision.spread(here.identifier or f"{here.kind} of {here.host}")


def _make_folder(out: Path) -> None:
    try:
        (out / CANDIDATES).mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder that can be written") from None


@dataclass(kw_only=True)
class ValidationReport(Report):
    """`validation.json`, and the closing lines."""

    decision: Decision

    def write(self, driver: StudyDriver) -> None:
        """Rewrite the file. Raises OSError where it cannot be written."""
        text = json.dumps(self._summary(driver), indent=2, allow_nan=False) + "\n"
        journal.write_atomically(self.out / ANSWER, text.encode())

    def closing_lines(self, driver: StudyDriver) -> list[str]:
        """The answer, what it rests on, and what is another here than in the study."""
        answer, question = _validation(driver).answer(), self.decision.question
        lines = [f"decision: {question.selected.id} {_claim_words(self.decision)}"]
        lines.append(f"{answer.outcome}: {answer.reason}{_study_words(self.decision.speedup)}")
        lines += [f"{name}: {here} here, {there} in the study" for name, there, here in self._differences(driver)]
        if answer.outcome == "could not be told" and driver.end:
            lines.append(f"ended: {driver.end}; a larger --budget, or a quieter machine, may tell")
        return [*lines, f"records: {shortest_path(self.out / ANSWER)}"]

    def exit_status(self, driver: StudyDriver) -> int:
        """Done where the decision holds."""
        return EXIT_DONE if _validation(driver).answer().outcome == "holds" else EXIT_NO_RESULT

    def _summary(self, driver: StudyDriver) -> dict[str, Any]:
        answer, question = _validation(driver).answer(), self.decision.question
        sides = {"selected": question.selected, "baseline": question.baseline, "compared": question.other}
        return {
            "schema_version": SCHEMA_VERSION,
            "validation": self.study_id,
            **self.facts,
            "outcome": answer.outcome,
            "reason": answer.reason,
            "claim": question.claim,
            "speedup": asdict(answer.verdict) if answer.verdict else None,
            "study": self.decision.summary.get("study"),
            "study_speedup": self.decision.speedup,
            "differences": [
                {"name": name, "study": there, "here": here} for name, there, here in self._differences(driver)
            ],
            **{
                name: {"candidate": one.id, "label": one.label, "execution": one.execution}
                for name, one in sides.items()
            },
            "recipe_identity": self.config.recipe_identity,
            "budget_seconds": self.budget_seconds,
            "elapsed_seconds": self.elapsed(),
            "ended": driver.end,
            "timestamp": time.time(),
        }

    def _differences(self, driver: StudyDriver) -> list[tuple[str, str, str]]:
        here = driver.study.measured_again
        return differences(self.decision.records, here) if self.decision.records and here else []


def _validation(driver: StudyDriver) -> Validation:
    assert isinstance(driver.study, Validation)
    return driver.study


def _claim_words(decision: Decision) -> str:
    return {
        "faster": "is faster than the baseline",
        "tie": "is a tie with the baseline, and preferred to it",
        "baseline": "is the baseline, and nothing is shown to be faster",
    }[decision.question.claim]


def _study_words(speedup: Mapping[str, Any] | None) -> str:
    if speedup is None:
        return ""
    if speedup.get("verified"):
        return f"; in the study {speedup['ratio']:.3f}x ({speedup['low']:.3f} to {speedup['high']:.3f})"
    return f"; in the study {speedup['ratio']:.2f}x, not verified"
