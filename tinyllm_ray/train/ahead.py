"""What a training's first update needs beside its data, loaded ahead of it."""

import torch
from torch.nn import functional

from tinyllm_ray.config import Config


def import_compiler(config: Config) -> None:
    """Import what the first update would: torch._dynamo, which the optimizer needs too, and where it compiles Inductor.

    2 to 3 s under the interpreter's lock, so there is nothing for a thread to gain; a device can be readied beside it.
    """
    import torch._dynamo

    if config.execution.update != "eager":
        import torch._inductor.compile_fx  # noqa: F401


def warm_device(config: Config, device: torch.device) -> None:
    """Create the CUDA context and load the libraries that an update uses: cuBLAS, attention both ways, norms.

    The driver works without the interpreter's lock, so in a thread of its own the 0.7 s go by beside `import_compiler`
    (one H200). Draws no random number, and takes SDPA's own choice of backend, since choosing one is a setting of the
    whole process. Does nothing on a CPU, nor where equal bits are asked for: cuBLAS reads that wish when it starts.
    """
    if device.type != "cuda" or config.execution.deterministic:
        return
    square = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    torch.mm(square, square)
    shape = (1, config.model.heads, 128, config.model.width // config.model.heads)
    ones = torch.ones(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    attended = functional.scaled_dot_product_attention(ones, ones, ones, is_causal=True)
    torch.autograd.grad(attended.sum(), ones)
    weight = torch.ones(4, device=device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=True)
    torch.empty(1, pin_memory=True)
    torch.cuda.synchronize(device)
