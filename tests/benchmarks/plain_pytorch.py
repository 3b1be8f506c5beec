"""The yardstick: updates of a preset's shape in ordinary PyTorch, as a good engineer writes it without this project.

    python tests/benchmarks/plain_pytorch.py --preset 20m --tokens 32768 --micro-batch 32
    python tests/benchmarks/plain_pytorch.py --preset nano --tokens 2048 --micro-batch 4 --eager --updates 3   # CPU

Fused QKV and gate/up projections, RoPE tables cached, F.rms_norm, cross-entropy on float32 logits, bf16 autocast,
torch.compile (default mode), accumulation over micro-batches, clipping, fused AdamW; random tokens from pinned host
memory. Of this project it takes the presets' numbers alone. Prints one JSON line with the targets/s of each window and
their median.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from tinyllm_ray.config import load


class Layer(nn.Module):
    def __init__(self, width, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x, cos, sin):
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, width))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Model(nn.Module):
    """A decoder of `shape`: anything with layers, width, heads, ffn, context and vocab_size."""

    def __init__(self, shape):
        super().__init__()
        self.emb = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width, shape.heads, shape.ffn) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, 1e-5)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.context).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.emb.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Plain:
    """Updates of `rows` rows in micro-batches of `micro_batch`; can be timed by `tinyllm_ray.measure.windows`."""

    data_wait_seconds = 0.0

    def __init__(self, shape, rows, micro_batch, device, compiled=True):
        assert rows % micro_batch == 0, f"{rows} rows an update are no multiple of {micro_batch}"
        torch.manual_seed(0)
        self.device, self.micro_batch, self.accumulation = device, micro_batch, rows // micro_batch
        self.targets_per_update = rows * shape.context
        self.model = Model(shape).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.loss = torch.compile(self.model) if compiled else self.model
        self.host = torch.randint(0, shape.vocab_size, (rows, shape.context + 1))
        if device.type == "cuda":
            self.host = self.host.pin_memory()

    def step(self):
        batch = self.host.to(self.device, non_blocking=True)
        total = 0.0
        for rows in batch.split(self.micro_batch):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.loss(rows[:, :-1], rows[:, 1:]) / self.accumulation
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.last = total, norm

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def read(self):
        loss, norm = self.last
        return float(loss), float(norm)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="20m")
    parser.add_argument("--tokens", type=int, default=32768, help="an update")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--updates", type=int, default=60, help="a window")
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = load(options.preset).model
    plain = Plain(shape, options.tokens // shape.context, options.micro_batch, device, compiled=not options.eager)
    for _ in range(options.warmup):
        plain.step()
    plain.synchronize()
    rates = []
    for _ in range(options.windows):
        begin = time.perf_counter()
        for _ in range(options.updates):
            plain.step()
        plain.synchronize()
        rates.append(options.updates * plain.targets_per_update / (time.perf_counter() - begin))
    found = {
        "program": "plain_pytorch",
        "preset": options.preset,
        "tokens_per_update": options.tokens,
        "micro_batch": options.micro_batch,
        "targets_per_second": statistics.median(rates),
        "windows": rates,
        "loss": plain.read()[0],
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
