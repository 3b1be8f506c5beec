"""What a run needs beside its weights to go on: the optimizer's state and the random generators'.

`torch.distributed.checkpoint.state_dict` also names an optimizer's state by parameter, but loads it through
`Optimizer.load_state_dict`, which puts copies in the place of the learning-rate tensors that compiled and captured
updates read. Here every tensor that exists is filled in place.
"""

from typing import Any

import torch
from torch import nn

_WRAPPER = "_orig_mod."
"""What torch.compile's module wrapper puts into its parameters' names."""


def canonical_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` under its own names, whether or not it or a part of it is wrapped by torch.compile."""
    return {name.replace(_WRAPPER, ""): weight for name, weight in model.named_parameters()}


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimizer and random state. Its tensors are those in use, not copies: write them before the next update."""
    return {"optimizer": _named_state(model, optimizer), "random": _random_state(device_of(model))}


def check(model: nn.Module, stored: dict[str, Any]) -> None:
    """Raises ValueError naming the first entry of a captured state that does not fit `model`."""
    weights = canonical_parameters(model)
    for name, values in stored["optimizer"].items():
        if name not in weights:
            raise ValueError(f"optimizer state of {name}, which the model has not")
        for key, value in values.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            if shape not in ((), tuple(weights[name].shape)):
                raise ValueError(f"{key} of {name} is {list(shape)}, in the model {list(weights[name].shape)}")


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Put a captured state back: tensors the optimizer holds are filled, missing ones made on their weight's device.

    Settings of the parameter groups stay as they are: they are the configuration's, and the learning rate's tensors
    are set by the schedule. Raises ValueError, and changes nothing, where the state does not fit.
    """
    check(model, stored)
    names = {id(weight): name for name, weight in canonical_parameters(model).items()}
    with torch.no_grad():
        for group in optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for weight in group["params"]:
                values = stored["optimizer"].get(names[id(weight)])
                if values is None:
                    optimizer.state.pop(weight, None)
                else:
                    _fill(optimizer.state[weight], values, weight.device, on_device)
    _restore_random_state(stored["random"], device_of(model))


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {
        name: {
            key: value.detach() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[weight].items()
        }
        for name, weight in canonical_parameters(model).items()
        if weight in optimizer.state
    }


def _fill(held: dict[str, Any], stored: dict[str, Any], device: torch.device, step_on_device: bool) -> None:
    for key in held.keys() - stored.keys():
        del held[key]
    for key, value in stored.items():
        if isinstance(value, torch.Tensor) and isinstance(held.get(key), torch.Tensor):
            held[key].copy_(value)
        elif isinstance(value, torch.Tensor):
            # PyTorch keeps the count of steps on the host unless the update itself runs on the device.
            home = torch.device("cpu") if key == "step" and not step_on_device else device
            held[key] = value.to(home, copy=True)  # what was read may be a view of the file
        else:
            held[key] = value


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)
