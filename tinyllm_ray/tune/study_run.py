"""A study from its request to its report: checks, Ray, tokens, trials."""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinyllm_ray.clock import Deadline
from tinyllm_ray.config import Config
from tinyllm_ray.data.cache import TokenCache, open_cache
from tinyllm_ray.measure.environment import usable_cores
from tinyllm_ray.search.earlier import EarlierStudy
from tinyllm_ray.search.fitting import FittedSpace, fit_space
from tinyllm_ray.search.installed import lacking
from tinyllm_ray.search.paired import RESERVED_SHARE, PairedVerifier
from tinyllm_ray.search.priors import Priors
from tinyllm_ray.search.retry import fates_to_retry, retried
from tinyllm_ray.search.study import Study
from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.recipe import check_fits
from tinyllm_ray.train.show import PipeConsole
from tinyllm_ray.tune.decided import record_decision
from tinyllm_ray.tune.driver import StudyDriver
from tinyllm_ray.tune.folder import CANDIDATES, Definition, Earlier, begin_study, open_folder, refuse_early
from tinyllm_ray.tune.live import say
from tinyllm_ray.tune.mirror import private_folder
from tinyllm_ray.tune.page.maker import PageMaker
from tinyllm_ray.tune.report import Report
from tinyllm_ray.tune.request import Asked, StudyRequest, check_request
from tinyllm_ray.tune.session import Holder, Session
from tinyllm_ray.tune.supervisor import process_age_seconds
from tinyllm_ray.tune.watching import watched

if TYPE_CHECKING:
    from tinyllm_ray.cluster.connect import Connection
    from tinyllm_ray.tune.study_process import Work

_CLOSING_SECONDS = 6.0
"""Kept free at the end for stopping Ray (1.3-4 s on two busy cores) and the last report."""
_CLOSING_SHARE = 0.1
"""Of the budget, where that is less."""


def run(work: "Work") -> int:
    """Run the study that `work` was asked for; returns the exit status. Raises ConfigError for a mistake in it.

    All that can be judged without Ray is judged before Ray is imported, so that a mistake is said within a second, and
    nothing is written before everything is judged. PyTorch is the candidates' alone.
    """
    request = StudyRequest.model_validate(work.channel.request)
    deadline = Deadline.after(request.budget_seconds - process_age_seconds())
    asked = check_request(request)
    out = Path(request.out).resolve()
    earlier = open_folder(out, request.resume)
    if earlier is not None:
        refuse_early(earlier, asked, out)
    if asked.config is not None:
        if asked.config.data.cache is not None:
            check_fits(asked.config, open_cache(asked.config.data.cache))
        if asked.space is not None:
            # A GPU runs whatever any machine runs.
            fit_space(asked.space, asked.config, "cuda", usable_cores())
    compile_cache_folder()
    return study_on_ray(request, asked, earlier, out, work, deadline)


def study_on_ray(
    request: StudyRequest,
    asked: Asked,
    earlier: Earlier | None,
    out: Path,
    work: Holder,
    deadline: Deadline,
    ray: "tuple[Connection, bool] | None" = None,
    learned: tuple[EarlierStudy, ...] = (),
) -> int:
    """The study on `ray` (what `started_ray` gives), or on one of its own; `learned` is what it begins with."""
    from tinyllm_ray.cluster.callbacks import DEFAULT, unpack_callbacks
    from tinyllm_ray.cluster.trials import concurrency, resources

    callbacks = DEFAULT if request.callbacks is None else unpack_callbacks(request.callbacks)
    console = PipeConsole(stderr=True)
    with nullcontext(ray) if ray else started_ray(request, console) as (connection, alone):
        config, space, notes = asked.for_machine(connection.device_kind)
        cores = int(resources(connection)["CPU"])
        fitted = fit_space(space, config, connection.device_kind, cores, lacking())
        for note in [*notes, *fitted.notes]:
            say(console, note)
        cache = open_tokens(config, fitted)
        tokens = cache.identity if cache else None
        definition = begin_study(
            out, earlier, config, fitted, request, accelerators=connection.accelerators, cache_identity=tokens
        )
        work.channel.send("out", study=definition.study, path=str(out))
        if request.resume and earlier is None:
            say(console, f"{out} holds no study yet: it begins")
        spent = earlier.spent_seconds if earlier else 0.0
        driver = StudyDriver(
            study=search_of(request, config, fitted, earlier, concurrency(connection), learned),
            study_id=definition.study,
            config=config,
            cache=cache,
            out=out,
            deadline=deadline.earlier_by(closing_seconds(request.total_seconds)),
            earlier=earlier.records if earlier else (),
        )
        report = Report(
            out=out,
            study_id=definition.study,
            config=config,
            budget_seconds=request.total_seconds,
            elapsed=lambda: spent + request.age_seconds + process_age_seconds(),
            facts={**study_facts(definition, fitted, connection, cache), "alone_on_machine": alone},
            earlier_sessions=earlier.sessions if earlier else (),
            page=PageMaker(out, functools.partial(say, console)),
        )
        decide = functools.partial(
            record_decision, driver.study, config, out, request.decisions, functools.partial(say, console)
        )
        session = work.session = Session(driver, report, work.channel, console, decide)
        lost = measure(driver, report, connection, cache, watched(driver, report, callbacks, console))
        status = session.close(driver.end or lost)
    session.settle()
    return status


