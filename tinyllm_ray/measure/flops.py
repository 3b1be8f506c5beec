"""How many floating-point operations a model takes, and how many a device can make: the two sides of utilisation.

Model FLOP utilisation is targets a second x `flop_per_target` / `peak_flops` (Chowdhery et al., PaLM, arXiv 2204.02311,
appendix B).
"""

from typing import Final

import torch

from tinyllm_ray.sections import ModelConfig

_PEAK_TFLOPS: Final = {
    # NVIDIA A100 data sheet: 312 for SXM and PCIe.
    "A100-SXM4-40GB": 312.0,
    "A100-SXM4-80GB": 312.0,
    "A100-PCIE-40GB": 312.0,
    "A100 80GB PCIe": 312.0,
    # NVIDIA A10, A30 and A40 data sheets.
    "A10": 125.0,
    "A30": 165.0,
    "A40": 149.7,
    # NVIDIA Ampere GA102 white paper, tables of the RTX 3090 and the A6000: bf16 with float32 accumulation.
    "GeForce RTX 3090": 71.0,
    "RTX A6000": 154.8,
    # NVIDIA Ada white paper, table of the RTX 4090: bf16 with float32 accumulation.
    "GeForce RTX 4090": 165.2,
    # NVIDIA L4, L40 and L40S data sheets: 242, 362 and 733 with sparsity.
    "L4": 121.0,
    "L40": 181.05,
    "L40S": 362.05,
    # NVIDIA H100 data sheets: 1,979 (SXM), 1,513 (PCIe) and 1,671 (NVL) with sparsity.
    "H100 80GB HBM3": 989.5,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    # NVIDIA H200 data sheet: 1,979 (SXM) and 1,671 (NVL) with sparsity.
    "H200": 989.5,
    "H200 NVL": 835.5,
    # NVIDIA GH200 data sheet: 1,979 with sparsity, whichever memory.
    "GH200 120GB": 989.5,
    "GH200 480GB": 989.5,
    "GH200 144G HBM3e": 989.5,
    # NVIDIA HGX B200 and GB200 NVL72 data sheets: 36,000 for 8 and 360,000 for 72 GPUs with sparsity.
    "B200": 2250.0,
    "GB200": 2500.0,
}
"""Dense bf16 tensor core TFLOP/s by the name CUDA gives, without `NVIDIA`; half where a sheet counts sparsity alone."""


def flop_per_target(model: ModelConfig) -> int:
    """Floating-point operations of forward and backward pass for one target; a multiply-add is two.

    6 M + 6 L W T, for M weights in matrix products (the output projection is one, though it is tied; the embedding's
    look-up and the norms are none), L layers, width W and context T. The first term is 2 forward and 4 backward; the
    second is PaLM's 12 L H Q T for attention, halved, since a causal mask leaves half of the scores. Recomputation in
    the backward pass is no model FLOP. 20m at context 1024 takes 138 MFLOP.
    """
    matrices = model.layers * (4 * model.width**2 + 3 * model.width * model.ffn) + model.vocab_size * model.width
    return 6 * matrices + 6 * model.layers * model.width * model.context


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second that a device's data sheet promises for dense matrix products in `dtype`.

    `device_name` is what `torch.cuda.get_device_name` prints. None for any device that is not
    known by exactly this name (one that resembles it may be a part of the device, like `... MIG 1g.10gb`, or a
    laptop's, or another market's), and for any dtype but bf16.
    """
    if dtype != torch.bfloat16:
        return None
    tflops = _PEAK_TFLOPS.get(device_name.removeprefix("NVIDIA "))
    return None if tflops is None else tflops * 1e12
