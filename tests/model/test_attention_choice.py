"""Which implementation serves attention: FlexAttention, FlashAttention 3, and what is said where one is absent."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention as switches
from torch.nn import functional

from tinyllm_ray.errors import ConfigError
from tinyllm_ray.execution import options_of
from tinyllm_ray.model import attention, flex
from tinyllm_ray.model.attention import attend, available_backends, prepare, sdpa_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_masks", {})


def heads(length: int, dtype: torch.dtype = torch.float64, device: str = "cpu", features: int = 8) -> list[Any]:
    """Query, key and value, laid out as the model has them: a position's heads are next to each other."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 2, length, 3, features, dtype=torch.float64, generator=generator)
    return list(drawn.to(device, dtype).transpose(2, 3).unbind())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("length", [10, 128, 200])  # less than a block, one, and one with a rest
def test_flex_equals_math(length: int) -> None:
    query, key, value = heads(length)
    with sdpa_backend("flex"):
        found = attend(query, key, value)
    with sdpa_backend("math"):
        torch.testing.assert_close(found, attend(query, key, value), rtol=1e-10, atol=1e-10)
    assert list(flex._masks) == [(length, "cpu")]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_sees_no_later_key() -> None:
    query, key, value = heads(200)
    with sdpa_backend("flex"):
        before = attend(query, key, value)
        key[:, :, 150:], value[:, :, 150:] = 7, -7
        after = attend(query, key, value)
    assert torch.equal(before[:, :, :150], after[:, :, :150])
    assert not torch.equal(before[:, :, 150:], after[:, :, 150:])


@pytest.mark.parametrize("prepared", [True, False])
def test_flex_is_traced_into_compiled_code_once(prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = heads(200, torch.float32)
    compiled = torch.compile(lambda *inputs: attend(*inputs) * 2, backend="eager", fullgraph=True, dynamic=False)
    with monkeypatch.context() as patch, sdpa_backend("flex"):
        if prepared:
            prepare("flex", 200, CPU)
            patch.setattr(flex, "create_block_mask", None)
        compiled(query, key, value)
    prepare("flex", 64, CPU)  # as an evaluation at another length does
    with sdpa_backend("flex"), torch.compiler.set_stance("fail_on_recompile"):
        found = compiled(query, key, value)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True) * 2
    torch.testing.assert_close(found, expected)


