"""Why an update went non-finite: its rows once more, eagerly, from the weights that the update's guard kept."""

from dataclasses import replace

import torch

from tinyllm_ray.data.cache import TokenCache
from tinyllm_ray.data.feed import widen
from tinyllm_ray.data.loader import RowLoader
from tinyllm_ray.model.attention import sdpa_backend
from tinyllm_ray.model.llama import Llama
from tinyllm_ray.model.operations import TORCH
from tinyllm_ray.model.packed import PackedLlama
from tinyllm_ray.train.pack import model_seeds
from tinyllm_ray.train.trainer import Trainer
from tinyllm_ray.train.update import build_loss


def explain_fault(trainer: Trainer, cache: TokenCache | None, update: int, model: int = 0) -> str:
    """One line about the update after `update` updates, the first whose loss or gradient norm was not finite.

    Of a pack it is about model `model`.

    It names the first micro-batch at fault and where its numbers stop being finite: a weight, a part of the forward
    pass, or the first gradient that the backward pass reaches; or it says that all is finite when done again, so that
    the fault was the execution's. `cache` is the trainer's. Raises nothing: a run that ends has more to write. Costs an
    eager update, and leaves weights and gradients alone.
    """
    try:
        found = _recompute(trainer, cache, update, model)
    except Exception as error:  # whatever it is, the run's own end matters more
        first_line = (str(error).strip().splitlines() or [""])[0]
        found = f"could not be done again eagerly: {type(error).__name__}: {first_line}"
    name = f"model {model}: " if trainer.config.packing.models > 1 else ""
    return f"update {update + 1}: {name}{found}"


def _recompute(trainer: Trainer, cache: TokenCache | None, update: int, number: int) -> str:
    config = trainer.config
    model = _in_plain_operations(trainer.model, number)
    broken = [name for name, weight in model.named_parameters() if not _finite(weight)]
    if broken:
        return f"its weights are not finite before it: {_some(broken)}"
    names, weights = zip(*model.named_parameters(), strict=True)
    loss_of = build_loss(model, config.with_execution({"update": "eager"}), trainer.device)
    sums = [torch.zeros_like(weight) for weight in weights]
    total = 0.0
    with sdpa_backend(config.execution.sdpa_backend):
        parts = torch.split(_rows_of(trainer, cache, update, number), config.micro_batch_size)
        for part, rows in enumerate(parts, 1):
            where = f"micro-batch {part} of {config.accumulation}"
            inputs, targets = rows[:, :-1], rows[:, 1:]
            with _FirstBrokenOutput(model) as first:
                loss = loss_of(inputs, targets) / config.accumulation
                if not _finite(loss):
                    _show_logits(model, inputs)
                    return f"{where}: loss {loss.item()}, {first.describe()}"
            gradients = torch.autograd.grad(loss, weights)
            broken = [name for name, gradient in zip(names, gradients, strict=True) if not _finite(gradient)]
            if broken:
                return (
                    f"{where}: loss {loss.item() * config.accumulation:.6g}, {_describe_backward(broken, len(names))}"
                )
            total += loss.item()
            torch._foreach_add_(sums, list(gradients))
    norm = torch.nn.utils.get_total_norm(sums)
    if not _finite(norm):
        largest = max(gradient.abs().max().item() for gradient in sums)
        return f"every micro-batch is finite, the gradient norm is not (largest gradient {largest:.3g})"
    execution = ", ".join(f"{name} {value}" for name, value in config.execution.model_dump(exclude_none=True).items())
    return (
        f"finite when done again eagerly (loss {total:.6g}, gradient norm {norm.item():.6g}): the fault was the "
        f"execution's ({execution})"
    )


def _in_plain_operations(model: Llama | PackedLlama, number: int) -> Llama:
    """The model, or a pack's model `number`, with PyTorch's operations: a kernel's fault is the execution's."""
    plain = replace(TORCH, recompute_activations=model.operations.recompute_activations)
    return model.sharing(plain) if isinstance(model, Llama) else model.workers(plain)[number]


def _show_logits(model: Llama, inputs: torch.Tensor) -> None:
    """As an output of the model: its loss makes them where no module shows them."""
    kind = inputs.device.type
    with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        model(inputs)


def _rows_of(trainer: Trainer, cache: TokenCache | None, update: int, number: int) -> torch.Tensor:
    """The rows of model `number` in the update, on the trainer's device, int64 [rows, context + 1]."""
    config = trainer.config
    models = config.packing.models
    if cache is None:
        return widen(trainer.feed.next())[number::models]
    mixed = config.packing.mixed
    with RowLoader(
        cache,
        context=config.model.context,
        seed=model_seeds(config)[number],
        shards_per_range=config.data.shards_per_range,
        read_ahead=0,
        worker=number if mixed else 0,
        of=models if mixed else 1,
        start_row=update * config.rows_per_update,
    ) as loader:
        return widen(torch.from_numpy(loader.next(config.rows_per_model)).to(trainer.device))


class _FirstBrokenOutput:
    """While entered, notes the first module of `model` whose output is not finite."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._first: str | None = None

    def __enter__(self) -> "_FirstBrokenOutput":
        self._handles = [module.register_forward_hook(self._look) for module in self._names]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def describe(self) -> str:
        if self._first is None:
            return "with finite logits"
        return f"first not finite in the output of {self._first or 'the head'}"

    def _look(self, module: torch.nn.Module, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        if self._first is None and not all(_finite(one) for one in outputs):
            self._first = self._names[module]


def _describe_backward(broken: list[str], of: int) -> str:
    """The backward pass meets the weights in the reverse of their order, and the tied embedding first and last."""
    return f"gradients of {len(broken)} of {of} weights not finite, {broken[-1]} the first that backward reaches"


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
