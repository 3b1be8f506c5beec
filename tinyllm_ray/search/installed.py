"""Which optional packages of executions are not installed here, without importing any."""

from tinyllm_ray.modules import is_installed

NEEDED_BY = {
    ("loss_kernel", "triton"): "triton",
    ("norm_kernel", "triton"): "triton",
    ("rotary_kernel", "triton"): "triton",
    ("activation_kernel", "triton"): "triton",
    ("optimizer_kernel", "triton"): "triton",
    ("sdpa_backend", "flex"): "triton",
    ("sdpa_backend", "flash3"): "flash_attn_interface",
    ("sdpa_backend", "flash4"): "flash_attn.cute.interface",
}
"""By setting and value, the module without which an execution cannot run."""


def lacking() -> frozenset[str]:
    """Modules of `NEEDED_BY` that are not installed."""
    return frozenset(name for name in set(NEEDED_BY.values()) if not is_installed(name))
