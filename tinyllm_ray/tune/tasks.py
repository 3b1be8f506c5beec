"""What a study's process is asked to do: studies, or one of what is measured again after them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyllm_ray.tune.study_process import Work


def run(work: "Work") -> int:
    """Do what the request names as its `task`, else study its `presets` or its one recipe; returns the exit status.

    Raises ConfigError for a mistake in the request.
    """
    match work.channel.request.get("task"):
        case "rerun":
            from tinyllm_ray.tune.again import rerun

            return rerun.run(work)
        case "validate":
            from tinyllm_ray.tune.again import validate

            return validate.run(work)
    if work.channel.request.get("presets"):
        from tinyllm_ray.tune import several

        return several.run_presets(work)
    from tinyllm_ray.tune import study_run

    return study_run.run(work)
