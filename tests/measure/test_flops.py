"""Operations a target, against a count of the real model's; peaks by device name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tinyllm_ray.config import load, preset_names
from tinyllm_ray.measure.flops import flop_per_target, peak_flops
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import initialize
from tinyllm_ray.sections import ModelConfig

BF16 = torch.bfloat16


def counted(shape: ModelConfig, rows: int = 3) -> dict[str, int]:
    """FLOP of forward and backward pass that PyTorch counts, by operator.

    The math backend computes attention as plain products over every pair of positions, masked ones too.
    """
    model = initialize(shape, seed=0)
    tokens = torch.zeros(rows, shape.context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_backend("math"):
        model.loss(tokens, tokens).backward()
    totals = counter.get_flop_counts()["Global"]
    return {str(operator): flop for operator, flop in totals.items()}


class TestModel:
    @pytest.mark.parametrize(
        "shape",
        [
            ModelConfig(layers=2, width=32, heads=4, ffn=48, context=16, vocab_size=61),
            ModelConfig(layers=3, width=24, heads=2, ffn=80, context=40, vocab_size=7),
            ModelConfig(layers=1, width=8, heads=1, ffn=8, context=64, vocab_size=2),
        ],
    )
    def test_is_what_pytorch_counts_with_attention_at_half(self, shape: ModelConfig) -> None:
        flop, targets = counted(shape), 3 * shape.context
        attention = flop.pop("aten.bmm")
        assert set(flop) == {"aten.mm"}, "every other product is a matrix times the batch"
        assert flop["aten.mm"] + attention // 2 == flop_per_target(shape) * targets
        assert attention == 12 * shape.layers * shape.width * shape.context * targets

    def test_20m_at_context_1024_takes_138_million(self) -> None:
        assert flop_per_target(load("20m").model) == 138_117_120
        assert 32_768 * flop_per_target(load("20m").model) == pytest.approx(4.53e12, rel=1e-3)

    @pytest.mark.parametrize("preset", preset_names())
    def test_is_near_six_times_the_parameters(self, preset: str) -> None:
        model = load(preset).model
        assert 1.0 < flop_per_target(model) / (6 * model.parameters) < 1.15


class TestDevice:
    @pytest.mark.parametrize(
        ("name", "tflops"),
        [
            ("NVIDIA GH200 480GB", 989.5),
            ("NVIDIA H200", 989.5),
            ("NVIDIA H100 80GB HBM3", 989.5),
            ("NVIDIA H100 PCIe", 756.5),
            ("NVIDIA H100 NVL", 835.5),
            ("NVIDIA A100-SXM4-80GB", 312),
            ("A100-SXM4-40GB", 312),
            ("NVIDIA A100 80GB PCIe", 312),
            ("NVIDIA A10", 125),
            ("NVIDIA L4", 121),
            ("NVIDIA L40S", 362.05),
            ("NVIDIA GeForce RTX 3090", 71),
            ("NVIDIA GeForce RTX 4090", 165.2),
            ("NVIDIA B200", 2250),
        ],
    )
    def test_has_its_data_sheets_dense_peak(self, name: str, tflops: float) -> None:
        assert peak_flops(name, BF16) == pytest.approx(tflops * 1e12)

    @pytest.mark.parametrize(
        "name",
        [
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
            "NVIDIA A100-SXM-64GB",  # Leonardo's own, with more cores
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA GeForce RTX 3090 Ti",
            "NVIDIA A10G",
            "NVIDIA H20",
            "NVIDIA H2000",
            "Tesla V100-SXM2-32GB",
            "AMD Instinct MI300X",
            "cpu",
            "",
        ],
    )
    def test_of_another_name_has_none(self, name: str) -> None:
        assert peak_flops(name, BF16) is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8])
    def test_has_none_in_another_dtype(self, dtype: torch.dtype) -> None:
        assert peak_flops("NVIDIA H200", dtype) is None
