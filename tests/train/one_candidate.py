"""One compiled candidate as a trial runs it, in this user's own compile cache; prints its record.

`tests/train/test_candidates_together.py` runs several at once. Arguments: the configuration as JSON, a folder for logs.
"""

import json
import sys
from pathlib import Path

from tinyllm_ray.train.compile_cache import compile_cache_folder
from tinyllm_ray.train.launcher import Launcher


def main() -> None:
    request = {
        "study": "s",
        "candidate": "c001",
        "label": "l",
        "config": json.loads(sys.argv[1]),
        "protocol": {"data_mode": "synthetic", "warmup_updates": 2, "windows": 2, "updates_per_window": 3},
        "cache": None,
        "cache_identity": None,
        "configuration": None,
        "limit_seconds": 3000.0,  # of a hang: a busy machine compiles for minutes
    }
    with Launcher(Path(sys.argv[2]), compile_cache_folder(), dict, {"sha256": "s" * 64, "dirty": None}) as launcher:
        print(launcher.run(request).model_dump_json())


if __name__ == "__main__":
    main()