@contextmanager
def started_ray(request: StudyRequest, console: Console) -> "Iterator[tuple[Connection, bool]]":
    """Ray as the request has it, and whether no other study measures on this machine."""
    from tinyllm_ray.cluster.connect import connect
    from tinyllm_ray.cluster.gpu_models import refuse_mixture

    say(console, f"budget {request.budget}; starting Ray")
    with connect(request.address, request.by_device) as connection, claim_machine(console, connection) as alone:
        refuse_mixture(connection.accelerators, "study each apart, by --by-device {} and an --out of its own")
        say(console, _describe(connection))
        yield connection, alone


def search_of(
    request: StudyRequest,
    config: Config,
    fitted: FittedSpace,
    earlier: Earlier | None,
    devices: int,
    learned: tuple[EarlierStudy, ...] = (),
) -> Study:
    """What decides on the trials: of the space as it fits, from what earlier sessions and other studies recorded."""
    objective = request.objective_of(config)
    return Study(
        fitted,
        records=retried(earlier.records, fates_to_retry(request.retry, request.resume)) if earlier else (),
        objective=objective,
        verifier=PairedVerifier(fitted.protocol, RESERVED_SHARE * request.total_seconds, objective),
        devices=devices,
        priors=Priors(fitted.device_kind, earlier=learned),
    )


def measure(
    driver: StudyDriver,
    report: Report,
    connection: "Connection",
    cache: TokenCache | None,
    watching: AbstractContextManager[list[Any]],
) -> str | None:
    """Run the trials until the study is over; why, where it is the cluster that ended it."""
    from tinyllm_ray.cluster.prefetch import prefetching
    from tinyllm_ray.cluster.trials import run_trials

    storage = Path(tempfile.mkdtemp(prefix="tune-", dir=private_folder()))
    servers: AbstractContextManager[str | None] = prefetching(report.study_id) if cache else nullcontext()
    try:
        with servers as names, watching as callbacks:
            return run_trials(driver, connection, report.out / CANDIDATES, storage, names, callbacks)
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def open_tokens(config: Config, fitted: FittedSpace) -> TokenCache | None:
    """The token cache that trials read, the default one built if need be; None where they read none."""
    if fitted.protocol.data_mode == "synthetic":
        return None
    from tinyllm_ray.data.prepare import default_cache

    cache = open_cache(config.data.cache or default_cache())
    check_fits(config, cache)
    return cache


@contextmanager
def claim_machine(console: Console, connection: "Connection") -> Iterator[bool]:
    """Whether no other study of this user measures on the same devices of this machine; says so where one does."""
    if not connection.started:
        yield True
        return
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all") if connection.gpus else "cpu"
    name = hashlib.sha256(os.fsencode(devices)).hexdigest()[:16]  # eight GPUs by their UUIDs are no name for a file
    with (private_folder() / f"measuring-{name}.lock").open("a") as lock:
        alone = False
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        if not alone:
            say(console, "another study is measuring on this machine: the figures of both will be low")
        yield alone


def closing_seconds(budget_seconds: float) -> float:
    """What is kept free at the end of a budget."""
    return min(_CLOSING_SECONDS, _CLOSING_SHARE * budget_seconds)


def study_facts(
    definition: Definition, fitted: FittedSpace, connection: "Connection", cache: TokenCache | None
) -> dict[str, Any]:
    return {
        "parameters": fitted.parameters,
        "targets_per_update": fitted.targets_per_update,
        "recipe_identity": definition.recipe_identity,
        "cache_identity": cache.identity if cache else None,
        "space": fitted.name,
        "space_notes": list(fitted.notes),
        "protocol": fitted.protocol.model_dump(),
        "search_windows": fitted.search_windows,
        "device_kind": fitted.device_kind,
        "nodes": connection.nodes,
        "gpus": connection.gpus,
        "cores_per_node": connection.cores_per_node,
        "ray_started_here": connection.started,
    }


def _describe(connection: "Connection") -> str:
    devices = f"{connection.gpus} GPU(s)" if connection.gpus else f"{connection.cores_per_node} cores a node, no GPU"
    origin = "started" if connection.started else "joined"
    page = f"; dashboard {connection.dashboard}" if connection.dashboard else ""
    return f"Ray {origin} at {connection.address}: {connection.nodes} node(s), {devices}{page}"
