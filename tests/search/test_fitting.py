import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from study_replay import fitted, recipe

from tinyllm_ray.config import Config, identity, load, validate
from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import ExecutionConfig, needs_gpu
from tinyllm_ray.search.candidate import candidate_number, make_candidate
from tinyllm_ray.search.fitting import fit_space
from tinyllm_ray.search.installed import NEEDED_BY, lacking
from tinyllm_ray.search.space import Space, load_space


def space(factors: dict[str, list[Any]], baseline: dict[str, Any] | None = None, **more: Any) -> Space:
    return Space.model_validate(
        {"name": "t", "baseline": baseline or {"update": "compiled"}, "factors": factors, **more}
    )


def test_execution_on_a_gpu() -> None:
    fit = fitted(load_space("execution"))
    assert fit.notes == ("micro_batch_size: 64, 128 dropped: they do not divide the 32 rows of an update",)
    assert fit.factors["micro_batch_size"] == (4, 8, 16, 32)
    chosen = {"micro_batch_size": 32, "update": "compiled", "compile_mode": "default", "cpu_threads": 8}
    assert fit.baseline == ExecutionConfig().model_dump() | chosen
    assert (fit.parameters, fit.targets_per_update) == (20_403_520, 32_768)
    # 4 sizes x 4 backends x 3 thread counts, eager, compiled in three modes or captured in two; six settings.
    assert len(list(itertools.islice(fit.executions(), 30_000))) == 72 * 6 * 2**6
    kinds = {(one["update"], one["compile_mode"]) for one in fit.executions() if one["update"] == "graph"}
    assert kinds == {("graph", "default"), ("graph", "max-autotune-no-cudagraphs")}


def test_execution_on_a_cpu() -> None:
    fit = fit_space(load_space("execution"), load("nano"), "cpu", cores=2)
    assert fit.baseline["update"] == "eager"
    assert fit.baseline["compile_mode"] is None
    assert (fit.baseline["micro_batch_size"], fit.baseline["cpu_threads"]) == (8, 2)
    assert fit.factors["sdpa_backend"] == ("auto", "flash")
    assert fit.factors["cpu_threads"] == (1,)
    assert fit.notes == (
        "baseline: eager instead of compiled: what a user without a GPU starts with",
        "micro_batch_size: 16, 32, 64, 128 dropped: they do not divide the 8 rows of an update",
        "update: graph dropped: it needs a GPU",
        "sdpa_backend: flash3, flash4, cudnn, efficient dropped: they need a GPU",
        "loss_kernel, norm_kernel, rotary_kernel, activation_kernel, optimizer_kernel: triton dropped: it needs a GPU",
        "residual_dtype: bfloat16 dropped: it needs a GPU",
        "cpu_threads: 4, 8 dropped: 2 CPU cores are available",
    )
    changed = {"micro_batch_size", "update", "compile_mode", "sdpa_backend", "cpu_threads"}
    executions = list(fit.executions())
    assert len(executions) == 17, "the baseline, and 2 sizes, eager and three modes, 2 backends, one thread"
    assert all({key for key in one if one[key] != fit.baseline[key]} <= changed for one in executions)


def test_what_is_not_installed_is_dropped_and_said_once() -> None:
    config = recipe(32)
    fit = fit_space(load_space("execution"), config, "cuda", 8, lacks={"triton"})
    assert fit.notes[-1] == (
        "loss_kernel, norm_kernel, rotary_kernel, activation_kernel, optimizer_kernel: triton dropped: "
        "triton is not installed"
    )
    assert fit.factors["loss_kernel"] == ("torch",)
    asked = space({"sdpa_backend": ["auto", "flash3", "flex"]})
    assert fit_space(asked, config, "cuda", 8, lacks={"flash_attn_interface"}).factors["sdpa_backend"] == (
        "auto",
        "flex",
    )
    assert fit_space(asked, config, "cuda", 8).notes == ()
    assert lacking() <= {"triton", "flash_attn_interface", "flash_attn.cute.interface"}


