"""What selfcheck says of recorded machines, and of this one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_machines import gh200, gh200_four, two_sockets

from tinyllm_ray.cluster.__main__ import build_parser, main
from tinyllm_ray.cluster.selfcheck import Check, check_host, worst
from tinyllm_ray.cluster.selfcheck_facts import Disk, Facts, disk, file_system, gather
from tinyllm_ray.cluster.selfcheck_gpu import check_gpus, torch_command
from tinyllm_ray.measure.numa import gpu_addresses, numa_nodes

GIB = 2**30


def gpu(**changes: Any) -> dict[str, Any]:
    """A GH200's fields as `measure.environment` has them, and what selfcheck asks beside."""
    fields: dict[str, Any] = {
        "index": 0,
        "name": "NVIDIA GH200 120GB",
        "uuid": "GPU-6a34",
        "total_memory_mib": 97871,
        "used_memory_mib": 512,
        "driver": "580.65.06",
        "temperature_celsius": 31,
        "power_watts": 71.05,
        "power_limit_watts": 900.0,
        "sm_clock_mhz": 345,
        "mig_mode": "Disabled",
        "most_clock_mhz": 1980.0,
        "default_watts": 900.0,
        "throttle_reasons": ["gpu_idle"],
    }
    return fields | changes


def seen(count: int, problem: str | None = None) -> list[dict[str, Any]]:
    return [{"name": "NVIDIA GH200 120GB", "capability": "9.0", "problem": problem}] * count


def torch_facts(version: str = "2.13.0+cu130", cuda: str | None = "13.0", gpus: int = 1) -> dict[str, Any]:
    return {"version": version, "cuda": cuda, "available": gpus > 0, "devices": seen(gpus)}


def superchip(tmp_path: Path, **changes: Any) -> Facts:
    """One GH200 where all is well."""
    root = gh200(tmp_path)
    facts = Facts(
        python="3.12.13",
        machine="aarch64",
        page_bytes=65536,
        nodes=numa_nodes(root),
        pci_gpus=gpu_addresses(root),
        policy_bound=False,
        smi_gpus=[gpu()],
        driver_cuda="13.0",
        torch=torch_facts(),
        ray={"version": "2.60.0", "problem": None},
        limits={"NOFILE": 65536, "NPROC": None, "AS": None, "FSIZE": None},
        c_compiler="gcc",
        cpp_compiler="g++",
        cores=(72, 72),
    )
    return replace(facts, **changes)


def checks(facts: Facts) -> dict[str, Check]:
    return {check.name: check for check in [*check_gpus(facts), *check_host(facts)]}


def test_a_gh200_where_all_is_well_has_nothing_to_do(tmp_path: Path) -> None:
    found = checks(superchip(tmp_path))
    assert worst(found.values()) == "ok"
    assert [check.remedy for check in found.values() if check.remedy] == []
    assert found["pages"].value == "64 KB, and Ray 2.60.0 runs with them"
    assert found["numa"].value == ("node 0: 480 GiB, processors 0-71; GPU memory: nodes 1; host memory is kept off it")
    assert found["gpu 0"].value == "345 of 1980 MHz, 71 of 900 W"


def test_four_superchips_memory_is_told_apart(tmp_path: Path) -> None:
    nodes = numa_nodes(gh200_four(tmp_path / "four"))
    found = checks(superchip(tmp_path / "one", nodes=nodes))
    assert "GPU memory: nodes 4,12,20,28" in found["numa"].value


def test_an_ordinary_server_says_nothing_of_gpu_memory(tmp_path: Path) -> None:
    nodes = numa_nodes(two_sockets(tmp_path / "two"))
    found = checks(superchip(tmp_path / "one", nodes=nodes))
    assert found["numa"].value == "node 0: 256 GiB, processors 0-15, node 1: 256 GiB, processors 16-31"


