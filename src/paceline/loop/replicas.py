"""Replicas: the same parameters on every worker, checked when they start and now and then while they train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import load
from paceline.errors import FleetError, MisuseError
from paceline.settings import is_compiled, must_agree
from paceline.transport import Transport

if TYPE_CHECKING:
    from paceline.training.training import Training

Model = TypeVar("Model", bound=torch.nn.Module)
"""The user's own class."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> float:
    """A number that two sets of tensors share when they are equal bit for bit: sums of their bits, tensor by tensor.

    Whole numbers below 2**52, so it travels exactly in a float64. Within a tensor it does not see the order.
    """
    total = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.uint8))
        total = (total * 1_000_003 + int(bits.sum(dtype=torch.int64))) % (1 << 52)
    return float(total)


def shape_of(model: torch.nn.Module) -> list[list[Any]]:
    state = model.state_dict()
    return [[name, list(t.shape), str(t.dtype)] for name, t in state.items() if isinstance(t, torch.Tensor)]


def check_same_shape(transport: Transport, model: torch.nn.Module) -> None:
    """Raise ValueError on every worker, naming the first parameter that differs, when models are not alike."""
    shape = shape_of(model)
    digest = blake2b(repr(shape).encode(), digest_size=16).hexdigest()
    if len(set(transport.gather("fleet.model()", digest))) == 1:
        return
    described = {name: f"{size} {dtype}" for name, size, dtype in shape}
    names = sorted({name for theirs in transport.gather("fleet.model() names", list(described)) for name in theirs})
    must_agree(transport, "fleet.model()", {name: described.get(name, "missing") for name in names})


@torch.no_grad()
def spread(transport: Transport, models: Sequence[torch.nn.Module]) -> None:
    """Give every worker the leader's parameters and buffers, and check that they arrived."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    transport.broadcast([t.detach() for t in tensors if t.numel()])
    must_agree(transport, "the leader's weights", {"fingerprint": fingerprint(tensors)})


@dataclass(frozen=True)
class Repair:
    """What was found when replicas were made equal."""

    distances: Sequence[float]
    """Of each worker's parameters from worker 0's: the largest difference, by the largest parameter."""
    devices: Sequence[str]

    @property
    def harmless(self) -> bool:
        """Unlike devices round differently, a little."""
        return len(set(self.devices)) > 1 and max(self.distances) < ROUNDING

    def text(self, step: int, *, missing: Sequence[str]) -> str:
        """Who was astray after a step and why that may be, the likeliest first."""
        astray = [worker for worker, distance in enumerate(self.distances) if distance > 0]
        far = f"{max(self.distances):.1g}"
        said = f"after step {step} the parameters of workers {astray} were not worker 0's (by {far})"
        if self.harmless:
            return f"{said}: unlike devices ({', '.join(sorted(set(self.devices)))}) round differently"
        causes = [
            "code of the script changes parameters or gradients by something that is each worker's own (random numbers "
            "drawn outside of the steps, its data, its rank)",
            "parameters are changed outside step.commit on some workers only",
            "an optimiser computes differently on unlike devices",
        ]
        untracked = [f"{', '.join(missing)} is not tracked and began anew on a worker that joined"] if missing else []
        return f"{said}. Likely causes: {'; '.join(untracked + causes)}"


ROUNDING = 1e-2
"""A larger difference than unlike devices make in a hundred steps."""


@torch.no_grad()
def distance(models: Sequence[torch.nn.Module], states: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """The largest difference between the models' parameters and saved ones, by the largest of these."""
    largest, size = 0.0, 0.0
    for model, state in zip(models, states, strict=True):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            theirs = state[name].to(parameter)
            if theirs.numel():
                apart = (parameter - theirs).abs().max().nan_to_num(nan=torch.inf)
                largest, size = max(largest, float(apart)), max(size, float(theirs.abs().max()))
    return largest / size if size else largest


def hand_round(transport: Transport, content: Mapping[str, Any], *, device: torch.device) -> dict[str, Any]:
    """The leader's ``content`` (plain values and tensors) on every worker."""
    for _ in range(load.ATTEMPTS):
        data = checkpoint.pack(content) if transport.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = transport.gather("the leader's state", len(data))[0]
        data = data if len(data) == size else torch.zeros(size, dtype=torch.uint8)
        transport.broadcast([data])
        digest = blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
        if len(set(transport.gather("the leader's state that came", digest))) == 1:
            return checkpoint.unpack(data, device=device)
    raise FleetError("the leader's state did not reach every worker: leaders were lost, one after another")


