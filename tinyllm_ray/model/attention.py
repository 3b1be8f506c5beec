"""Causal attention: one call, and which of PyTorch's backends may serve it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.attention as switches
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.modules import is_installed

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BACKENDS: dict[str, SDPBackend | None] = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,  # with another implementation behind it, like flash4
    "flash4": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flex": None,  # no backend of SDPA
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class _Implementation:
    """A FlashAttention that PyTorch can put behind its own operators."""

    name: str
    """PyTorch's."""
    title: str
    module: str
    """What it installs and PyTorch imports."""
    how_to_install: str
    majors: tuple[int, ...]
    """Of the compute capabilities that it is written for: PyTorch's own condition."""


_IMPLEMENTATIONS = {
    "flash3": _Implementation(
        name="FA3",
        title="FlashAttention 3",
        module="flash_attn_interface",
        how_to_install="build it from the folder hopper of github.com/Dao-AILab/flash-attention",
        majors=(9,),
    ),
    "flash4": _Implementation(
        name="FA4",
        title="FlashAttention 4",
        module="flash_attn.cute.interface",
        how_to_install="pip install flash-attn-4",
        majors=(9, 10),
    ),
}

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
    graph is built, and FlashAttention 3 and 4 stand behind PyTorch's operators for as long as the context lasts.
    Entering it again inside of itself costs nothing.

    Raises ConfigError where one of these is asked for and absent; PyTorch raises RuntimeError where another backend
    cannot serve the device, dtype or shape.
    """
    backend = _BACKENDS[name]
    wanted = _IMPLEMENTATIONS.get(name)
    if wanted and (why := _why_absent(wanted) or _why_not_on_this_device(wanted)):
        raise ConfigError(f"sdpa_backend {name}: {why}; otherwise take flash, cudnn or auto")
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
        reasons |= {name: f"{one.title} runs on GPUs only" for name, one in _IMPLEMENTATIONS.items()}
        reasons["flex"] = "FlexAttention has no backward pass on a CPU"
        return reasons
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        reasons["cudnn"] = "this PyTorch was built without cuDNN"
    if not is_installed("triton"):
        reasons["flex"] = "FlexAttention is compiled to Triton, which is not installed"
    return reasons | {name: _why_absent(one) for name, one in _IMPLEMENTATIONS.items()}


@contextmanager
def _serve(name: str, backend: SDPBackend | None) -> Iterator[None]:
    global _instead
    outer = _instead
    with ExitStack() as stack:
        if backend is not None:
            stack.enter_context(sdpa_kernel(backend))
        stack.enter_context(_flash_implementation(_IMPLEMENTATIONS.get(name)))
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
def _flash_implementation(wanted: _Implementation | None) -> Iterator[None]:
    """What stands behind the flash backend, None for PyTorch's own FlashAttention 2; what stood there comes back."""
    before = switches.current_flash_attention_impl() if _can_switch() else None
    if before == (wanted and wanted.name):
        yield
        return
    if wanted is None:
        switches.restore_flash_attention_impl()
    else:
        _activate(wanted)
    try:
        yield
    finally:
        if before is None:
            switches.restore_flash_attention_impl()
        else:
            switches.activate_flash_attention_impl(before)


def _activate(wanted: _Implementation) -> None:
    try:
        switches.activate_flash_attention_impl(wanted.name)
    except (ImportError, OSError, RuntimeError) as error:  # installed, but for another Python, CUDA or PyTorch
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{wanted.title}: {wanted.module} cannot be loaded ({first_line}); "
            f"install one built for PyTorch {torch.__version__}, or take sdpa_backend flash, cudnn or auto"
        ) from error


def _can_switch() -> bool:
    """Whether this PyTorch can put another FlashAttention behind its own operators and take it away again: from 2.11 on
    it has all of these names."""
    return all(hasattr(switches, f"{verb}_flash_attention_impl") for verb in ("activate", "current", "restore"))


def _why_absent(wanted: _Implementation) -> str | None:
    if not _can_switch() or wanted.name not in switches.list_flash_attention_impls():
        return f"PyTorch {torch.__version__} cannot switch to {wanted.title}; install 2.11 or later"
    if not is_installed(wanted.module):
        return f"{wanted.title} is not installed (module {wanted.module}); {wanted.how_to_install}"
    return None


def _why_not_on_this_device(wanted: _Implementation) -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device here"
    major, minor = torch.cuda.get_device_capability()
    if major in wanted.majors:
        return None
    wants = " or ".join(f"{one}.0" for one in wanted.majors)
    return f"it needs a GPU of compute capability {wants}, this one has {major}.{minor}"
