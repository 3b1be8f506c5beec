"""A slow file system with a clock of its own, so that waiting for it takes seconds that nobody waits."""

import threading

from tinyllm_ray.data.ranges import FileRanges


class SlowSource(FileRanges):
    """Files that answer three seconds after somebody began to wait; also the clock that tells so."""

    def __init__(self, cache):
        super().__init__(cache)
        self.now, self.asked, self.answered = 0.0, threading.Event(), threading.Event()

    def perf_counter(self):
        if self.answered.is_set():  # read once before a wait and once after it
            self.answered.clear()
        else:
            self.asked.set()
        return self.now

    def load(self, split, start, stop):
        self.asked.wait()
        self.asked.clear()
        self.now += 3
        self.answered.set()
        return super().load(split, start, stop)
