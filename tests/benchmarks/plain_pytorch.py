"""The yardstick: updates of the 20m shape in ordinary PyTorch, as a good engineer writes it without this project.

    python tests/benchmarks/plain_pytorch.py --rows 32 --updates 60

Fused QKV and gate/up projections, RoPE tables cached, F.rms_norm, cross-entropy on float32 logits, bf16 autocast,
torch.compile (default mode), clipping, fused AdamW; random tokens from pinned host memory. Prints one JSON line with
the targets/s of each window and their median.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS, FFN = 32000, 1024, 8, 320, 5, 896


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(CONTEXT).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.emb.weight)
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = torch.compile(model)
    host = torch.randint(0, VOCABULARY, (options.rows, CONTEXT + 1)).pin_memory()

    def update():
        batch = host.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(20):
        update()
    torch.cuda.synchronize()
    rates = []
    for _ in range(options.windows):
        begin = time.perf_counter()
        for _ in range(options.updates):
            loss = update()
        torch.cuda.synchronize()
        rates.append(options.updates * options.rows * CONTEXT / (time.perf_counter() - begin))
    memory = torch.cuda.max_memory_allocated()
    print(
        json.dumps(
            {
                "program": "plain_pytorch",
                "rows": options.rows,
                "targets_per_second": statistics.median(rates),
                "windows": rates,
                "loss": loss.item(),
                "peak_allocated_bytes": memory,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(),
            }
        )
    )


if __name__ == "__main__":
    main()
