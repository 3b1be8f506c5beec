"""Windows by time and need: how long, how many, and when a candidate that cannot win is stopped."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm_ray.measure.need import Bar, is_enough, is_warm, updates_to_fill, why_dominated
from tinyllm_ray.measure.windows import Measurement, measure
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import GpuState

ADAPTIVE = Protocol(version="adaptive")
TARGETS = 1000


class Device:
    """An update takes what it is told; one that is waited for takes `wait_seconds` more, as its queue runs empty."""

    targets_per_update = TARGETS
    data_wait_seconds = 0.0

    def __init__(self, seconds: Callable[[int], float], wait_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.updates = 0
        self.waits = 0
        self._seconds, self._wait = seconds, wait_seconds
        self._queued = 0.0
        self.heard: list[float] = []

    def step(self) -> None:
        self._queued += self._seconds(self.updates)
        self.updates += 1

    def synchronize(self) -> None:
        self.now += self._queued + self._wait
        self._queued = 0.0
        self.waits += 1

    def read(self) -> tuple[float, float]:
        return 4.0, 1.0

    def measure(self, protocol: Protocol = ADAPTIVE, beat: float | None = None, spread: float = 0.0025) -> Measurement:
        def note(_: object) -> None:
            self.heard.append(self.now)

        bar = Bar(beat, spread)
        return measure(
            self, protocol, on_first_update=note, clock=lambda: self.now, wall_clock=lambda: self.now, bar=bar
        )


def noisy(seconds: float, spread: float, seed: int = 0, first: float = 3.0) -> Callable[[int], float]:
    """Updates of so many seconds whose windows of 0.5 s spread by `spread`."""
    generator = random.Random(seed)
    each = spread * math.sqrt(max(1.0, 0.5 / seconds))
    return lambda update: first if not update else seconds * math.exp(generator.gauss(0, each))


class TestWindows:
    @pytest.mark.parametrize("seconds", [0.0001, 0.0171, 0.3, 0.7, 4.0])
    def test_a_window_lasts_half_a_second_and_hardly_longer(self, seconds: float) -> None:
        found = Device(lambda update: seconds).measure()
        assert len(found.windows) == 3
        for window in found.windows:
            assert 0.5 <= window.seconds <= 0.5 + seconds + 1e-6
            assert window.targets == window.updates * TARGETS
        assert found.targets_per_second == pytest.approx(TARGETS / seconds)

    def test_updates_that_are_quicker_when_queued_fill_the_window_all_the_same(self) -> None:
        device = Device(lambda update: 0.010, wait_seconds=0.005)
        found = device.measure()
        assert all(window.seconds >= 0.5 for window in found.windows)
        assert [window.updates for window in found.windows][1:] == [50, 50]

    def test_without_anything_to_beat_there_are_as_many_as_asked(self) -> None:
        assert len(Device(noisy(0.02, 0.02)).measure(Protocol(version="adaptive", windows=5)).windows) == 5

    def test_close_ones_get_more_windows_and_steady_ones_fewer(self) -> None:
        rate = TARGETS / 0.02
        steady = len(Device(noisy(0.02, 0.0005)).measure(beat=rate).windows)
        rough = len(Device(noisy(0.02, 0.02)).measure(beat=rate).windows)
        assert 3 < steady < rough == ADAPTIVE.most_windows

    def test_sustained_load_lasts_as_long_as_asked(self) -> None:
        found = Device(noisy(0.02, 0.01)).measure(Protocol(version="adaptive", window_seconds=1, least_seconds=60))
        assert 60 <= sum(window.seconds for window in found.windows) < 61.1
        assert len(found.windows) in {59, 60}

    @pytest.mark.parametrize("seconds", [0.0171, 0.3])
    def test_what_may_win_has_as_many_updates_as_asked_and_what_cannot_is_stopped_before(self, seconds: float) -> None:
        protocol, rate = Protocol().by_need(120), TARGETS / seconds
        for beat in (None, rate):
            found = Device(lambda update: seconds).measure(protocol, beat)
            assert sum(window.updates for window in found.windows) >= 120
        assert len(Device(lambda update: seconds).measure(protocol, 2 * rate).windows) == 1

    @settings(max_examples=50)
    @given(st.floats(0.001, 5), st.none() | st.floats(50, 5000), st.sampled_from([0.0, 3.0, 20.0]), st.integers(0, 130))
    def test_windows_take_no_longer_than_the_protocol_says(
        self, seconds: float, beat: float | None, least: float, updates: int
    ) -> None:
        protocol = Protocol(version="adaptive", least_seconds=least).by_need(updates)
        found = Device(lambda update: seconds).measure(protocol, beat)
        assert sum(window.seconds for window in found.windows) <= protocol.longest_seconds(seconds) + 1e-6

    def test_by_count_nothing_is_decided(self) -> None:
        found = Device(lambda update: 0.02).measure(Protocol(), beat=1e9)
        assert [window.updates for window in found.windows] == [100] * 3
        assert found.dominated is None


class TestWarmUp:
    def test_ends_once_three_updates_after_the_first_agree(self) -> None:
        device = Device(lambda update: 20.0 if not update else 0.02)
        found = device.measure()
        assert device.waits == 1 + 3 + len(found.windows)
        assert found.warmup_seconds == pytest.approx(20.06)

    @pytest.mark.parametrize("slow", [1, 2, 3, 5])
    def test_a_late_compilation_is_no_part_of_a_window(self, slow: int) -> None:
        """As where update 1 compiles once more, or a graph is recorded in it."""
        found = Device(lambda update: {0: 20.0, slow: 9.0}.get(update, 0.02)).measure()
        late = slow >= 1 + 3  # nothing announces one that comes after three steady updates
        assert (found.windows[0].seconds > 9) == late
        assert found.targets_per_second == pytest.approx(TARGETS / 0.02)

    def test_one_that_never_comes_to_rest_ends_by_count_or_by_time(self) -> None:
        wild = [0.02 * (1 + update % 3) for update in range(30)]
        assert not is_warm(wild[:19], ADAPTIVE)
        assert is_warm(wild[:20], ADAPTIVE)
        rough = [3.0, *(0.25 * (1 + 0.1 * (update % 3)) for update in range(10))]
        assert [is_warm(rough[:count], ADAPTIVE) for count in (4, 7, 9)] == [False, False, True]

    @given(st.lists(st.floats(0.001, 10), min_size=1, max_size=40))
    def test_never_below_a_few_updates_nor_above_the_count(self, seconds: list[float]) -> None:
        if is_warm(seconds, ADAPTIVE):
            assert len(seconds) >= 4
        assert is_warm(seconds + [1.0] * 20, ADAPTIVE)


class TestDominated:
    @pytest.mark.parametrize("slower", [0.04, 0.2, 0.6])
    @pytest.mark.parametrize("seconds", [0.002, 0.017, 0.1, 0.26, 0.55])
    def test_a_slower_one_is_stopped_within_three_seconds_of_its_first_update(
        self, seconds: float, slower: float
    ) -> None:
        device = Device(noisy(seconds, 0.004))
        found = device.measure(beat=TARGETS / seconds / (1 - slower))
        assert found.dominated is not None
        assert "are to beat" in found.dominated
        assert device.now - device.heard[0] <= 3.0

    def test_updates_longer_than_that_take_five(self) -> None:
        device = Device(lambda update: 4.0)
        assert device.measure(beat=TARGETS / 3.0).dominated
        assert device.updates == 1 + 4
        device = Device(lambda update: 4.0)
        assert device.measure(beat=TARGETS / 3.8).dominated
        assert device.updates == 1 + 5

    @pytest.mark.parametrize("spread", [0.002, 0.006, 0.012])
    def test_one_that_equals_the_best_is_hardly_ever_stopped(self, spread: float) -> None:
        """Though its own process is one of the slower ones and the bound to beat was a lucky one's."""
        stopped = 0
        for seed in range(200):
            slow_process = math.exp(-random.Random(seed).gauss(0, 0.0025))
            beat = TARGETS / 0.02 * (1 - 0.0125)
            stopped += Device(noisy(0.02 / slow_process, spread, seed)).measure(beat=beat).dominated is not None
        assert stopped <= 2

    def test_one_bad_window_stops_nobody(self) -> None:
        hiccup = Device(lambda update: 0.02 if not 4 <= update < 29 else 0.0215)
        assert hiccup.measure(beat=TARGETS / 0.02 * 0.99).dominated is None

    def test_a_single_window_is_believed_only_far_below(self) -> None:
        assert why_dominated([95.0], Bar(100.0)) is None
        assert why_dominated([89.0], Bar(99.0)) == "at most 98.9 targets/s after 1 window, 99.0 are to beat"
        assert why_dominated([80.0], Bar(100.0)) == "at most 89 targets/s after 1 window, 100 are to beat"
        assert why_dominated([95.0, 95.0], Bar(100.0)) is not None

    def test_without_anything_to_beat_nobody_is(self) -> None:
        assert why_dominated([1e-9] * 20, Bar()) is None

    @given(st.lists(st.floats(90, 110), min_size=1, max_size=12), st.floats(95, 120))
    def test_a_noisier_device_stops_no_more_of_them(self, rates: list[float], beat: float) -> None:
        if why_dominated(rates, Bar(beat, process_spread=0.01)):
            assert why_dominated(rates, Bar(beat, process_spread=0.001))

    @given(st.lists(st.floats(90, 110), min_size=1, max_size=20), st.floats(0, 20))
    def test_there_is_always_an_end(self, rates: list[float], seconds: float) -> None:
        enough = is_enough(rates, 0, seconds, Bar(100.0), ADAPTIVE)
        assert enough or len(rates) < ADAPTIVE.most_windows
        assert not enough or len(rates) >= ADAPTIVE.windows

    def test_close_ones_have_no_more_updates_than_by_count(self) -> None:
        protocol = Protocol(version="adaptive", updates_per_window=40)
        found = Device(noisy(0.02, 0.02)).measure(protocol, beat=TARGETS / 0.02)
        updates = [window.updates for window in found.windows]
        assert sum(updates) >= 3 * 40 > sum(updates[:-1])