class Replica:
    """This worker's models and everything tracked, which are the same on every worker."""

    def __init__(self, context: Training) -> None:
        self._context = context
        self._known: list[torch.nn.Parameter] = []
        """Parameters that were made equal on all workers."""
        self._hooks: list[Any] = []
        self.overlap = True
        """Whether sums may start while backward runs."""

    def add_model(self, module: Model, *, overlap: bool) -> Model:
        """Take a model in: on this worker's device, with the leader's weights."""
        context = self._context
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"fleet.model takes a torch.nn.Module, got {type(module).__name__}")
        wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
        wrapped = next((part for part in module.modules() if isinstance(part, wrappers)), None)
        if wrapped is not None:
            raise ValueError(
                f"the model is wrapped in {type(wrapped).__name__}: pass the plain module, Paceline combines the "
                "gradients itself"
            )
        if context.steps is not None:
            raise MisuseError("fleet.model after fleet.steps: bring every model before the first step")
        module = module.to(context.device)
        check_same_shape(context.transport, module)
        self._spread([module])
        context.models.append(module)
        self._known += module.parameters()
        if not is_compiled(module):
            self._hooks.append(module.register_forward_pre_hook(_refuse_ddp))
        self.overlap = self.overlap and overlap
        return module

    def _spread(self, models: Sequence[torch.nn.Module]) -> None:
        if self._context.transport.size > 1 and not self._context.outside:
            spread(self._context.transport, models)

    def spread_new_parameters(self) -> None:
        """Layers may have been replaced or added since the last loop: every worker gets the leader's weights there."""
        context = self._context
        parameters = [parameter for model in context.models for parameter in model.parameters()]
        known = {id(parameter) for parameter in self._known}
        new = sum(id(parameter) not in known for parameter in parameters)
        facts = {"the number of parameters": len(parameters), "of them new since fleet.model": new}
        must_agree(context.transport, "fleet.steps()", facts)
        if new:
            for model in context.models:
                model.to(context.device)
                check_same_shape(context.transport, model)
            self._spread(context.models)
            context.inform(f"{new} new parameters: every worker has the leader's")
        self._known = parameters

    def shapes_digest(self) -> str:
        """The same on workers whose models have the same shapes."""
        shapes = [shape_of(model) for model in self._context.models]
        return blake2b(repr(shapes).encode(), digest_size=16).hexdigest()

    def state(self) -> dict[str, Any]:
        """The models, everything tracked, and ``fleet.state``: plain values and tensors."""
        tracking = self._context.tracking
        return {
            "models": [checkpoint.plain(model.state_dict(), "the model's state") for model in self._context.models],
            "tracked": {
                name: checkpoint.plain(thing.state_dict(), f"the state of {name}")
                for name, thing in tracking.things.items()
            },
            "state": tracking.state.state_dict(),
        }

    def restore(self, source: Path, content: Mapping[str, Any], *, guard: bool = False) -> None:
        """Take over a `state`. ``source``: where it is from, for an error's text. ``guard``: warn of values that the
        script overwrites unseen."""
        tracking = self._context.tracking
        content = {**content, "tracked": deepcopy(content["tracked"])}  # some keep what they are given
        checkpoint.restore(source, content, tracking.things, self._context.models)
        tracking.state.load_state_dict(content.get("state", {}), guard=guard)

    def restore_peers(self, content: Mapping[str, Any]) -> None:
        """Take over a peer's `state`."""
        self.restore(Path("a peer's state"), content)

    def make_equal(self) -> Repair:
        """Every worker takes over the leader's models and everything tracked."""
        context = self._context
        state = hand_round(context.transport, self.state(), device=context.device)
        mine = {"device": context.device.type, "distance": distance(context.models, state["models"])}
        self.restore(Path("the leader's state"), state)
        found = context.transport.gather("how far replicas were apart", mine)
        return Repair([one["distance"] for one in found], [one["device"] for one in found])

    def close(self) -> None:
        """Leave the models as they came."""
        for hook in self._hooks:
            hook.remove()


def _refuse_ddp(module: torch.nn.Module, inputs: Any) -> None:
    if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise MisuseError(
            "the fleet's model runs inside DistributedDataParallel, which would wait for gradients of its own: delete "
            "the wrapper, Paceline combines the gradients"
        )
