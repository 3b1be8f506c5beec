"""Causal attention: one call, and which of PyTorch's backends may serve it."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.nn.attention as switches
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyllm_ray.errors import ConfigError

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BACKENDS: dict[str, SDPBackend | None] = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,  # with another implementation behind it
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flex": None,  # no backend of SDPA
    "math": SDPBackend.MATH,
}
_FLASH3 = "FA3"
"""PyTorch's name for it."""
_FLASH3_MODULE = "flash_attn_interface"
"""What FlashAttention 3 installs and PyTorch imports."""

_instead: Attend | None = None
"""What serves attention in place of SDPA."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal self-attention over [rows, heads, context, head features]; scores are scaled by 1/sqrt(features).

    Raises ValueError where query and key differ in length: PyTorch lines the causal mask up at the first positions,
    so that a single query beside 16 keys would see the first of them alone.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal attention of {query.shape[2]} queries over {key.shape[2]} keys; the lengths must agree"
        )
    if _instead is not None:
        return _instead(query, key, value)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def sdpa_backend(name: str) -> AbstractContextManager[None]:
    """Context in which `attend` runs on the named backend and no other; `auto` leaves the choice to PyTorch.

    It has to surround the call that traces a compiled model, and the backward pass: the first choice is made while the
    graph is built, and FlashAttention 3 stands behind PyTorch's operators for as long as the context lasts. Entering it
    again inside of itself costs nothing.

    Raises ConfigError where FlashAttention 3 is asked for and absent; PyTorch raises RuntimeError where another backend
    cannot serve the device, dtype or shape.
    """
    backend = _BACKENDS[name]
    if name == "flash3" and (why := _why_no_flash3() or _why_not_on_this_device()):
        raise ConfigError(f"sdpa_backend flash3: {why}; otherwise take flash, cudnn or auto")
    return _serve(name, backend)


def prepare(name: str, length: int, device: torch.device) -> None:
    """Make what the backend needs once a context length, outside of compiled and captured code: flex's block mask.

    Without it compiled code makes the mask in every call.
    """
    if name == "flex":
        from tinyllm_ray.model import flex

        flex.prepare(length, device)


def available_backends(device_kind: str) -> dict[str, str | None]:
    """Every name of `sdpa_backend`, with one line why it cannot be used here, or None where it can.

    By what is installed, for a `cpu` or `cuda` device; no device is asked.
    """
    reasons: dict[str, str | None] = dict.fromkeys(_BACKENDS)
    if device_kind == "cpu":
        reasons |= dict.fromkeys(("cudnn", "efficient"), "PyTorch has no CPU kernel for it")
        reasons["flash3"] = "FlashAttention 3 runs on GPUs only"
        reasons["flex"] = "FlexAttention has no backward pass on a CPU"
        return reasons
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        reasons["cudnn"] = "this PyTorch was built without cuDNN"
    if importlib.util.find_spec("triton") is None:
        reasons["flex"] = "FlexAttention is compiled to Triton, which is not installed"
    reasons["flash3"] = _why_no_flash3()
    return reasons


@contextmanager
def _serve(name: str, backend: SDPBackend | None) -> Iterator[None]:
    global _instead
    outer = _instead
    with ExitStack() as stack:
        if backend is not None:
            stack.enter_context(sdpa_kernel(backend))
        stack.enter_context(_flash_implementation(_FLASH3 if name == "flash3" else None))
        if name == "flex":
            from tinyllm_ray.model import flex

            _instead = flex.attend
        else:
            _instead = None
        try:
            yield
        finally:
            _instead = outer


@contextmanager
def _flash_implementation(wanted: str | None) -> Iterator[None]:
    """What stands behind the flash backend, None for PyTorch's own FlashAttention 2; what stood there comes back."""
    before = switches.current_flash_attention_impl() if _can_switch() else None
    if before == wanted:
        yield
        return
    _switch_to(wanted)
    try:
        yield
    finally:
        _switch_to(before)


def _switch_to(implementation: str | None) -> None:
    if implementation is None:
        switches.restore_flash_attention_impl()
        return
    try:
        switches.activate_flash_attention_impl(implementation)
    except (ImportError, OSError, RuntimeError) as error:  # installed, but for another Python, CUDA or PyTorch
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"sdpa_backend flash3: {_FLASH3_MODULE} cannot be loaded ({first_line}); "
            f"install one built for PyTorch {torch.__version__}, or take flash, cudnn or auto"
        ) from error


def _can_switch() -> bool:
    """Whether this PyTorch can put another FlashAttention behind its own operators and take it away again: from 2.11 on
    it has all of these names."""
    return (
        all(hasattr(switches, f"{verb}_flash_attention_impl") for verb in ("activate", "current", "restore"))
        and _FLASH3 in switches.list_flash_attention_impls()
    )


def _why_no_flash3() -> str | None:
    if not _can_switch():
        return f"PyTorch {torch.__version__} cannot switch to FlashAttention 3; install 2.11 or later"
    if importlib.util.find_spec(_FLASH3_MODULE) is None:
        return (
            f"FlashAttention 3 is not installed (module {_FLASH3_MODULE}); "
            "build it from the folder hopper of github.com/Dao-AILab/flash-attention"
        )
    return None


def _why_not_on_this_device() -> str | None:
    """PyTorch's own condition: FlashAttention 3 is written for Hopper's instructions."""
    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"it needs a GPU of compute capability 9.0, this one has {major}.{minor}"
