"""What repeats say about a device's noise, and what a figure is worth with it."""

import math
import random
from statistics import fmean

import pytest
from noisy_device import NoisyDevice, a_record

from tinyllm_ray.measure.bounds import PROCESS_SPREAD, UNKNOWN_NOISE
from tinyllm_ray.measure.need import CONFIDENCE
from tinyllm_ray.protocol import Protocol
from tinyllm_ray.records import Device, Fate
from tinyllm_ray.search.noise import (
    MOST_DEGREES,
    NoiseOfWindows,
    Spread,
    bar_of,
    device_name,
    learned_spread,
    record_bounds,
    spread_of,
)
from tinyllm_ray.search.rates import noise_share


def repeats(count: int, spread: float, drift: float = 0.0, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [1e6 * math.exp(generator.gauss(0, spread) + drift * at) for at in range(count)]


class TestSpread:
    def test_without_repeats_the_prior_stands(self) -> None:
        assert learned_spread([]) == learned_spread([[1e6]]) == Spread()

    @pytest.mark.parametrize("spread", [0.0005, 0.003, 0.03])
    def test_many_repeats_outweigh_the_prior(self, spread: float) -> None:
        found = learned_spread([repeats(40, spread, seed=seed) for seed in range(5)])
        assert found.value == pytest.approx(spread, rel=0.3)
        assert found.degrees == 4 + 5 * 39

    def test_two_that_agree_by_chance_change_little(self) -> None:
        assert learned_spread([[1e6, 1e6]]).value > 0.8 * PROCESS_SPREAD

    def test_a_drift_does_not_count_as_noise(self) -> None:
        """1% in ten controls; about their mean they spread by 0.3%."""
        assert learned_spread([repeats(10, 0.0, drift=0.001)] * 20).value < 0.001

    def test_groups_are_compared_within_themselves_only(self) -> None:
        assert learned_spread([[1e6, 1e6], [2e6, 2e6]]).value < PROCESS_SPREAD

    def test_of_records_by_execution_device_and_protocol(self) -> None:
        def record(identity: str, rate: float, device: str = "GPU-1", **fields: object) -> object:
            return a_record(identity, device=device, targets_per_second=rate, protocol=Protocol(), **fields)

        noisy = [record("a", rate) for rate in (1.00e6, 1.03e6)]
        others = [
            record("b", 2e6),
            record("a", 5e6, device="GPU-2"),
            record("a", 7e6, fate=Fate.DOMINATED),
            a_record("a", targets_per_second=9e6, protocol=Protocol(version="adaptive", least_seconds=60.0)),
        ]
        found = spread_of([noisy[0], *others, noisy[1]])  # type: ignore[list-item]
        assert found == learned_spread([[1.00e6, 1.03e6]])


class TestBar:
    def test_is_the_lower_bound_of_the_best(self) -> None:
        record = NoisyDevice(seed=3).measure("a", 0.0, Protocol())
        bounds = record_bounds(record, None, CONFIDENCE, NoiseOfWindows(()).of_record(record))
        assert bounds is not None
        assert bar_of(record).targets_per_second == bounds.low < bounds.rate == record.targets_per_second
        assert bar_of(record, Spread(0.01, 10)).process_spread == 0.01
        slow = bar_of(record, device_ratio=0.97).targets_per_second
        assert slow == pytest.approx(0.97 * bounds.low)

    def test_there_is_none_without_a_best_or_without_its_windows(self) -> None:
        assert bar_of(None).targets_per_second is None
        assert bar_of(a_record("a")).targets_per_second is None


def test_devices_are_told_apart_by_their_uuid_or_else_their_host() -> None:
    cpu = Device(kind="cpu", name="EPYC", host="here")
    assert device_name(a_record("a", device="GPU-7")) == "GPU-7"
    assert device_name(a_record("a").model_copy(update={"devices": [cpu]})) == "cpu of here"
    assert device_name(a_record("a").model_copy(update={"devices": []})) == ""


class TestNoiseOfWindows:
    def test_comes_to_what_the_devices_windows_do_whatever_executions_they_are_of(self) -> None:
        """A half range of 1.6% of three windows is a standard deviation of 1.9%."""
        device = NoisyDevice(half_range=0.016, drift_per_hour=0.0, outliers=0.0)
        records = [device.measure(str(number), number / 10, Protocol()) for number in range(200)]
        assert NoiseOfWindows(records).of(1.7).spread == pytest.approx(0.0189, rel=0.1)

    def test_shorter_windows_are_noisier_by_the_root_of_their_length(self) -> None:
        noise = NoiseOfWindows([NoisyDevice(half_range=0.016).measure("a", 0.0, Protocol())])
        assert noise.of(0.5).spread == pytest.approx(noise.of(2.0).spread * 2)
        record = NoisyDevice().measure("a", 0.0, Protocol())
        assert noise.of_record(record) == noise.of(record.windows[0].seconds)

    def test_nothing_known_is_what_other_devices_did_and_one_window_tells_nothing(self) -> None:
        record = NoisyDevice().measure("a", 0.0, Protocol(windows=1))
        for known in ([], [record], [a_record("a", windows=[])]):
            assert NoiseOfWindows(known).of(0.5) == UNKNOWN_NOISE

    def test_many_windows_are_worth_no_more_than_some_for_another_process(self) -> None:
        device = NoisyDevice()
        records = [device.measure("a", 0.0, Protocol()) for _ in range(50)]
        assert NoiseOfWindows(records[:2]).of(1.0).degrees == UNKNOWN_NOISE.degrees + 4
        assert NoiseOfWindows(records).of(1.0).degrees == MOST_DEGREES


def test_many_short_windows_are_no_wider_a_tie_than_three_long_ones() -> None:
    """Their range grows with their number, what is known of their median does not."""
    device = NoisyDevice(drift_per_hour=0.0, outliers=0.0)
    by_count, by_need = Protocol(), Protocol(version="adaptive", windows=10)
    shares = [[noise_share(device.measure("a", 0.0, protocol)) for _ in range(300)] for protocol in (by_count, by_need)]
    assert fmean(shares[0]) == pytest.approx(0.005, rel=0.1)
    assert fmean(shares[1]) == pytest.approx(fmean(shares[0]), rel=0.1)
