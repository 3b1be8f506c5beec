"""Which dtype autocast gives to the operands of matrix products: what a kernel writes that feeds one."""

import torch


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast, where it is on, multiplies `x` in; None where it is off, and for float64, which it leaves alone.

    A constant to torch.compile.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def matmul_dtype(x: torch.Tensor) -> torch.dtype:
    """What a matrix product makes of `x`: autocast's dtype, else its own."""
    return autocast_dtype(x) or x.dtype
