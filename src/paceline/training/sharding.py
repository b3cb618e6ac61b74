"""Division of a model over the processes of a worker with torch's `fully_shard`, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from paceline.checkpoint import shards
from paceline.gradients.sharded import set_up
from paceline.settings import has_batch_norm
from paceline.step.checks.user_code import hooks_text
from paceline.transport import Transport


def check(transport: Transport, module: nn.Module, *, shard: bool) -> None:
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


def prepare(transport: Transport, module: nn.Module) -> None:
    """Check that all of a divided model is divided, and set up the sums of its gradients."""
    if not shards.any_sharded(module.parameters()):
        return
    for name, parameter in module.named_parameters():
        shards.check(name, parameter, transport.shards)
    set_up([module])