def test_smoke_fits_nano_on_two_cores_without_a_note() -> None:
    fit = fit_space(load_space("smoke"), load("nano"), "cpu", cores=2)
    assert fit.notes == ()
    assert fit.baseline["cpu_threads"] == 2
    assert len(list(fit.executions())) == 24


@pytest.mark.parametrize(("rows", "size"), [(32, 32), (48, 16), (24, 8), (8, 8), (6, 6), (64, 32)])
def test_the_baselines_micro_batch(rows: int, size: int) -> None:
    assert fit_space(space({"update": ["eager"]}), recipe(rows), "cuda", 4).baseline["micro_batch_size"] == size


@pytest.mark.parametrize(("kind", "cores", "threads"), [("cuda", 64, 8), ("cuda", 6, 6), ("cpu", 64, 64)])
def test_the_baselines_threads(kind: Any, cores: int, threads: int) -> None:
    assert fit_space(space({"update": ["eager"]}), recipe(8), kind, cores).baseline["cpu_threads"] == threads


def test_a_baseline_the_machine_cannot_run_is_changed_and_said() -> None:
    asked = {"update": "compiled", "sdpa_backend": "cudnn", "cpu_threads": 16}
    fit = fit_space(space({"micro_batch_size": [2, 4]}, asked), recipe(8), "cpu", 2)
    assert (fit.baseline["update"], fit.baseline["sdpa_backend"], fit.baseline["cpu_threads"]) == ("eager", "auto", 2)
    assert len(fit.notes) == 3


def test_one_value_is_said_in_the_singular() -> None:
    fit = fit_space(space({"micro_batch_size": [3, 4], "cpu_threads": [1, 2]}), recipe(8), "cuda", 1)
    assert fit.notes == (
        "micro_batch_size: 3 dropped: it does not divide the 8 rows of an update",
        "cpu_threads: 2 dropped: 1 CPU core is available",
    )