def test_lengths_that_differ_are_refused_by_flex_too() -> None:
    query, key = (torch.ones(1, 1, length, 8) for length in (1, 16))
    with sdpa_backend("flex"), pytest.raises(ValueError, match="1 queries over 16 keys"):
        attend(query, key, key)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_an_inner_choice_ends_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = heads(10)
    served: list[str] = []
    monkeypatch.setattr(flex, "attend", lambda *_: served.append("flex"))
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *_, **__: served.append("sdpa"))
    with sdpa_backend("flex"):
        attend(*inputs)
        for name in ("auto", "math"):
            with sdpa_backend(name):
                attend(*inputs)
        attend(*inputs)
    attend(*inputs)
    assert served == ["flex", "sdpa", "sdpa", "flex", "sdpa"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_backend_is_spoken_about_in_one_line(kind: str) -> None:
    reasons = available_backends(kind)
    assert set(reasons) == set(options_of("sdpa_backend"))
    assert all(reason is None or (reason and "\n" not in reason) for reason in reasons.values())
    assert reasons["auto"] is reasons["flash"] is reasons["math"] is None


def test_a_cpu_cannot_train_with_five_of_them() -> None:
    reasons = available_backends("cpu")
    assert {name for name, reason in reasons.items() if reason} == {"cudnn", "efficient", "flash3", "flash4", "flex"}


def test_an_old_pytorch_is_named_where_it_cannot_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(switches, "activate_flash_attention_impl", raising=False)
    assert "cannot switch to FlashAttention 3; install 2.11" in str(available_backends("cuda")["flash3"])
    assert "cannot switch to FlashAttention 4; install 2.11" in str(available_backends("cuda")["flash4"])
    with pytest.raises(ConfigError, match=r"^sdpa_backend flash3: PyTorch .*2\.11 or later; otherwise take flash"):
        sdpa_backend("flash3")
    with sdpa_backend("flash"):
        attend(*heads(10, torch.float32))


switching = pytest.mark.skipif(not attention._can_switch(), reason="this PyTorch cannot switch to FlashAttention 3")


@switching
@pytest.mark.skipif(available_backends("cuda")["flash3"] is None, reason="FlashAttention 3 is installed here")
def test_flash_attention_3_is_refused_where_it_is_not_installed() -> None:
    assert "not installed (module flash_attn_interface); build it from" in str(available_backends("cuda")["flash3"])
    with pytest.raises(ConfigError, match=r"^sdpa_backend flash3: FlashAttention 3 is not installed .*take flash, .*$"):
        sdpa_backend("flash3")


@switching
@pytest.mark.skipif(available_backends("cuda")["flash4"] is None, reason="FlashAttention 4 is installed here")
def test_flash_attention_4_is_found_by_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 installs a package of the same name, which takes seconds to import and may fail to."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "not installed (module flash_attn.cute.interface); pip install" in str(available_backends("cuda")["flash4"])
    (package / "cute").mkdir()
    (package / "cute" / "interface.py").touch()
    assert available_backends("cuda")["flash4"] is None


class Standin:
    """What an implementation leaves with PyTorch's registry."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("in")

    def remove(self) -> None:
        self.log.append("out")


@pytest.fixture
def flash3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A pretended FlashAttention 3 on a pretended Hopper, in PyTorch's own registry; when it came in and went out.

    And a 4, which writes into the same log.
    """
    log: list[str] = []
    (tmp_path / "flash_attn_interface.py").touch()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(switches._registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: Standin(log))
    monkeypatch.setitem(switches._registry._FLASH_ATTENTION_IMPLS, "FA4", lambda: Standin(log))
    yield log
    switches.restore_flash_attention_impl()


@switching
def test_flash_attention_3_stands_behind_sdpa_for_as_long_as_the_context_lasts(flash3: list[str]) -> None:
    assert available_backends("cuda")["flash3"] is None
    with sdpa_backend("flash3"):
        with sdpa_backend("flash3"):
            assert switches.current_flash_attention_impl() == "FA3"
        assert flash3 == ["in"]  # entering it again changed nothing
        with sdpa_backend("flash"):
            assert switches.current_flash_attention_impl() is None
        assert switches.current_flash_attention_impl() == "FA3"
    assert switches.current_flash_attention_impl() is None


@switching
def test_what_stood_behind_sdpa_before_comes_back_even_after_an_error(flash3: list[str]) -> None:
    switches.activate_flash_attention_impl("FA4")
    with pytest.raises(KeyboardInterrupt), sdpa_backend("flash3"):
        raise KeyboardInterrupt
    assert switches.current_flash_attention_impl() == "FA4"


@switching
def test_flash_attention_3_that_cannot_be_loaded_is_the_users_mistake(
    flash3: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ImportError("undefined symbol: _ZN3c104\nand more")

    monkeypatch.setitem(switches._registry._FLASH_ATTENTION_IMPLS, "FA3", fail)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(undefined symbol: _ZN3c104\); install one built for"):
        sdpa_backend("flash3").__enter__()
    assert switches.current_flash_attention_impl() is None


@switching
def test_flash_attention_3_and_4_are_refused_on_other_gpus(flash3: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(ConfigError, match=r"compute capability 9\.0, this one has 10\.0"):
        sdpa_backend("flash3")
    with sdpa_backend("flash4"):
        assert switches.current_flash_attention_impl() == "FA4"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"compute capability 9\.0 or 10\.0, this one has 8\.0"):
        sdpa_backend("flash4")


def loss_and_gradients(name: str, compiled: bool, length: int) -> list[torch.Tensor]:
    """Attention on the device in bf16, and its gradients for a random upstream one."""
    inputs = [tensor.requires_grad_() for tensor in heads(length, torch.bfloat16, "cuda", features=64)]
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    prepare(name, length, torch.device("cuda"))
    function = torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend
    with sdpa_backend(name):
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 1000])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["flash3", "flash4", "flex"])
def test_equals_math_on_the_device(name: str, compiled: bool, length: int) -> None:
    if reason := available_backends("cuda")[name]:
        pytest.skip(reason)
    torch.compiler.reset()
    for one, other in zip(
        loss_and_gradients(name, compiled, length), loss_and_gradients("math", False, length), strict=True
    ):
        assert (one.double() - other.double()).norm() / other.double().norm() < 1e-2