@settings(max_examples=50)
@given(st.floats(1e-4, 10), st.floats(1e-5, 10))
def test_as_many_updates_as_fill_the_time(seconds: float, each: float) -> None:
    count = updates_to_fill(seconds, each)
    assert count >= 1
    assert count * each >= seconds * (1 - 1e-12)
    assert count == 1 or (count - 1) * each < seconds


def test_a_clock_that_stands_still_takes_one_update() -> None:
    assert updates_to_fill(0.5, 0.0) == 1


class Sensors:
    """Notes when it is asked."""

    def __init__(self, device: Device) -> None:
        self.device, self.asked = device, list[tuple[str, int, bool]]()

    def begin(self) -> None:
        self._note("begin")

    def read(self) -> GpuState:
        self._note("read")
        return GpuState(sm_clock_mhz=1980)

    def _note(self, what: str) -> None:
        self.asked.append((what, self.device.updates, self.device._queued == 0.0))
        self.device.now += 100.0  # slow on purpose: none of it may count


def test_sensors_are_read_at_a_windows_end_outside_the_timed_part() -> None:
    device = Device(lambda update: 0.1)
    sensors = Sensors(device)
    found = measure(device, Protocol(warmup_updates=2, updates_per_window=4), clock=lambda: device.now, sensors=sensors)
    assert sensors.asked == [
        ("begin", 2, True), ("read", 6, True), ("begin", 6, True), ("read", 10, True),
        ("begin", 10, True), ("read", 14, True),
    ]  # fmt: skip
    assert [window.seconds for window in found.windows] == pytest.approx([0.4] * 3)
    assert [window.gpu for window in found.windows] == [GpuState(sm_clock_mhz=1980)] * 3
    assert all(one.timestamp <= other.timestamp for one, other in pairwise(found.windows))
