"""Mixing matrices against those written out, what all of them keep, and the averaging itself."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.train.mixing import consensus_distance, consensus_weights, mix, mixing_matrix, mixing_period, weaken

TOPOLOGIES = ("complete", "one_peer_ring", "one_peer_exponential")
WORKERS = (1, 2, 3, 4, 5, 8, 16)

h = 0.5
WRITTEN: dict[tuple[str, int], list[Any]] = {
    ("one_peer_ring", 1): [[[1]]],
    ("one_peer_ring", 2): [[[h, h], [h, h]]],
    ("one_peer_ring", 3): [
        [[h, h, 0], [h, h, 0], [0, 0, 1]],
        [[1, 0, 0], [0, h, h], [0, h, h]],
        [[h, 0, h], [0, 1, 0], [h, 0, h]],
    ],
    ("one_peer_ring", 4): [
        [[h, h, 0, 0], [h, h, 0, 0], [0, 0, h, h], [0, 0, h, h]],
        [[h, 0, 0, h], [0, h, h, 0], [0, h, h, 0], [h, 0, 0, h]],
    ],
    ("one_peer_ring", 5): [
        [[h, h, 0, 0, 0], [h, h, 0, 0, 0], [0, 0, h, h, 0], [0, 0, h, h, 0], [0, 0, 0, 0, 1]],
        [[1, 0, 0, 0, 0], [0, h, h, 0, 0], [0, h, h, 0, 0], [0, 0, 0, h, h], [0, 0, 0, h, h]],
        [[h, 0, 0, 0, h], [0, 1, 0, 0, 0], [0, 0, h, h, 0], [0, 0, h, h, 0], [h, 0, 0, 0, h]],
        [[h, h, 0, 0, 0], [h, h, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, h, h], [0, 0, 0, h, h]],
        [[h, 0, 0, 0, h], [0, h, h, 0, 0], [0, h, h, 0, 0], [0, 0, 0, 1, 0], [h, 0, 0, 0, h]],
    ],
    ("one_peer_exponential", 1): [[[1]]],
    ("one_peer_exponential", 2): [[[h, h], [h, h]]],
    ("one_peer_exponential", 3): [[[h, h, 0], [0, h, h], [h, 0, h]], [[h, 0, h], [h, h, 0], [0, h, h]]],
    ("one_peer_exponential", 4): [
        [[h, h, 0, 0], [0, h, h, 0], [0, 0, h, h], [h, 0, 0, h]],
        [[h, 0, h, 0], [0, h, 0, h], [h, 0, h, 0], [0, h, 0, h]],
    ],
    ("one_peer_exponential", 5): [
        [[h, h, 0, 0, 0], [0, h, h, 0, 0], [0, 0, h, h, 0], [0, 0, 0, h, h], [h, 0, 0, 0, h]],
        [[h, 0, h, 0, 0], [0, h, 0, h, 0], [0, 0, h, 0, h], [h, 0, 0, h, 0], [0, h, 0, 0, h]],
        [[h, 0, 0, 0, h], [h, h, 0, 0, 0], [0, h, h, 0, 0], [0, 0, h, h, 0], [0, 0, 0, h, h]],
    ],
}
"""Every matrix of a cycle, in order."""

PEERS: dict[tuple[str, int], list[list[int]]] = {
    ("one_peer_ring", 8): [[1, 0, 3, 2, 5, 4, 7, 6], [7, 2, 1, 4, 3, 6, 5, 0]],
    ("one_peer_exponential", 8): [[1, 2, 3, 4, 5, 6, 7, 0], [2, 3, 4, 5, 6, 7, 0, 1], [4, 5, 6, 7, 0, 1, 2, 3]],
    ("one_peer_ring", 16): [
        [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14],
        [15, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 0],
    ],
    ("one_peer_exponential", 16): [
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0],
        [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1],
        [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3],
        [8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7],
    ],
}
"""Whom each worker takes half of."""


class TestMatrix:
    @pytest.mark.parametrize(("topology", "workers"), WRITTEN)
    def test_equals_the_one_written_out_cycle_after_cycle(self, topology: str, workers: int) -> None:
        cycle = WRITTEN[topology, workers]
        assert mixing_period(topology, workers) == len(cycle)
        for update in range(2 * len(cycle) + 1):
            expected = np.array(cycle[update % len(cycle)], dtype=float)
            np.testing.assert_allclose(mixing_matrix(topology, workers, update), expected, rtol=1e-6)

    @pytest.mark.parametrize(("topology", "workers"), PEERS)
    def test_takes_half_of_the_peer_written_out(self, topology: str, workers: int) -> None:
        cycle = PEERS[topology, workers]
        assert mixing_period(topology, workers) == len(cycle)
        for update, peers in enumerate(cycle * 2):
            expected = 0.5 * np.eye(workers) + 0.5 * np.eye(workers)[peers]
            np.testing.assert_allclose(mixing_matrix(topology, workers, update), expected, rtol=1e-6)

    @pytest.mark.parametrize("workers", WORKERS)
    def test_complete_gives_everyone_the_average(self, workers: int) -> None:
        assert mixing_period("complete", workers) == 1
        for update in range(3):
            found = mixing_matrix("complete", workers, update)
            np.testing.assert_allclose(found, np.full((workers, workers), 1 / workers), rtol=1e-6)

    @given(
        topology=st.sampled_from(TOPOLOGIES),
        workers=st.integers(1, 40),
        update=st.integers(0, 10**9),
        weight=st.floats(0, 1),
    )
    def test_rows_and_columns_sum_to_one_however_weak(
        self, topology: str, workers: int, update: int, weight: float
    ) -> None:
        matrix = mixing_matrix(topology, workers, update)
        for one in (matrix, weaken(matrix, weight)):
            assert one.min() >= 0
            np.testing.assert_allclose(one.sum(axis=0), 1, rtol=1e-12)
            np.testing.assert_allclose(one.sum(axis=1), 1, rtol=1e-12)
        assert np.array_equal(matrix, mixing_matrix(topology, workers, update + mixing_period(topology, workers)))

    @given(workers=st.integers(2, 40), update=st.integers(0, 100))
    def test_ring_averages_pairs_of_neighbours_and_at_most_one_rests(self, workers: int, update: int) -> None:
        matrix = mixing_matrix("one_peer_ring", workers, update)
        assert np.array_equal(matrix, matrix.T)
        assert (np.diag(matrix) == 1).sum() == workers % 2
        for one, other in zip(*np.nonzero(matrix), strict=True):
            assert (one - other) % workers in (0, 1, workers - 1)

    @given(workers=st.integers(3, 40), update=st.integers(0, 100))
    def test_ring_changes_everyones_side_from_update_to_update(self, workers: int, update: int) -> None:
        before, after = (mixing_matrix("one_peer_ring", workers, update + offset) for offset in (0, 1))
        peers = [np.where(one - np.diag(np.diag(one)) > 0) for one in (before, after)]
        assert not set(zip(*peers[0], strict=True)) & set(zip(*peers[1], strict=True))

    @pytest.mark.parametrize("workers", [2, 4, 8, 16])
    def test_a_cycle_of_exponential_hops_is_the_exact_average_of_a_power_of_two(self, workers: int) -> None:
        product = np.eye(workers)
        for update in range(mixing_period("one_peer_exponential", workers)):
            product = mixing_matrix("one_peer_exponential", workers, update) @ product
        np.testing.assert_allclose(product, 1 / workers, rtol=1e-12)

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("workers", WORKERS)
    def test_mixing_alone_reaches_consensus(self, topology: str, workers: int) -> None:
        values = np.arange(float(workers))
        for update in range(40 * workers):
            values = mixing_matrix(topology, workers, update) @ values
        np.testing.assert_allclose(values, (workers - 1) / 2, atol=1e-3)

    def test_an_unknown_name_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r"'ring'.*complete, one_peer_ring, one_peer_exponential"):
            mixing_matrix("ring", 4, 0)

    def test_no_workers_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="0 models"):
            mixing_period("complete", 0)


class TestConsensus:
    def test_fades_with_the_rate_from_its_start_on(self) -> None:
        rates = [0.5, 1.0, 0.8, 0.4, 0.2]
        assert consensus_weights(rates, 0.4, 2.0) == pytest.approx([1, 1, 1, 0.25, 0.0625])
        assert consensus_weights(rates, 0.41, 1.0) == pytest.approx([1, 1, 1, 1, 0.5])
        assert consensus_weights(rates, 0.0, 1.0) == pytest.approx(rates)

    def test_begins_at_the_written_fraction(self) -> None:
        """0.07 x 100 is 7.000000000000001 in doubles, whose ceiling is 8."""
        weights = consensus_weights([100.0 - at for at in range(100)], 0.07, 1.0)
        assert weights[:8] == [1.0] * 8
        assert weights[8] == pytest.approx(92 / 93)

    @pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
    def test_power_zero_and_rates_of_zero_leave_mixing_whole(self, fraction: float) -> None:
        assert consensus_weights([1.0, 0.5, 0.0, 0.0], fraction, 0.0) == [1.0] * 4
        assert consensus_weights([0.0, 0.0], fraction, 2.0) == [1.0] * 2

    def test_never_begins_at_a_fraction_of_one(self) -> None:
        assert consensus_weights([1.0, 0.1], 1.0, 1.0) == [1.0, 1.0]

    def test_a_weak_matrix_keeps_its_share_at_home(self) -> None:
        found = weaken(mixing_matrix("complete", 4, 0), 0.4)
        np.testing.assert_allclose(found, np.full((4, 4), 0.1) + 0.6 * np.eye(4), rtol=1e-12)


class TestMix:
    @staticmethod
    def weights(workers: int, dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(workers, *shape, generator=generator).to(dtype) for shape in ((5, 7), (3,), (1, 2, 2))]

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("workers", WORKERS)
    def test_row_i_of_the_matrix_makes_worker_i(self, topology: str, workers: int) -> None:
        matrix = mixing_matrix(topology, workers, 1)
        found = self.weights(workers, torch.float64)
        before = [weight.clone() for weight in found]
        mix(found, torch.from_numpy(matrix))
        for weight, old in zip(found, before, strict=True):
            for worker in range(workers):
                expected = sum(matrix[worker, other] * old[other] for other in range(workers))
                torch.testing.assert_close(weight[worker], torch.as_tensor(expected), rtol=1e-12, atol=1e-12)

    def test_stays_exact_under_autocast_and_fast_products(self) -> None:
        workers = 4
        matrix = torch.from_numpy(mixing_matrix("complete", workers, 0))
        found, expected = self.weights(workers, torch.float32), self.weights(workers, torch.float64)
        for weight in expected:
            weight.copy_(weight.float())
        mix(expected, matrix)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            with torch.autocast("cpu", torch.bfloat16):
                mix(found, matrix.float())
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)
        for weight, other in zip(found, expected, strict=True):
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight.double(), other, rtol=1e-6, atol=1e-7)

    def test_parameters_stay_where_they_are(self) -> None:
        weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        place = weight.data_ptr()
        mix([weight], torch.full((2, 2), 0.5))
        assert weight.data_ptr() == place
        assert weight.grad_fn is None
        assert weight.tolist() == [[2.0, 4.0], [2.0, 4.0]]


class TestDistance:
    def test_is_the_root_mean_square_of_all_weights_apart_from_the_average(self) -> None:
        rng = np.random.default_rng(0)
        shapes = [(3, 4, 5), (3, 7)]
        weights = [rng.normal(1, 0.01, shape) for shape in shapes]
        flat = np.concatenate([weight.reshape(3, -1) for weight in weights], axis=1)
        mean = flat.mean(0)
        expected = np.sqrt(np.mean(np.linalg.norm(flat - mean, axis=1) ** 2)) / np.linalg.norm(mean)
        packed = [torch.from_numpy(weight) for weight in weights]
        found = consensus_distance(packed, [weight.mean(0) for weight in packed])
        assert found.item() == pytest.approx(expected, rel=1e-12)
        single = [weight.float() for weight in packed]
        assert consensus_distance(single, [weight.mean(0) for weight in single]).item() == pytest.approx(expected, 1e-4)

    def test_of_models_in_consensus_is_zero(self) -> None:
        weights = torch.ones(4, 3, 2)
        assert consensus_distance([weights], [weights.mean(0)]).item() == 0


def test_periods_grow_with_the_logarithm_of_the_workers() -> None:
    for workers in range(2, 65):
        period = mixing_period("one_peer_exponential", workers)
        assert 2 ** (period - 1) < workers <= 2**period
        assert period == (math.ceil(math.log2(workers)))
