"""Descendants are found and ended, those that hide from their parents included."""

import subprocess
import sys

CODE = """
import os, subprocess, sys, time
from tinyllm_ray.cluster.descendants import adopt_orphans, descendants, end_descendants

adopt_orphans()
kept = subprocess.Popen(["sleep", "60"])
# A daemon in a session of its own that ignores SIGTERM, its parent gone.
hide = "import os, signal, time; os.fork() and os._exit(0); os.setsid(); signal.signal(15, signal.SIG_IGN); {}"
subprocess.run([sys.executable, "-c", hide.format("print('hidden', flush=True); time.sleep(60)")], check=True)
child = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
while len(found := descendants(keep=[kept.pid])) < 4:
    time.sleep(0.01)
assert kept.pid not in found
left = end_descendants(patience_seconds=0.5, limit_seconds=10, keep=[kept.pid])
assert left == [], left
assert set(descendants()) == {kept.pid}
kept.kill()
"""


def test_a_daemon_and_a_grandchild_are_ended_and_a_kept_child_lives() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=240, stdout=subprocess.DEVNULL)
