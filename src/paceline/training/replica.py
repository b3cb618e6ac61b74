"""This worker's replica: its models and everything tracked, which are equal on every worker.

A model may be divided over the processes of a worker with torch's `fully_shard` (`divide`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from paceline.checkpoint import content as checkpoint
from paceline.checkpoint import shards
from paceline.checkpoint.held import Holding
from paceline.checkpoint.shards import TakenOut, gathered, is_sharded, local, mapped, reshard
from paceline.errors import MisuseError
from paceline.gradients.sharded import set_up
from paceline.settings import has_batch_norm, is_compiled, must_agree
from paceline.step.checks.replicas import Repair, check_same_shape, distance, moved, send_to_all, shape_of, spread
from paceline.step.checks.sameness import Contents, parameters_of, saved_buffers_of, state_of, together, unlike_text
from paceline.step.checks.user_code import hooks_text, refuse_untrainable
from paceline.training.combines import kind_of
from paceline.training.context import TrainingContext
from paceline.training.untracked import Bystanders
from paceline.transport import Collective, Transport

if TYPE_CHECKING:
    from paceline.step.steps import StepLoop

Model = TypeVar("Model", bound=torch.nn.Module)
"""The user's own class."""


class Replica:
    """The worker's models and everything tracked, which are equal on every worker."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._known: list[torch.nn.Parameter] = []
        """Parameters that were made equal on all workers."""
        self._hooks: list[Any] = []
        self._bystanders = Bystanders(self._current_step)
        self._compared = False
        """Whether a loop's first step has compared the workers' contents."""
        self.holding = Holding(self.state, self._lasting)
        self.overlap = True
        """Whether sums may start while backward runs."""

    def add_model(self, module: Model, *, overlap: bool, shard: bool = False, buffers: str = "shared") -> Model:
        """Prepare a model: move it to this worker's device, with the leader's weights.

        Args:
            module: the user's model.
            overlap: whether sums may start while backward runs.
            shard: divide it over the worker's processes.
            buffers: "shared", or "own" for each worker's own.
        """
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
        if buffers not in ("shared", "own"):
            raise ValueError(f'buffers must be "shared" or "own", got {buffers!r}')
        refuse_untrainable(module)
        if context.steps is not None:
            raise MisuseError("fleet.model after fleet.steps: bring every model before the first step")
        check_division(context.transport, module, shard=shard)
        if not shard or context.transport.shards == 1:  # else it moves layer by layer, when it is divided
            module = module.to(context.device)
        check_same_shape(context.transport, module)
        self._spread([module])
        if shard and context.transport.shards > 1:
            divide(module, context.transport.mesh())
        if context.transport.grouped:
            set_up_division(context.transport, module)
        context.models.append(module)
        if buffers == "own":
            context.own_buffers.add(id(module))
        self._known += module.parameters()
        if not is_compiled(module):
            self._hooks.append(module.register_forward_pre_hook(_refuse_ddp))
        self.overlap = self.overlap and overlap
        return module

    def _spread(self, models: Sequence[torch.nn.Module]) -> None:
        transport = self._context.transport
        if transport.shards > 1 or (transport.size > 1 and not self._context.outside):
            spread(self._context.transport, models)

    def spread_new_parameters(self) -> None:
        """Give every worker the leader's weights in layers that were replaced or added since the last loop."""
        context = self._context
        reshard(context.models)
        parameters = [parameter for model in context.models for parameter in model.parameters()]
        known = {id(parameter) for parameter in self._known}
        new = sum(id(parameter) not in known for parameter in parameters)
        facts: dict[str, Any] = {"the number of parameters": len(parameters), "of them new since fleet.model": new}
        facts["the frozen parameters (requires_grad)"] = _frozen(context.models)
        must_agree(context.transport, "fleet.steps()", facts)
        if new:
            for model in context.models:
                model.to(context.device)
                check_same_shape(context.transport, model)
            self._spread(context.models)
            context.inform(f"{new} new parameters: every worker has the leader's")
        self._known = parameters

    # -- the same everywhere -------------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        """Return what must be equal on every worker, in every step: parameters, and the state of everything tracked."""
        context = self._context
        parameters = parameters_of(context.models)
        if context.transport.grouped:  # optimisers hold the state of each process's part
            return parameters
        return together(parameters, state_of(context.tracking.parts()))

    def must_be_equal(self, steps: StepLoop, *, each: Any = None) -> list[dict[str, Any]]:
        """Compare the workers before a loop's first step, and return everybody's answers.

        Raise ValueError or MisuseError on every worker when they do not track the same, or do not hold the same.
        Buffers are set to the leader's. The answers include what ``each`` process gave.
        """
        context, local = self._context, kind_of(self._context.combine).local
        transport = context.transport
        alone = transport.size == 1 or context.outside
        # In local steps optimisers differ, and so do parameters after a loop that was left early.
        checked = not alone and not (local and self._compared)
        also = {
            **({"contents": self.contents().number(transport)} if checked else {}),
            **({} if alone or transport.grouped else {"buffers": saved_buffers_of(context.shared).number()}),
            **({} if alone or transport.grouped else {"others": self._look_around()}),
        }
        everybody = context.tracking.must_agree(transport, "the first step", also=also, each=each)
        self._compared = True
        if len({one.get("buffers") for one in everybody}) > 1:
            self._share_buffers(steps)
        if len({one.get("contents") for one in everybody}) > 1:
            self._refuse_unlike(steps)
        elif checked:
            steps.loop.position.compared = steps.index
        if "others" in also:
            self._bystanders.refuse_unlike([one["others"] for one in everybody])
        return everybody

    def _look_around(self) -> dict[str, Any]:
        """Return what the script has beside what the fleet was given."""
        context = self._context
        known = [*context.models, *(part for _, part in context.tracking.parts())]
        return self._bystanders.look(known, context.tracking.is_ours)

    def _current_step(self) -> str:
        steps = self._context.steps
        step = steps.loop.position.step if steps is not None else None
        return "" if step is None or step.committed or steps is None or steps.left else f"step {step.index}"

    def _share_buffers(self, steps: StepLoop) -> None:
        """Set buffers to the leader's where some changed since fleet.model, as by a forward on one worker alone."""
        context = self._context
        own = saved_buffers_of(context.shared).tensors
        state = send_to_all(context.transport, dict(own), device=context.state_device)
        with torch.no_grad():
            for name, tensor in own:
                tensor.copy_(state[name])
        steps.combine.models_were_set()
        context.inform("before the first step some buffers were not the leader's: every worker has the leader's")

    def _refuse_unlike(self, steps: StepLoop) -> None:
        context = self._context
        if steps.loop.replica.alike or steps.index == 0:  # before any update, rounding explains no difference
            when = "before the first step"
            everybody = context.transport.gather("comparing replicas", lambda: self.contents().by_name())
            raise MisuseError(unlike_text(everybody, when=when) or f"{when} workers did not hold the same")
        found = self.make_equal()
        steps.combine.models_were_set()
        text = found.text(steps.index - 1, missing=context.tracking.missing())
        if not found.harmless:
            raise MisuseError(text)
        context.warn(f"{text}. Parameters and everything tracked were set to worker 0's")

    def share_tracked(self, objects: Mapping[str, Any]) -> None:
        """Give every worker the leader's state of modules, optimisers and schedules that are tracked from now on."""
        context, steps = self._context, self._context.steps
        transport = context.transport
        in_loop = steps is not None and steps.begun and not steps.left
        if transport.size == 1 or context.outside or transport.grouped or in_loop:
            return
        own = {name: state_of([(name, thing)]).number() for name, thing in objects.items()}
        with context.meet("fleet.track()") if steps is not None and steps.begun else nullcontext():
            everybody = transport.gather("fleet.track()", own)
            if any(set(theirs) != set(own) for theirs in everybody):
                return  # the first step raises
            unlike = sorted(name for name in own if len({theirs[name] for theirs in everybody}) > 1)
            if not unlike:
                return
            mine = {name: checkpoint.plain(objects[name].state_dict(), f"the state of {name}") for name in unlike}
            state = send_to_all(transport, mine, device=context.state_device)
        if not context.leads:
            for name in unlike:
                checkpoint.load_into(objects[name], deepcopy(state[name]))
        context.inform(f"fleet.track: {', '.join(unlike)} differed between workers, and every worker has the leader's")

    def shapes_digest(self) -> str:
        """Return a digest that is equal on workers whose models have the same shapes."""
        shapes = [shape_of(model) for model in self._context.models]
        return blake2b(repr(shapes).encode(), digest_size=16).hexdigest()

    def state(self, take_out: TakenOut | None = None) -> dict[str, Any]:
        """Return the models, everything tracked, and ``fleet.state``: plain values and tensors.

        In a worker of several processes the first alone has the divided tensors, complete; or they are taken out.
        """
        context, tracking = self._context, self._context.tracking
        reshard(context.models)

        def read(thing: Any, name: str, where: str) -> Any:
            state = thing.state_dict()
            plain = take_out(state, name) if take_out else gathered(state, keep=context.transport.shard == 0)
            return checkpoint.plain(plain, where)

        return {
            "models": [
                read(model, f"models.{number}", "the model's state") for number, model in enumerate(context.models)
            ],
            "tracked": {
                name: read(thing, f"tracked.{name}", f"the state of {name}") for name, thing in tracking.things.items()
            },
            "state": tracking.state.state_dict(),
        }

    def _lasting(self) -> Iterator[tuple[Any, ...]]:
        """Return the paths of frozen parameters and of buffers in the `state`: most steps leave them as they are."""
        context = self._context
        modules: list[tuple[tuple[Any, ...], torch.nn.Module]] = [
            (("models", number), model) for number, model in enumerate(context.models)
        ]
        tracked = context.tracking.things.items()
        modules += [(("tracked", name), thing) for name, thing in tracked if isinstance(thing, torch.nn.Module)]
        for path, module in modules:
            named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            yield from ((*path, name) for name, tensor in named if not tensor.requires_grad)

    def check_state(self) -> None:
        """Raise ValueError unless everything tracked has a state that can be handed to a peer."""
        for name, thing in self._context.tracking.things.items():
            checkpoint.plain(_without_divided(thing.state_dict()), f"the state of {name}")

    def own_state(self) -> dict[str, Any]:
        """Return a copy of everything tracked, and of ``fleet.state``, as this process has it."""
        tracking = self._context.tracking
        things = {name: deepcopy(thing.state_dict()) for name, thing in tracking.things.items()}
        return {"tracked": things, "state": deepcopy(tracking.state.state_dict())}

    def restore(self, source: Path, content: Mapping[str, Any], *, guard: bool = False) -> None:
        """Adopt a `state`.

        Args:
            source: where it is from, for an error's text.
            content: the state.
            guard: warn of values that the script overwrites unseen.
        """
        tracking, inside = self._context.tracking, self._inside()
        if inside is None:
            content = {**content, "tracked": deepcopy(content["tracked"])}  # some objects keep what they load
        checkpoint.restore(source, content, tracking.things, self._context.models, inside=inside)
        tracking.state.load_state_dict(content.get("state", {}), guard=guard)

    def take_over(self, content: Mapping[str, Any]) -> None:
        """Adopt a peer's `state`, whose tensors belong to this worker alone."""
        tracking, inside = self._context.tracking, self._inside()
        checkpoint.take_over(PEER, content, tracking.things, self._context.models, inside=inside)
        tracking.state.load_state_dict(content.get("state", {}), guard=False)

    def _inside(self) -> Collective | None:
        """Divide parameters again, and return what connects this worker's processes, where there are several."""
        reshard(self._context.models)
        transport = self._context.transport
        return transport if transport.shards > 1 else None

    def make_equal(self) -> Repair:
        """Set every worker's models and everything tracked to the leader's; return the differences."""
        context = self._context
        state = send_to_all(context.transport, self.state(), device=context.state_device)
        label, transport = "how far replicas were apart", context.transport
        if transport.shards == 1:
            apart = distance(context.models, state["models"])
            self.restore(Path("the leader's state"), state)
        else:
            held = [local(parameter) for parameter in self._known]
            before = [part.clone() for part in held]
            self.restore(Path("the leader's state"), state)
            apart = moved(before, held)
        kind = context.device.type + (f" x {transport.shards}" if transport.shards > 1 else "")
        found = transport.gather(
            label, lambda: {"device": kind, "distance": max(transport.collect(label, apart), default=apart)}
        )
        return Repair([one["distance"] for one in found], [one["device"] for one in found])

    def close(self) -> None:
        """Remove the hooks from the models."""
        for hook in self._hooks:
            hook.remove()
        self._bystanders.close()
        self.holding.close()