def test_null_and_its_value_are_one() -> None:
    fit = fit_space(space({"micro_batch_size": [None, 8, 4], "cpu_threads": [None]}), recipe(8), "cuda", 4)
    assert fit.factors == {"micro_batch_size": (8, 4), "cpu_threads": (4,)}
    assert fit.notes == ("micro_batch_size: null stands for 8 here, tried once",)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (space({"micro_batch_size": [3, 5], "update": ["eager"]}), "none of 3, 5 divides the 8 rows.*1, 2, 4, 8"),
        (space({"update": ["eager"]}, {"micro_batch_size": 3}), "baseline.micro_batch_size: 3 does not divide the 8"),
        (space({"cpu_threads": [4, 8]}), "empty space.*cpu_threads: 4, 8 dropped"),
        (space({"sdpa_backend": ["cudnn"], "cpu_threads": [4]}), "empty space.*it needs a GPU; cpu_threads: 4"),
    ],
)
def test_nothing_left_is_the_users_mistake(asked: Space, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_space(asked, recipe(8), "cpu", cores=2)


def pack(mixed: bool, models: int, rows: int) -> Config:
    """Models with `rows` rows of an update each."""
    mixing = {"topology": "complete", "scheme": "awc"} if mixed else {}
    values = recipe(rows * models if mixed else rows).model_dump(mode="json")
    return validate(values | {"packing": {"models": models, **mixing}}, "test")


@pytest.mark.parametrize("mixed", [True, False])
def test_micro_batches_of_packs_divide_a_models_rows(mixed: bool) -> None:
    asked = space({"micro_batch_size": [8, 16, 32]})
    fit = fit_space(asked, pack(mixed, 4, 16), "cuda", 4)
    assert (fit.baseline["micro_batch_size"], fit.factors["micro_batch_size"]) == (16, (8, 16))
    assert fit.notes == ("micro_batch_size: 32 dropped: it does not divide the 16 rows of a model in an update",)
    assert fit.targets_per_update == 4 * 16 * 256, "an update's cost is that of all models"
    with pytest.raises(ConfigError, match="none of 3 divides the 16 rows of a model in an update; write some of 1, 2"):
        fit_space(space({"micro_batch_size": [3]}), pack(mixed, 4, 16), "cuda", 4)


def test_modes_that_packs_do_not_run_in_are_dropped() -> None:
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    asked = space({"compile_mode": modes}, {"update": "compiled", "compile_mode": "max-autotune"})
    fit = fit_space(asked, pack(True, 4, 16), "cuda", 4)
    assert (fit.baseline["compile_mode"], fit.factors["compile_mode"]) == ("default", (modes[0], modes[3]))
    assert fit.notes == (
        "baseline: compile mode default instead of max-autotune: packed models replay no CUDA graphs",
        "compile_mode: reduce-overhead, max-autotune dropped: packed models replay no CUDA graphs",
    )
    assert fit_space(asked, recipe(16), "cuda", 4).notes == ()


def test_a_graph_captures_no_graphs() -> None:
    modes = ["default", "reduce-overhead", "max-autotune"]
    asked = space({"update": ["compiled", "graph"], "compile_mode": modes}, {"update": "compiled"})
    found = [(one["update"], one["compile_mode"]) for one in fit_space(asked, recipe(16), "cuda", 4).executions()]
    graphs = [("graph", "default"), ("graph", "max-autotune-no-cudagraphs")]
    assert sorted(found) == sorted([("compiled", mode) for mode in modes] + graphs)


def test_packs_have_an_optimizer_kernel_of_their_own() -> None:
    asked = space({"optimizer_kernel": ["torch", "triton"], "update": ["eager", "compiled"]})
    fit = fit_space(asked, pack(True, 2, 8), "cuda", 4)
    assert fit.notes == ("optimizer_kernel: triton dropped: packed models have a kernel of their own",)
    with pytest.raises(ConfigError, match=r"optimizer_kernel triton is for one model, and packing\.models is 2"):
        pack(True, 2, 8).with_execution({"optimizer_kernel": "triton"})


def test_what_determinism_forbids_is_dropped_where_the_space_leaves_no_choice() -> None:
    factors = {"sdpa_backend": ["auto", "cudnn"], "compile_mode": ["default", "max-autotune"]}
    asked = space(factors, {"update": "compiled", "deterministic": True})
    fit = fit_space(asked, recipe(8), "cuda", 4)
    assert fit.notes == (
        "sdpa_backend: cudnn dropped: deterministic forbids it",
        "compile_mode: max-autotune dropped: deterministic forbids it",
    )
    assert list(fit.executions()) == [fit.baseline]
    packed = fit_space(asked, pack(True, 2, 8), "cuda", 4)
    assert packed.factors["compile_mode"] == ("default",)


def test_what_determinism_forbids_runs_without_it_where_that_is_varied() -> None:
    asked = space({"deterministic": [False, True], "sdpa_backend": ["auto", "cudnn"]})
    found = {(one["deterministic"], one["sdpa_backend"]) for one in fit_space(asked, recipe(8), "cuda", 4).executions()}
    assert found == {(False, "auto"), (True, "auto"), (False, "cudnn")}
    eager = space({"deterministic": [True], "update": ["eager", "compiled"], "compile_mode": ["max-autotune"]})
    found = {(one["update"], one["deterministic"]) for one in fit_space(eager, recipe(8), "cuda", 4).executions()}
    assert found == {("compiled", False), ("eager", True)}


def test_processes_are_captured_by_no_graph() -> None:
    asked = space({"update": ["compiled", "graph"], "packed_backward": ["at_once", "processes"]})
    found = {
        (one["update"], one["packed_backward"]) for one in fit_space(asked, pack(True, 2, 8), "cuda", 4).executions()
    }
    assert found == {("compiled", None), ("graph", None), ("compiled", "processes")}
    with pytest.raises(ConfigError, match="update graph captures an update within one process"):
        pack(True, 2, 8).with_execution({"update": "graph", "packed_backward": "processes"})


def test_the_way_backward_is_varied_for_packs_alone() -> None:
    asked = space({"packed_backward": [None, "at_once", "one_by_one"], "micro_batch_size": [16, 32]})
    fit = fit_space(asked, pack(True, 4, 32), "cuda", 4)
    found = {(one["micro_batch_size"], one["packed_backward"]) for one in fit.executions()}
    assert found == {(32, None), (32, "at_once"), (16, None), (16, "one_by_one")}, "null is what a size has anyway"
    assert len(list(fit.executions())) == 4
    labels = [make_candidate(1, fit.settle({"packed_backward": how})).label for how in ("at_once", "one_by_one")]
    assert labels == [
        "mb32 compiled default auto t4 packed_backward=at_once",
        "mb32 compiled default auto t4",
    ]
    alone = fit_space(asked, recipe(32), "cuda", 4)
    assert alone.notes == ("packed_backward: null, at_once, one_by_one dropped: the recipe has one model",)
    assert {one["packed_backward"] for one in alone.executions()} == {None}
    with pytest.raises(ConfigError, match=r"empty space.*the recipe has one model"):
        fit_space(space({"packed_backward": ["at_once"]}), recipe(32), "cuda", 4)


@pytest.mark.parametrize("mixed", [True, False])
def test_every_execution_of_a_pack_is_allowed_by_its_recipe(mixed: bool) -> None:
    config = pack(mixed, 2, 8)
    fit = fit_space(load_space("execution"), config, "cuda", 8)
    executions = list(fit.executions())
    # Two sizes, six backends, three thread counts, five settings: eager, compiled, and captured in one mode each.
    assert len(executions) == 2 * 6 * 3 * 2**5 * 3
    for execution in executions[:: len(executions) // 97]:
        config.with_execution(execution)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("preset", ["packed4-20m-awc", "packed8-20m-awc"])
def test_the_space_of_packs_names_nothing_that_their_recipes_refuse(preset: str, kind: Any) -> None:
    config = load(preset)
    fit = fit_space(load_space("packed"), config, kind, 8)
    executions = list(fit.executions())
    ways = {(one["update"], config.with_execution(one).packed_backward) for one in executions}
    updates = ("eager", "compiled", "graph") if kind == "cuda" else ("eager", "compiled")
    every = {(update, way) for update in updates for way in ("at_once", "one_by_one", "processes")}
    assert ways == every - {("graph", "processes")}


def test_a_factor_that_does_not_count_keeps_the_baselines_value() -> None:
    asked = space(
        {"cpu_threads": [1, 2], "update": ["eager", "compiled"], "compile_mode": ["default", "max-autotune"]},
        when={"compile_mode": {"update": "compiled"}, "cpu_threads": {"compile_mode": "max-autotune"}},
    )
    fit = fit_space(asked, recipe(8), "cuda", 4)
    assert fit.settle({"update": "eager", "compile_mode": "max-autotune", "cpu_threads": 1})["cpu_threads"] == 4
    assert fit.settle({"update": "compiled", "cpu_threads": 1})["cpu_threads"] == 4
    assert fit.settle({"update": "compiled", "compile_mode": "max-autotune", "cpu_threads": 1})["cpu_threads"] == 1
    assert len(list(fit.executions())) == 1 + 1 + 2  # eager, default, max-autotune with two thread counts


def test_an_eager_baseline_lends_compiled_candidates_a_mode_of_the_space() -> None:
    asked = space({"update": ["compiled"], "compile_mode": ["max-autotune"]})
    assert fit_space(asked, recipe(8), "cpu", 2).settle({"update": "compiled"})["compile_mode"] == "max-autotune"


def test_ids_and_labels() -> None:
    fit = fitted()
    candidate = make_candidate(1, fit.baseline)
    assert candidate.id == "c01-mb32-compiled-default-auto-t8"
    assert candidate.label == "mb32 compiled default auto t8"
    assert candidate.execution_identity == identity(fit.baseline)
    eager = make_candidate(12, fit.settle({"update": "eager", "prefetch_depth": 2}))
    assert (eager.id, eager.label) == ("c12-mb32-eager-auto-t8-prefetch_depth-2", "mb32 eager auto t8 prefetch_depth=2")
    assert [candidate_number(name) for name in (candidate.id, eager.id, "c123-x", "trial_3")] == [1, 12, 123, None]


VALUES: dict[str, list[Any]] = {
    "micro_batch_size": [None, 1, 2, 3, 4, 6, 8, 16],
    "update": ["eager", "compiled", "graph"],
    "compile_mode": [None, "default", "reduce-overhead", "max-autotune"],
    "sdpa_backend": ["auto", "flash", "cudnn", "efficient", "math"],
    "cpu_threads": [None, 1, 2, 3, 8],
    "prefetch_depth": [0, 1, 2],
    "loss_kernel": ["torch", "triton"],
    "norm_kernel": ["torch", "triton"],
    "optimizer_kernel": ["torch", "triton"],
    "residual_dtype": ["float32", "bfloat16"],
    "recompute_activations": [False, True],
    "deterministic": [False, True],
    "packed_backward": [None, "at_once", "one_by_one"],
}
WHENS: list[dict[str, Any]] = [
    {},
    {"compile_mode": {"update": "compiled"}},
    {"compile_mode": {"update": ["compiled", "graph"]}},
    {"cpu_threads": {"update": ["eager"]}, "compile_mode": {"update": "compiled"}},
    {"prefetch_depth": {"compile_mode": ["default"]}, "compile_mode": {"update": "compiled"}},
    {"sdpa_backend": {"micro_batch_size": [1, 8], "update": "compiled"}},
]


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, unique=True))
    factors = {key: draw(st.lists(st.sampled_from(VALUES[key]), min_size=1, unique=True)) for key in keys}
    baseline = {
        "update": draw(st.sampled_from(VALUES["update"])),
        "loss_kernel": draw(st.sampled_from(VALUES["loss_kernel"])),
        "sdpa_backend": draw(st.sampled_from(["auto", "math"])),
        "deterministic": draw(st.sampled_from([False, True])),
    }
    return space(factors, baseline, when=draw(st.sampled_from(WHENS)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=spaces(),
    rows=st.sampled_from([1, 6, 8, 48]),
    kind=st.sampled_from(["cuda", "cpu"]),
    cores=st.integers(1, 9),
    lacks=st.sampled_from([(), ("triton",)]),
)
def test_every_execution_of_any_space_can_run_and_stands_once(
    asked: Space, rows: int, kind: Any, cores: int, lacks: tuple[str, ...]
) -> None:
    assert Space.model_validate_json(asked.model_dump_json()) == asked
    try:
        fit = fit_space(asked, recipe(rows), kind, cores, lacks)
    except ConfigError:
        return
    executions = list(itertools.islice(fit.executions(), 300))
    assert executions[0] == fit.baseline
    assert len({identity(execution) for execution in executions}) == len(executions)
    for execution in executions:
        assert ExecutionConfig.model_validate(execution).model_dump(mode="json") == execution
        assert rows % execution["micro_batch_size"] == 0
        assert execution["cpu_threads"] <= cores
        changed = {key: value for key, value in execution.items() if value != fit.baseline[key]}
        assert not any(NEEDED_BY.get(item) in lacks for item in changed.items())
        assert kind == "cuda" or not any(needs_gpu(key, value) for key, value in execution.items())
        for key, conditions in asked.when.items():
            if any(execution[other] not in values for other, values in conditions.items()) and key != "compile_mode":
                assert execution[key] == fit.baseline[key]
        for key, value in execution.items():
            allowed = {*fit.factors.get(key, ()), fit.baseline[key]}
            assert value in allowed or key == "compile_mode"
