"""Copies of a training's state: as it was, whatever the training does next."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

from paceline.checkpoint.snapshot import Snapshot


def test_a_snapshot_keeps_what_the_training_changes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    live = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "queues": [[0, 4], [9]]}
    buffer = io.BytesIO()
    torch.save(live, buffer)
    taken = Snapshot(live)
    taken.wait()
    optimizer.step()
    live["queues"][0].append(7)
    kept = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert torch.equal(taken.content["model"]["weight"], kept["model"]["weight"])
    assert not torch.equal(taken.content["model"]["weight"], model.weight)
    ours, theirs = (content["optimizer"]["state"][0] for content in (taken.content, kept))
    assert all(torch.equal(ours[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert taken.content["queues"] == [[0, 4], [9]]


def test_the_kinds_of_values_stay() -> None:
    view = torch.arange(6.0).view(2, 3).t()
    value = {
        "ordered": OrderedDict(a=torch.ones(1)),
        "several": (1, [2.5], {"x"}, None, b"y", torch.Size([1, 2]), torch.float16),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "view": view,
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(2).to_sparse(),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    content = Snapshot(value).content
    assert type(content["ordered"]) is OrderedDict
    assert content["several"] == value["several"]
    assert type(content["parameter"]) is nn.Parameter
    assert not content["parameter"].requires_grad
    assert torch.equal(content["view"], view)
    assert content["view"].data_ptr() != view.data_ptr()
    assert content["empty"].shape == (0, 3)
    assert torch.equal(content["sparse"].to_dense(), torch.eye(2))
    assert content["half"].dtype == torch.bfloat16


def test_tied_weights_are_copied_once() -> None:
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    model[1].weight = model[0].weight
    content = Snapshot({"model": model.state_dict()}).content["model"]
    assert content["0.weight"].data_ptr() == content["1.weight"].data_ptr()
    buffer = io.BytesIO()
    torch.save(content, buffer)
    assert len(buffer.getvalue()) < 2 * 50 * 50 * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_state_is_copied_in_the_order_of_its_work_without_waiting_for_it() -> None:
    weight = torch.zeros(1 << 22, device="cuda")
    torch.cuda._sleep(200_000_000)  # about 0.1 s of work before
    weight += 1
    taken = Snapshot({"weight": weight, "again": weight.detach()})
    assert not taken._arrived[0].query(), "the training thread waited"
    weight += 1
    taken.wait()
    assert taken.content["weight"].is_pinned()
    assert taken.content["weight"].eq(1).all()
    assert taken.content["again"].data_ptr() == taken.content["weight"].data_ptr()
