"""A record as one row of a table: the columns of data frames, exports and loggers."""

from typing import Any

from tinyllm_ray.records import TrialRecord


def table_row(record: TrialRecord) -> dict[str, Any]:
    """Columns of a record, under the record's own names; None is what is not known.

    What tells trials apart comes first, then the execution's settings, each a column, then throughput in targets a
    second, seconds by stage (`seconds_start`, ...), peak memory in bytes, targets a joule, the number of windows with
    clocks that power or heat held down, and the first device's name.

    >>> from pathlib import Path
    >>> from tinyllm_ray.records import read_records
    >>> from tinyllm_ray.table import table_row
    >>> rows = [table_row(record) for record in read_records(Path("studies/nano/trials.jsonl"))]
    >>> rows[0]["fate"], rows[0]["update"]
    ('complete', 'eager')
    """
    return {
        "study": record.study,
        "candidate": record.candidate,
        "purpose": record.purpose,
        "round": record.round,
        "timestamp": record.timestamp,
        "fate": record.fate.value,
        "reason": record.reason,
        **record.execution,
        "targets_per_second": record.targets_per_second,
        "spread": record.spread,
        "seconds_per_update": record.seconds_per_update,
        "first_update_seconds": record.first_update_seconds,
        "warmup_seconds": record.warmup_seconds,
        **{f"seconds_{name}": value for name, value in record.seconds.model_dump().items()},
        **record.memory.model_dump(),
        "targets_per_joule": record.targets_per_joule,
        "throttled_windows": None if record.throttled_windows is None else len(record.throttled_windows),
        "device": record.devices[0].name if record.devices else None,
    }
