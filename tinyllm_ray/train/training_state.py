"""What a run needs beside its weights to go on: the optimizer's state and the random generators'.

`torch.distributed.checkpoint.state_dict` also names an optimizer's state by parameter, but loads it through
`Optimizer.load_state_dict`, which puts copies in the place of the learning-rate tensors that compiled and captured
updates read. Here every tensor that exists is filled in place.
"""

from typing import Any

import torch
from torch import nn

from tinyllm_ray.train.parts import Part, canonical_parameters

State = dict[str, dict[str, Any]]
"""What an optimizer holds for one model, by parameter and the optimizer's own key."""


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> State:
    """The optimizer's state of one model.

    A lone model's tensors are those in use: write them before the next update. A worker's are copies on the host, since
    torch.save would write all workers' with each; so take one worker after another.
    """
    return {
        name: {key: _to_write(value, part) for key, value in part.state(optimizer, weight).items()}
        for name, weight in canonical_parameters(model).items()
        if weight in optimizer.state
    }


def check(model: nn.Module, optimizer: torch.optim.Optimizer, part: Part, stored: State) -> None:
    """Raises ValueError naming the first entry of a captured state that does not fit the model of `part`."""
    weights = part.weights(model)
    for name, values in stored.items():
        if name not in weights:
            raise ValueError(f"optimizer state of {name}, which the model has not")
        for key, value in values.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            if shape not in ((), tuple(weights[name].shape)):
                raise ValueError(f"{key} of {name} is {list(shape)}, in the model {list(weights[name].shape)}")
    if part.worker is not None:
        for name, weight in canonical_parameters(model).items():
            there, here = sorted(stored.get(name, ())), sorted(part.state(optimizer, weight))
            if there != here:  # one worker alone cannot get or lose a moment
                raise ValueError(f"optimizer state of {name} is {there}, in the optimizer {here}")


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, part: Part, stored: State) -> None:
    """Put back a captured state that `check` let pass: tensors the optimizer holds are filled, missing ones made on
    their weight's device.

    Settings of the parameter groups stay as they are: they are the configuration's, and the learning rate's tensors
    are set by the schedule.
    """
    names = {id(weight): name for name, weight in canonical_parameters(model).items()}
    with torch.no_grad():
        for group in optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for weight in group["params"]:
                values = stored.get(names[id(weight)])
                if values is None:
                    optimizer.state.pop(weight, None)
                else:
                    _fill(part.state(optimizer, weight), values, weight.device, on_device)


def random_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the host's generator and of that of the device the model is on."""
    device = _device_of(model)
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(model: nn.Module, states: dict[str, torch.Tensor]) -> None:
    """Put back what `random_state` gave; a device's only where the model is on one of its kind."""
    device = _device_of(model)
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _to_write(value: Any, part: Part) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if part.worker is None else value.detach().to("cpu", copy=True)


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
