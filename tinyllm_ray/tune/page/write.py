"""Makes the report page of a study and writes it: `OUT/report.html`, one file that needs no other."""

from pathlib import Path
from typing import Any, Final

from tinyllm_ray import journal
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.records import TrialRecord, read_records
from tinyllm_ray.summary import SUMMARY, read_summary
from tinyllm_ray.tune.folder import DEFINITION, TRIALS
from tinyllm_ray.tune.page import charts, text
from tinyllm_ray.tune.page.study import StudyPage, page_data
from tinyllm_ray.tune.page.svg import drawing_settings
from tinyllm_ray.tune.page.template import render
from tinyllm_ray.tune.several_folder import refuse_several

REPORT: Final = "report.html"

_STAGES: Final = {
    "process": "process",
    "start": "start",
    "compile": "first update",
    "warmup": "warm-up",
    "windows": "timed windows",
    "proof": "proof",
    "idle": "no trial",
}


def write_page(out: Path) -> Path:
    """Make OUT/report.html again from the records; returns its path.

    Raises ConfigError where `out` holds no study, TinyllmRayError where its records are damaged, OSError.
    """
    records, summary = read_study(out)
    path = out / REPORT
    journal.write_atomically(path, study_page(page_data(records, summary)).encode(errors="replace"))
    return path


def read_study(out: Path) -> tuple[list[TrialRecord], dict[str, Any]]:
    """Records and summary, which is empty where a study was cut before its first. Raises as `write_page` does."""
    refuse_several(out)
    if not any((out / name).is_file() for name in (DEFINITION, TRIALS, SUMMARY)):
        raise ConfigError(f"{out}: there is no study here (neither {DEFINITION} nor {TRIALS} nor {SUMMARY})")
    summary = read_summary(out)
    return read_records(out / TRIALS), summary


def study_page(page: StudyPage) -> str:
    """The page as HTML."""
    with drawing_settings():
        pictures = {
            "time": charts.time_line(page.spending, page.labels),
            "factors": charts.factor_chart(page),
            "kernels": charts.kernel_chart(page.kernel_times),
            "memory": charts.memory_chart(page),
            "devices": charts.device_chart(page.devices),
        }
    heading = f"Study: {text.printable(page.title)}"
    return render("study.html", heading=heading, page=page, charts=pictures, stages=_STAGES, refresh=page.ended is None)
