"""Kernels are found, counted and told apart: names as an H200 recorded them, operators as this machine runs them."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

from tinyllm_ray.config import Config, validate
from tinyllm_ray.execution import SdpaBackend
from tinyllm_ray.measure.kernel_names import attention_backend_of, categorize
from tinyllm_ray.measure.kernels import (
    KernelProfile,
    _Totals,
    attention_backend,
    by_category,
    match,
    record_kernels,
)
from tinyllm_ray.records import KernelCategory, KernelTime
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.yamlfile import read_mapping

H200 = read_mapping(Path(__file__).with_name("h200_kernels.yaml"))
CPU = torch.device("cpu")

BF16 = "c10::BFloat16"
NATIVE = "void at::native::(anonymous namespace)::"


def kernels_named(*names: str, launches: float = 1.0) -> list[KernelTime]:
    return [KernelTime(name=name, category=categorize(name), milliseconds=1.0, launches=launches) for name in names]


class TestNames:
    @pytest.mark.parametrize("category", H200["categories"])
    def test_kernels_of_an_h200_have_their_category(self, category: str) -> None:
        found = {name: categorize(name) for name in H200["categories"][category]}
        assert found == dict.fromkeys(found, category)

    def test_every_recorded_kernel_is_under_test(self) -> None:
        known = {name for names in H200["categories"].values() for name in names}
        assert known == {name for execution in H200["executions"].values() for name in execution["kernels"]}
        assert set(H200["categories"]) == set(get_args(KernelCategory))

    @pytest.mark.parametrize(
        ("name", "category"),
        [
            ("Memcpy HtoD (Pinned -> Device)", "copy"),
            ("Memset (Device)", "copy"),
            ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", "matmul"),
            (f"void cutlass::Kernel2<cutlass_80_tensorop_{BF16}_s16816gemm_128x128_32x4_nn_align8>(Params)", "matmul"),
            ("void gemv2T_kernel_val<int, int, float, float>(cublasGemvParamsEx)", "matmul"),
            ("triton_tem_fused__to_copy_mm_silu_t_view_3", "matmul"),
            ("triton_tem_fused_flex_attention_0", "attention_forward"),
            ("triton_tem_fused_flex_attention_backward_2", "attention_backward"),
            (
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(Params)",
                "attention_forward",
            ),
            (
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<int>>>(Params)",
                "attention_backward",
            ),
            (f"{NATIVE}softmax_warp_forward<float, float, float, 10, false, false>(float*)", "attention_forward"),
            (f"{NATIVE}softmax_warp_forward<float, float, float, 10, false, true>(float*)", "attention_forward"),
            (f"{NATIVE}softmax_warp_forward<float, float, float, 10, true, false>(float*)", "loss"),
            (f"{NATIVE}softmax_warp_forward<float, float, float, (int)10, (bool)1, (bool)0>(float*)", "loss"),
            (f"{NATIVE}softmax_warp_backward<float, {BF16}, float, 10, false, false>(float*)", "attention_backward"),
            (
                f"{NATIVE}cunn_SoftMaxForward<4, float, float, float, {NATIVE}SoftMaxForwardEpilogue>",
                "attention_forward",
            ),
            (f"{NATIVE}cunn_SoftMaxForward<4, float, float, float, {NATIVE}LogSoftMaxForwardEpilogue>", "loss"),
            (f"{NATIVE}cunn_SoftMaxBackward<4, float, float, float, {NATIVE}LogSoftMaxBackwardEpilogue>", "loss"),
            (f"{NATIVE}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*)", "loss"),
            (f"void at::native::vectorized_elementwise_kernel<8, {NATIVE}silu_kernel(int)::lambda>", "activation"),
            (f"{NATIVE}multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
            ("triton_per_fused__safe_softmax_add_scalar_tensor_tril_where_2", "attention_forward"),
            ("triton_red_fused__softmax__to_copy_prepare_softmax_online_2", "attention_forward"),
            ("triton_red_fused_prepare_softmax_online_14", "loss"),
            ("triton_per_fused__softmax_backward_data_mul_5", "attention_backward"),
            ("triton_poi_fused_cos_mul_sin_0", "rotary"),
            ("triton_poi_fused_add_mul_neg_slice_stack_7", "rotary"),
            ("triton_per_fused_add_embedding_mean_mul_pow_rsqrt_0", "norm"),
            ("triton_red_fused_add_embedding_dense_backward_mul_3", "other"),
            ("triton_poi_fused__scaled_dot_product_cudnn_attention_backward_stack_transpose_4", "copy"),
            ("tinyllm_attention_forward", "attention_forward"),
            ("tinyllm_attention_backward_dq", "attention_backward"),
            ("tinyllm_cross_entropy_backward", "loss"),
            ("tinyllm_linear_cross_entropy", "loss"),
            ("tinyllm_linear_swiglu", "matmul"),
            ("triton_poi_fused_addmm_relu_1", "activation"),
            ("tinyllm_clip_norm", "optimizer"),
            ("tinyllm_rms_norm_forward", "norm"),
            ("tinyllm_swiglu_backward", "activation"),
            ("tinyllm_rotary", "rotary"),
            ("linear_cross_entropy_forward", "loss"),
            ("_loss_and_gradient", "loss"),
            ("_add_rms_norm_backward", "norm"),
            ("_norm_scale_gradient", "norm"),
            ("rotary_backward_0", "rotary"),
            ("_swiglu", "activation"),
            ("_update_columns", "optimizer"),
            ("_flat_adamw", "optimizer"),
            ("_gradient_norm", "optimizer"),
            ("_collect", "optimizer"),
            ("_settle", "optimizer"),
            ("_update", "optimizer"),
            ("tinyllm_norm_backward", "norm"),
            ("tinyllm_swiglu_forward", "activation"),
            ("triton_flex_attention_backward_3", "attention_backward"),
            ("aten::addmm", "matmul"),
            ("aten::_fused_adamw_", "optimizer"),
            ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention_backward"),
            ("aten::_log_softmax_backward_data", "loss"),
            ("a_kernel_of_tomorrow", "other"),
        ],
    )
    def test_whole_names_have_their_category(self, name: str, category: str) -> None:
        assert categorize(name) == category

    @pytest.mark.parametrize(
        "name",
        [
            # Inductor names what rearranges attention's result after attention, whatever kernel computed it.
            "triton_poi_fused__scaled_dot_product_flash_attention_backward_stack_transpose_9",
            "triton_poi_fused__scaled_dot_product_efficient_attention_transpose_view_3",
            "cpp_fused__scaled_dot_product_flash_attention_for_cpu_backward_transpose_view_4",
            "triton_red_fused__log_softmax__to_copy_prepare_softmax_online_view_15",
            "aten::_log_softmax",
            "aten::scaled_dot_product_attention",
            "tinyllm_attention_forward",
        ],
    )
    def test_some_names_are_no_evidence_of_a_backend(self, name: str) -> None:
        assert attention_backend_of(name) is None


class TestBackends:
    @pytest.mark.parametrize("execution", H200["executions"].values(), ids=H200["executions"])
    def test_what_an_h200_ran_is_told_from_what_was_asked(self, execution: dict[str, Any]) -> None:
        kernels = kernels_named(*execution["kernels"])
        assert attention_backend(kernels) == {execution["ran"]}
        for backend in ("auto", "flash", "cudnn", "efficient", "math"):
            reason = match(backend, kernels)
            assert (reason is None) == (backend in ("auto", execution["ran"])), backend

    @pytest.mark.parametrize(
        ("backend", "names"),
        [
            (
                "flash3",
                [
                    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(Params)",
                    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<int>>>(Params)",
                    "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<int>>(Params)",
                    "void cutlass::device_kernel<flash::FlashAttnBwdPostprocessConvertdQ<int>>(Params)",
                ],
            ),
            (
                "flash4",
                [
                    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o",
                    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor000",
                    "kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object",
                    "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_object",
                ],
            ),
            ("flex", ["triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_backward_2"]),
            ("flex", ["triton_flex_attention_7", "triton_poi_fused_flex_attention_backward_zeros_1"]),
        ],
    )
    def test_attention_that_a_library_or_a_template_brings(self, backend: str, names: list[str]) -> None:
        kernels = kernels_named(*names)
        assert attention_backend(kernels) == {backend}
        assert {asked for asked in get_args(SdpaBackend) if match(asked, kernels) is None} == {"auto", backend}

    def test_a_foreign_graph_is_named(self) -> None:
        kernels = kernels_named(*H200["executions"]["compiled efficient over a foreign cache"]["kernels"])
        reason = match("efficient", kernels)
        assert reason is not None
        assert reason.startswith("sdpa_backend efficient: cudnn ran: cudnn_generated_fort_native_sdpa_sm90_flash_")
        assert "\n" not in reason

    def test_a_second_backend_beside_the_asked_one_is_a_mismatch(self) -> None:
        kernels = kernels_named("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_safe_softmax")
        assert match("flash", kernels) == "sdpa_backend flash: math ran beside flash: aten::_safe_softmax"
        assert match("auto", kernels) is None

    @pytest.mark.parametrize("requested", ["auto", "flash", "math"])
    def test_attention_without_a_trace_is_not_proved(self, requested: str) -> None:
        kernels = kernels_named("nvjet_sm90_tst_64x64", "triton_red_fused__log_softmax_1")
        assert match(requested, kernels) == f"sdpa_backend {requested}: no attention among 2 recorded kernels"

    def test_math_compiled_for_a_cpu_is_known_by_its_batched_products(self) -> None:
        kernels = kernels_named("aten::mm", "## Call CompiledFxGraph fgdka ##", "aten::bmm")
        assert attention_backend(kernels) == {"math"}
        assert match("flash", kernels) == "sdpa_backend flash: math ran: batched products"

    def test_batched_products_beside_flash_are_no_attention(self) -> None:
        kernels = kernels_named("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::bmm")
        assert attention_backend(kernels) == {"flash"}


class TestSums:
    @dataclass
    class Event:
        name: str
        device: str
        microseconds: float
        self_cpu_time_total: float = 0.0
        is_user_annotation: bool | None = False

        @property
        def device_type(self) -> Any:
            return SimpleNamespace(name=self.device)

        @property
        def time_range(self) -> Any:
            return SimpleNamespace(elapsed_us=lambda: self.microseconds)

    def test_device_events_are_summed_by_name_over_the_updates(self) -> None:
        totals = _Totals()
        kernel, other = "nvjet_sm90_tst_64x64", "triton_poi_fused_cat_1"
        totals.add([self.Event(kernel, "CUDA", 100.0), self.Event(other, "CUDA", 50.0)], "device")
        totals.add(
            [
                self.Event(kernel, "CUDA", 300.0),
                self.Event("Optimizer.step#AdamW.step", "CUDA", 10_000.0, is_user_annotation=True),
                self.Event("cudaLaunchKernel", "CPU", 7000.0, self_cpu_time_total=7000.0),
                self.Event("aten::mm", "CPU", 8000.0, self_cpu_time_total=10.0),
            ],
            "device",
        )
        assert totals.an_update(2) == [
            KernelTime(name=kernel, category="matmul", milliseconds=0.2, launches=1.0),
            KernelTime(name=other, category="copy", milliseconds=0.025, launches=0.5),
        ]

    def test_operators_count_the_time_in_themselves(self) -> None:
        totals = _Totals()
        totals.add(
            [
                self.Event("aten::linear", "CPU", 9000.0, self_cpu_time_total=1000.0),
                self.Event("aten::mm", "CPU", 8000.0, self_cpu_time_total=8000.0),
                self.Event("autograd::engine::evaluate_function: MmBackward0", "CPU", 1.0, self_cpu_time_total=1.0),
                self.Event("MmBackward0", "CPU", 1.0, self_cpu_time_total=1.0),
            ],
            "operators",
        )
        sums = by_category(totals.an_update(1))
        assert sums["matmul"] == (9.0, 2.0)
        assert sum(launches for _, launches in sums.values()) == 2
        assert set(sums) == set(get_args(KernelCategory))


def tiny_config(**execution: Any) -> Config:
    return validate(
        {
            "model": {"layers": 2, "width": 32, "heads": 4, "ffn": 48, "context": 16, "vocab_size": 61},
            "optimizer": {"peak_learning_rate": 0.01, "betas": [0.9, 0.95]},
            "training": {"tokens_per_update": 128, "token_budget": 12_800, "epochs": 4},
            "execution": {"micro_batch_size": 4, "cpu_threads": 1, **execution},
        },
        "test",
    )


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def profile_of(config: Config, **settings: Any) -> KernelProfile:
    with Trainer(config, None) as trainer:
        trainer.step()
        return record_kernels(trainer.step, trainer.synchronize, trainer.device, **settings)


def launches_of(profile: KernelProfile, name: str) -> float:
    return sum(kernel.launches for kernel in profile.kernels if kernel.name == name)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.skipif(torch.cuda.is_available(), reason="these count what the CPU runs")
class TestUpdates:
    """Real updates of two layers and two micro-batches: four calls of attention each way."""

    @pytest.mark.parametrize("asked", ["auto", "flash"])
    def test_flash_is_seen_and_counted(self, asked: str) -> None:
        profile = profile_of(tiny_config(sdpa_backend=asked), limit_seconds=60.0)
        assert (profile.source, profile.updates) == ("operators", 3)
        assert match(asked, profile.kernels) is None
        assert match("math", profile.kernels) is not None
        assert launches_of(profile, "aten::_scaled_dot_product_flash_attention_for_cpu") == 4
        assert launches_of(profile, "aten::_scaled_dot_product_flash_attention_for_cpu_backward") == 4
        assert launches_of(profile, "aten::_fused_adamw_") == 2  # a call a parameter group

    def test_math_is_seen(self) -> None:
        profile = profile_of(tiny_config(sdpa_backend="math"), updates=1)
        assert match("math", profile.kernels) is None
        assert match("flash", profile.kernels) is not None
        assert launches_of(profile, "aten::bmm") == 4 * 6  # two products forward, four backward

    def test_kernels_come_longest_first_and_time_is_positive(self) -> None:
        times = [kernel.milliseconds for kernel in profile_of(tiny_config(), updates=1).kernels]
        assert times == sorted(times, reverse=True)
        sums = by_category(profile_of(tiny_config(), updates=1).kernels)
        assert all(sums[category][0] > 0 for category in ("matmul", "loss", "norm", "activation", "optimizer"))

    def test_only_the_profiled_updates_are_counted(self) -> None:
        calls: list[str] = []
        x = torch.ones(4, 4)

        def step() -> None:
            calls.append("step")
            x.mm(x)

        profile = record_kernels(step, lambda: calls.append("wait"), CPU, updates=3, limit_seconds=60.0)
        assert calls == ["wait", "step", "wait", "wait", "step", "step", "wait"]
        assert launches_of(profile, "aten::mm") == 1

    @pytest.mark.parametrize(
        ("update_seconds", "updates"), [(0.1, 3), (0.4, 2), (0.5, 2), (0.6, 1), (5.0, 1), (0.0, 3)]
    )
    def test_as_many_updates_run_as_fit_into_the_limit(self, update_seconds: float, updates: int) -> None:
        now = 100.0

        def step() -> None:
            nonlocal now
            now += update_seconds

        profile = record_kernels(step, lambda: None, CPU, updates=3, limit_seconds=1.0, clock=lambda: now)
        assert profile.updates == updates
        assert profile.seconds == pytest.approx(updates * update_seconds)

    def test_nothing_of_the_profiler_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        profile_of(tiny_config(), updates=1)
        gc.collect()
        assert not any(type(thing) is FunctionEvent for thing in gc.get_objects())
        assert list(tmp_path.iterdir()) == []

    def test_a_step_that_raises_leaves_neither_profiler_nor_collector_behind(self) -> None:
        def fail() -> None:
            raise MemoryError

        with pytest.raises(MemoryError):
            record_kernels(fail, lambda: None, CPU)
        assert gc.isenabled()
        assert match("flash", profile_of(tiny_config(), updates=1).kernels) is None


@pytest.mark.gpu
class TestDevice:
    def test_kernels_inside_a_replayed_graph_are_seen(self) -> None:
        x = torch.randn(256, 256, device="cuda")
        graph = replayable(lambda: x.mm(x).mm(x))
        profile = record_kernels(graph.replay, torch.cuda.synchronize, x.device, limit_seconds=60.0)
        assert profile.source == "device"
        assert by_category(profile.kernels)["matmul"][1] >= 2
        assert not any(kernel.name.startswith("cuda") for kernel in profile.kernels)

    @pytest.mark.parametrize("asked", ["flash", "efficient", "math"])
    def test_the_backend_that_was_asked_for_is_seen(self, asked: str) -> None:
        profile = profile_of(tiny_config(sdpa_backend=asked))
        assert match(asked, profile.kernels) is None
        assert match("cudnn", profile.kernels) is not None


def replayable(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