def _without_divided(state: Any) -> Any:
    """Return the same structure without tensors that are divided over a worker's processes."""
    return None if is_sharded(state) else mapped(lambda item, _: _without_divided(item), state)


def _frozen(models: Sequence[torch.nn.Module]) -> list[str]:
    """Return the first frozen parameters by name, and a digest of the rest."""
    frozen = [name for model in models for name, parameter in model.named_parameters() if not parameter.requires_grad]
    rest = frozen[NAMED:]
    digest = blake2b(repr(rest).encode(), digest_size=4).hexdigest()
    return frozen[:NAMED] + ([f"{len(rest)} more ({digest})"] if rest else [])


PEER = Path("a peer's state")
"""The source of a state that a peer gave, for an error's text."""
NAMED = 6
"""Parameters that an error names at most."""


def _refuse_ddp(module: torch.nn.Module, inputs: Any) -> None:
    if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        raise MisuseError(
            "the fleet's model runs inside DistributedDataParallel, which would wait for gradients of its own: delete "
            "the wrapper, Paceline combines the gradients"
        )


def check_division(transport: Transport, module: nn.Module, *, shard: bool) -> None:
    """Raise ValueError when a model does not fit a worker with this number of processes."""
    parameters = list(module.parameters())
    already = shards.any_sharded(parameters)
    if shard:
        if not transport.grouped and not transport.solitary:
            transport.mesh()
        if already:
            raise ValueError("the model is sharded already: leave shard=True out")
    elif transport.shards > 1 and not already:
        raise ValueError(
            f"this worker is {transport.shards} processes, and the model is whole: fleet.model(net, shard=True) "
            "divides it over them; or call fully_shard(..., mesh=fleet.mesh) yourself first"
        )
    elif already and not transport.grouped:
        transport.mesh()
    if transport.shards > 1 and (text := hooks_text([module])):
        raise ValueError(
            f"{text.partition(',')[0]}, and torch calls none on the parameters of a sharded model: {AFTER}"
        )
    if transport.shards > 1 and has_batch_norm(module):
        raise ValueError(
            "batch norm in a worker of several processes would see each process's rows alone, and keep other "
            "statistics in each: use GroupNorm or LayerNorm"
        )


AFTER = "change the gradients after step.reduce() instead"


def divide(module: nn.Module, mesh: Any) -> None:
    """Divide a model: the layers of every list or sequence one by one, then the rest.

    So no more than one layer is complete in memory at a time.
    """
    from torch.distributed.fsdp import fully_shard  # takes a while to import, and few need it

    uses = _uses(module)
    for part in layers_of(module):
        if all(uses[key] == count for key, count in _uses(part).items()):  # else it shares weights with another
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _uses(module: nn.Module) -> Counter[int]:
    """Return in how many modules each parameter stands, by id."""
    return Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that stand in a list or sequence and in no other of these.

    >>> blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    >>> [type(part).__name__ for part in layers_of(nn.ModuleDict({"blocks": blocks, "head": nn.Linear(2, 2)}))]
    ['Sequential', 'Sequential']
    """
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            found += [child] if next(child.parameters(), None) is not None else []
        else:
            found += layers_of(child)
    return found


def set_up_division(transport: Transport, module: nn.Module) -> None:
    """Check that all of a divided model is divided, and set up the sums of its gradients."""
    if not shards.any_sharded(module.parameters()):
        return
    for name, parameter in module.named_parameters():
        shards.check(name, parameter, transport.shards)
    set_up([module])
