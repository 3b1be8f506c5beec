"""Ports of one job, and the address that the others reach."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.cluster.addresses import (
    PORTS_A_JOB,
    address_towards,
    free_ports,
    is_free,
    own_address,
    port_blocks,
    require_answer,
)
from tinyllm_ray.errors import ConfigError, TinyllmRayError


@given(st.integers(0, 2**31), st.integers(1, 4999))
def test_jobs_near_each_other_have_no_port_in_common_and_none_is_the_systems(job: int, apart: int) -> None:
    one, other = next(port_blocks(job)), next(port_blocks(job + apart))
    assert len(one) == len(set(one)) == PORTS_A_JOB
    assert not set(one) & set(other)
    assert all(1024 <= port < 32_768 for block in port_blocks(job) for port in block)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_block_with_a_listener_in_it_is_passed_over(host: str) -> None:
    blocks = port_blocks(4321)
    first, second = next(blocks), next(blocks)
    with socket.create_server((host, first[2])):
        assert not is_free(first[2])
        assert free_ports(4321, lambda port: port not in first or is_free(port)) == second
    assert is_free(first[2])


def test_where_none_is_free_the_ports_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no 4 free ports for job 0 .*10000, 10001"):
        free_ports(0, lambda port: False)


def test_an_interface_gives_its_address_and_one_that_is_not_there_lists_those_that_are() -> None:
    assert own_address("anything", "lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"interface 'hsn9' has no IPv4 address .*\blo\b"):
        own_address("anything", "hsn9")


def test_a_name_that_leads_to_another_host_or_nowhere_is_not_taken() -> None:
    here = address_towards("192.0.2.1") or "127.0.0.1"
    assert own_address("name.invalid", None) == here
    assert own_address("192.0.2.77", None) == here
    assert own_address("localhost", None) == here


def test_a_head_that_answers_late_is_waited_for_and_one_that_does_not_is_named_with_both_ends() -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))  # nobody listens, so that it refuses at once
        port = head.getsockname()[1]
        refused = (
            rf"^the head at 127\.0\.0\.1:{port} does not answer 127\.0\.0\.1 \(lo\) within 20 s: Connection refused; "
        )
        with pytest.raises(TinyllmRayError, match=refused):
            require_answer(f"127.0.0.1:{port}", "127.0.0.1", clock=lambda: now[0], sleep=sleep)
        assert sum(pauses) == 19.0

        def listen(seconds: float) -> None:
            head.listen()

        require_answer(f"127.0.0.1:{port}", "127.0.0.1", clock=lambda: now[0], sleep=listen)