@pytest.mark.parametrize(
    ("driver", "build"),
    [
        ("13.2", "cu130"),
        ("13.0", "cu130"),
        ("12.9", "cu128"),
        ("12.8", "cu128"),
        ("12.6", "cu126"),
        ("12.2", "cu126"),
        (None, "cu126"),
    ],
)
def test_torch_without_cuda_gets_the_command_that_fits_the_driver(
    tmp_path: Path, driver: str | None, build: str
) -> None:
    found = checks(superchip(tmp_path, torch=torch_facts("2.13.0+cpu", None, 0), driver_cuda=driver))
    assert found["torch"].state == "fail"
    assert found["torch"].value == "2.13.0+cpu, CPU only, on a machine with GPUs"
    assert found["torch"].remedy == (
        f"{sys.executable} -m pip install --force-reinstall 'torch>=2.9' "
        f"--index-url https://download.pytorch.org/whl/{build}"
    )


def test_a_driver_before_cuda_12_is_too_old_for_any(tmp_path: Path) -> None:
    found = checks(superchip(tmp_path, driver_cuda="11.8", smi_gpus=[gpu(driver="520.61.05")]))
    assert found["driver"].state == "fail"
    assert "525 or later" in found["driver"].remedy
    assert torch_command("11.8") == ""


def test_torch_of_a_later_cuda_than_the_drivers_fails(tmp_path: Path) -> None:
    found = checks(superchip(tmp_path, driver_cuda="12.8", torch=torch_facts(gpus=0)))
    assert found["torch"].state == "fail"
    assert found["torch"].remedy.endswith("/cu128")
    # Within CUDA 12 an older driver runs a newer build.
    found = checks(superchip(tmp_path / "b", driver_cuda="12.6", torch=torch_facts("2.11.0+cu128", "12.8")))
    assert found["torch"].state == "ok"


def test_a_device_on_which_a_product_fails_is_named_with_the_reason(tmp_path: Path) -> None:
    broken = torch_facts() | {"devices": seen(1, "no kernel image is available for execution on the device")}
    found = checks(superchip(tmp_path, torch=broken))
    assert found["torch"].state == "fail"
    assert "(9.0) fails: no kernel image" in found["torch"].value


@pytest.mark.parametrize(
    "found", [{"problem": "ModuleNotFoundError: No module named 'torch' (status 1)"}, torch_facts("2.8.0")]
)
def test_a_torch_that_is_missing_or_too_old_fails(tmp_path: Path, found: dict[str, Any]) -> None:
    check = checks(superchip(tmp_path, torch=found))["torch"]
    assert check.state == "fail"
    assert check.remedy.endswith("/cu130")


def test_gpus_without_a_driver_fail_and_say_how_to_get_them(tmp_path: Path) -> None:
    facts = superchip(tmp_path, smi_gpus=None, smi_problem="nvidia-smi is not there", torch=torch_facts(gpus=0))
    found = checks(facts)
    assert found["driver"].state == "fail"
    assert found["driver"].value == "1 GPUs on the bus; nvidia-smi is not there"
    assert "--gpus-per-node" in found["driver"].remedy


