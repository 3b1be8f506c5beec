"""What a study's process is asked to do: a study, or one of what is measured again after it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyllm_ray.tune.study_process import Work


def run(work: "Work") -> int:
    """Do what the request names as its `task`, a study unless it does; returns the exit status. Raises ConfigError."""
    match work.channel.request.get("task"):
        case "rerun":
            from tinyllm_ray.tune.again import rerun

            return rerun.run(work)
        case "validate":
            from tinyllm_ray.tune.again import validate

            return validate.run(work)
    from tinyllm_ray.tune import study_run

    return study_run.run(work)
