"""The flat kernels through Triton's compiler for a GPU that need not be there."""

import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tinyllm_ray.train import flat_kernel  # noqa: E402
from tinyllm_ray.train.flat_kernel import BLOCK, place  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
MATRICES, SCALES = place((2 * BLOCK, BLOCK, BLOCK)), place((64, 64))


def assembler(kernel: Any, types: dict[str, Any], constants: dict[str, Any]) -> str:
    """PTX of a kernel for arguments of these types; pointers are multiples of 16 bytes, as PyTorch's are."""
    names = [parameter.name for parameter in kernel.params]
    aligned = [["tt.divisibility", 16]]
    attributes = {}
    for at, name in enumerate(names):
        kind = types.get(name)
        if isinstance(kind, tuple):
            attributes |= {(at, number): aligned for number in range(len(kind))}
        elif kind is not None and kind.startswith("*"):
            attributes[(at,)] = aligned
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    text: str = triton.compile(source, target=HOPPER, options={"num_warps": 8}).asm["ptx"]
    return text


def loads(text: str) -> set[str]:
    """The kinds of loads and stores of more than one element."""
    return set(re.findall(r"(?:ld|st)\.global\.v\d\.b\d+", text))


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    if not isinstance(flat_kernel.tinyllm_flat_update, triton.JITFunction):
        pytest.skip("Triton interprets kernels in this process")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("sums", ["*bf16", "*fp32"])
def test_collecting_and_updating_read_sixteen_bytes_at_a_time(sums: str) -> None:
    collecting = assembler(
        flat_kernel.tinyllm_flat_collect,
        {
            "matrices": ("*bf16",) * 3,
            "scales": ("*fp32",) * 2,
            "matrix_sums": sums,
            "scale_sums": "*fp32",
            "partials": "*fp64",
            "loss": "*fp32",
            "total": "*fp64",
            "add": "i32",
        },
        {
            "MATRIX_FIRST": MATRICES.first,
            "MATRIX_LENGTH": MATRICES.length,
            "MATRIX_BLOCKS": MATRICES.blocks,
            "SCALE_FIRST": SCALES.first,
            "SCALE_LENGTH": SCALES.length,
            "BLOCK": BLOCK,
        },
    )
    updating = assembler(
        flat_kernel.tinyllm_flat_update,
        dict.fromkeys(("masters", "means", "squares", "scale_sums"), "*fp32")
        | {"shadows": "*bf16", "matrix_sums": sums, "figures": "*fp64", "matrix_blocks": "i32"},
        {"BLOCK": BLOCK},
    )
    for text in (collecting, updating):
        assert loads(text) == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert "cvt.rn.bf16x2.f32" in updating, "shadows are rounded to the nearest"


def test_settling_computes_in_float64() -> None:
    text = assembler(
        flat_kernel.tinyllm_flat_settle,
        dict.fromkeys(("partials", "total", "settings", "figures"), "*fp64")
        | dict.fromkeys(("rate", "steps", "stopped", "said"), "*fp32")
        | {"blocks": "i32"},
        {"WIDTH": 4096},
    )
    assert "sqrt.rn.f64" in text
    assert "sqrt.approx" not in text


def test_the_presets_matrices_are_whole_blocks() -> None:
    """So that the flat buffers are as long as the models, but for the norm scales' padding."""
    from tinyllm_ray.config import load
    from tinyllm_ray.model.llama import Llama

    for preset in ("20m", "50m", "90m", "250m", "500m"):
        with torch.device("meta"):
            model = Llama(load(preset).model)
        lengths = [weight.numel() for weight in model.parameters() if weight.ndim > 1]
        assert place(lengths).blocks * BLOCK == sum(lengths), preset