@pytest.mark.parametrize(
    ("visible", "listed", "used", "state"),
    [(None, 4, 4, "ok"), ("1", 4, 1, "ok"), ("", 4, 0, "fail"), (None, 4, 0, "fail"), (None, 4, 3, "warn")],
)
def test_what_torch_sees_is_held_against_what_there_is(
    tmp_path: Path, visible: str | None, listed: int, used: int, state: str
) -> None:
    facts = superchip(tmp_path, visible=visible, smi_gpus=[gpu()] * listed, torch=torch_facts(gpus=used))
    check = checks(facts)["visible"]
    assert check.state == state
    assert f"PyTorch sees {used} of {listed} GPUs, CUDA_VISIBLE_DEVICES " in check.value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"used_memory_mib": 40000}, "40000 MiB are in use; somebody else measures there too"),
        ({"throttle_reasons": ["gpu_idle", "hw_power_brake_slowdown"]}, "held by hw_power_brake_slowdown"),
        ({"power_limit_watts": 450.0}, "below the default of 900 W"),
        ({"throttle_reasons": ["applications_clocks_setting"]}, "clocks are set by hand"),
    ],
)
def test_a_gpu_whose_figures_would_suffer_is_a_warning(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    check = checks(superchip(tmp_path, smi_gpus=[gpu(**changes)]))["gpu 0"]
    assert check.state == "warn"
    assert said in str(check)


def test_unknown_sensors_are_no_warning(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("power_watts", "power_limit_watts", "sm_clock_mhz", "throttle_reasons", "used_memory_mib"))
    check = checks(superchip(tmp_path, smi_gpus=[gpu(**unknown)]))["gpu 0"]
    assert (check.state, check.value) == ("ok", "? of 1980 MHz, ? of ? W")


def test_devices_of_two_kinds_or_in_slices_are_a_warning(tmp_path: Path) -> None:
    found = checks(superchip(tmp_path / "a", smi_gpus=[gpu(), gpu(name="NVIDIA H200")], torch=torch_facts(gpus=2)))
    assert found["gpus"].value == "1 x NVIDIA GH200 120GB, 1 x NVIDIA H200"
    assert found["gpus"].state == "warn"
    assert checks(superchip(tmp_path / "b", smi_gpus=[gpu(mig_mode="Enabled")]))["gpus"].state == "warn"


def test_a_ray_that_does_not_run_with_64_kb_pages_names_both(tmp_path: Path) -> None:
    ray = {"version": "2.3.0", "problem": "<jemalloc>: Unsupported system page size"}
    found = checks(superchip(tmp_path, ray=ray))
    assert found["pages"].value == "64 KB, Ray 2.3.0 does not start"
    assert found["ray"].value == "2.3.0: <jemalloc>: Unsupported system page size"
    assert {found["pages"].state, found["ray"].state} == {"fail"}


def test_memory_that_cannot_be_bound_is_a_warning_with_the_command(tmp_path: Path) -> None:
    check = checks(superchip(tmp_path, policy_bound=None))["numa"]
    assert check.state == "warn"
    assert check.remedy.endswith("numactl --membind=0")


@pytest.mark.parametrize(
    ("free", "state"), [(int(0.1 * GIB), "fail"), (GIB // 2, "warn"), (2 * GIB, "ok"), (None, "fail")]
)
def test_a_place_without_room_fails_or_warns(tmp_path: Path, free: int | None, state: str) -> None:
    place = Disk("out", "/studies", free, "ext4", "Read-only file system" if free is None else None)
    check = checks(superchip(tmp_path, disks=[place]))["out"]
    assert check.state == state
    assert "/studies" in check.value


def test_a_compile_cache_on_a_network_file_system_is_a_warning_and_tokens_there_are_not(tmp_path: Path) -> None:
    places = [Disk(use, "/lustre/x", 100 * GIB, "lustre") for use in ("compiled", "tokens")]
    found = checks(superchip(tmp_path, disks=places))
    assert (found["compiled"].state, found["tokens"].state) == ("warn", "ok")


def test_limits_are_refused_by_their_names(tmp_path: Path) -> None:
    limits = {"NOFILE": 1024, "NPROC": 512, "AS": 2**33, "FSIZE": None}
    found = checks(superchip(tmp_path, limits=limits, threads=100))
    assert (found["open files"].state, found["open files"].value) == ("warn", "RLIMIT_NOFILE 1024")
    assert (found["threads"].state, found["threads"].value) == ("fail", "RLIMIT_NPROC 512, 100 in use")
    assert found["address space"].value == f"RLIMIT_AS {2**33}"
    assert "file size" not in found


def test_a_gpu_needs_a_c_compiler_and_a_cpu_a_cpp_compiler(tmp_path: Path) -> None:
    assert checks(superchip(tmp_path / "a", c_compiler=None, cpp_compiler=None))["compiler"].state == "fail"
    assert checks(superchip(tmp_path / "b", cpp_compiler=None))["compiler"].state == "ok"
    assert checks(superchip(tmp_path / "c", python_header=False))["Python.h"].state == "fail"
    laptop = Facts(torch=torch_facts("2.13.0+cpu", None, 0), ray={"version": "2.60.0"})
    assert checks(laptop)["compiler"].state == "warn"


def test_a_laptop_needs_no_gpu(tmp_path: Path) -> None:
    laptop = Facts(
        torch=torch_facts("2.13.0+cpu", None, 0), ray={"version": "2.60.0"}, cpp_compiler="g++", cores=(8, 8)
    )
    found = checks(laptop)
    assert worst(found.values()) == "ok"
    assert found["driver"].value == "no NVIDIA GPU; studies run on the CPU"
    assert not {"visible", "gpus", "Python.h"} & set(found)


SMI = """#!/bin/sh
case "$*" in
*clocks.max.sm*) printf '1980\\n1980\\n';;
*power.default_limit*) exit 6;;
*query-gpu*) echo "0, NVIDIA GH200 120GB, GPU-6a34, 97871, 512, 580.65.06, 31, 71.05, 900.00, 345, [N/A]"
             echo "1, NVIDIA GH200 120GB, GPU-77aa, 97871, 0, 580.65.06, 30, [Unknown Error], 900.00, 345, Disabled";;
topo*) ;;
*) echo "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |";;
esac
"""


def test_a_machine_is_read_through_its_files_and_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    root = gh200(tmp_path / "root")
    (root / "proc/17").mkdir()
    import os

    (root / "proc/17/status").write_text(f"Name:\tx\nUid:\t{os.getuid()}\t0\t0\t0\nThreads:\t7\n")
    (root / "proc/18").mkdir()
    (root / "proc/18/status").write_text(f"Name:\tx\nUid:\t{os.getuid() + 1}\t0\t0\t0\nThreads:\t90\n")
    facts = gather({"out": tmp_path}, root, {"CUDA_VISIBLE_DEVICES": "1"})
    assert facts.driver_cuda == "13.0"
    assert facts.smi_gpus is not None
    assert [one["most_clock_mhz"] for one in facts.smi_gpus] == [1980.0, 1980.0]
    assert "default_watts" not in facts.smi_gpus[0]
    assert facts.visible == "1"
    assert facts.pci_gpus == ["0009:01:00.0"]
    assert facts.threads == 7
    assert facts.torch["version"]
    assert facts.ray["problem"] is None, "Ray's own server runs here"
    assert checks(facts)["torch"].remedy.endswith("/cu130") or facts.torch["cuda"]


def test_a_place_that_is_not_there_yet_is_asked_where_it_would_be(tmp_path: Path) -> None:
    found = disk("out", tmp_path / "a" / "b")
    assert found.free_bytes
    assert found.free_bytes > 0
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert disk("out", tmp_path / "file" / "x").problem == "Not a directory"


def test_the_longest_mount_tells_the_file_system(tmp_path: Path) -> None:
    mounts = f"/dev/a / ext4 rw\nserver:/x {tmp_path} lustre rw\nproc {tmp_path}x tmpfs rw\n"
    assert file_system(tmp_path / "deep", mounts) == "lustre"
    assert file_system(Path("/etc"), mounts) == "ext4"
    assert file_system(tmp_path, "") is None


def test_the_command_says_a_line_a_check_and_ends_with_3_where_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [Check("torch", "fail", "CPU only", "install it"), Check("pages", "ok", "4 KB")]
    monkeypatch.setattr("tinyllm_ray.cluster.selfcheck_command.check", lambda options: lines)
    assert main(["selfcheck", "--measure", "--bundle", str(tmp_path / "b")]) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["fail  torch          CPU only; install it", "ok    pages          4 KB"]
    assert printed[2] == "1 ok, 0 warn, 1 fail"
    assert not (tmp_path / "b").exists()
    assert main(["selfcheck", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "fail"
    assert told["checks"][0]["remedy"] == "install it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measure", "--budget", "20"], "--budget: '20' is not a duration"),
        (["--bundle", "b.tar.gz"], "--bundle b.tar.gz: nothing is measured; add --measure, or leave --bundle out"),
        (["--budget", "5m"], "--budget 5m: nothing is measured"),
        (["--processes", "4"], "--processes 4: nothing is measured"),
        (["--address", "head:6379"], "--address head:6379: nothing is measured"),
        (["--measure", "--processes", "1"], "--processes: 1 is not allowed; give 3 or more"),
        (["--measure", "--bundle", "/"], "--bundle: / is there already"),
        (["--measure", "--bundle", "nowhere/b.tar.gz"], "nowhere is no folder"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selfcheck", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_help_says_what_was_never_seen_on_a_real_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["selfcheck", "--help"])
    assert "faked answers only" in capsys.readouterr().out


def test_other_actions_do_not_wait_for_selfchecks_imports() -> None:
    code = "import sys, tinyllm_ray.cluster.__main__; print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
