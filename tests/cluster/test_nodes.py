"""What Slurm gave each node, from its own words."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm_ray.cluster.nodes import Share, count_cpus, expand_nodes, job_field, parse_shares
from tinyllm_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "names"),
    {
        "linux[1,2]": ["linux1", "linux2"],
        "alpha,beta,gamma": ["alpha", "beta", "gamma"],
        "host[001,003-004,006]": ["host001", "host003", "host004", "host006"],
        "gh[9-11],login": ["gh9", "gh10", "gh11", "login"],
        "gh[098-101]-ib": ["gh098-ib", "gh099-ib", "gh100-ib", "gh101-ib"],
        "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
        "one": ["one"],
    }.items(),
)
def test_a_node_list_has_its_nodes_with_their_zeros(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", ",", "a,,b", "a[1", "a]1[", "a[]", "a[2-1]", "a[x]", "a[1-999999999]", "a b"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of Slurm nodes"):
        expand_nodes(text)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20), st.integers(1, 5))
def test_numbers_in_brackets_come_back(numbers: list[int], width: int) -> None:
    inside = ",".join(f"{number:0{width}d}" for number in numbers)
    assert expand_nodes(f"n[{inside}]") == [f"n{number:0{width}d}" for number in numbers]


@given(st.text(max_size=40))
def test_any_text_is_a_list_or_a_mistake(text: str) -> None:
    with suppress(ConfigError):
        assert expand_nodes(text)


def test_processors_are_counted() -> None:
    assert [count_cpus(ids) for ids in ("0", "0-3", "0-3,8,10-11")] == [1, 4, 7]
    with pytest.raises(ConfigError):
        count_cpus("all")


# Slurm 22.05, `scontrol show job --details --oneliner`, shortened.
JOB = (
    "JobId=7 JobName=my job UserId=root(0) Account=(null) QOS=(null) JobState=RUNNING Reason=None TimeLimit=00:05:00 "
    "NodeList=gh[2,9-10] BatchHost=gh2 NumNodes=3 JOB_GRES=gpu:9 "
    "Nodes=gh[9-10] CPU_IDs=0-1 Mem=3000 GRES=gpu:4(IDX:0-3) Nodes=gh2 CPU_IDs=0-143,288 Mem=0 "
    "GRES=gpu:h100:1(IDX:2),shard:8 "
    "MinCPUsNode=2 Command=/home/a b/j.sh WorkDir=/home/a b StdOut=/home/a b/tinyllm-7.log Power= "
)


def test_every_node_has_its_own_share_and_the_head_is_the_first_of_the_list() -> None:
    assert parse_shares(JOB) == [
        Share("gh2", cpus=145, gpus=1, memory_mib=0),
        Share("gh9", cpus=2, gpus=4, memory_mib=3000),
        Share("gh10", cpus=2, gpus=4, memory_mib=3000),
    ]


def test_a_node_without_gpus_has_none() -> None:
    assert parse_shares("NodeList=n1 Nodes=n1 CPU_IDs=0 Mem=100 GRES= MinCPUsNode=1")[0].gpus == 0


def test_a_job_that_is_nowhere_has_no_shares() -> None:
    with pytest.raises(ConfigError, match="is it running"):
        parse_shares("JobId=7 JobState=PENDING NodeList=(null)")


def test_a_field_may_hold_spaces_and_one_that_says_nothing_is_none() -> None:
    assert job_field(JOB, "StdOut") == "/home/a b/tinyllm-7.log"
    assert job_field(JOB, "JobName") == "my job"
    assert [job_field(JOB, name) for name in ("Account", "Reason", "Power", "Nothing")] == [None] * 4
