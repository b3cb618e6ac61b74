"""The device of a worker, on computers with a number of GPUs made up here."""

from __future__ import annotations

import pytest
import torch

from paceline.settings import choose_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("PACELINE_DEVICE", raising=False)
    return chosen


@pytest.mark.parametrize("asked", ["cuda", torch.device("cuda"), None])
def test_a_gpu_without_a_number_is_the_one_of_the_process_s_own_number(
    asked: str | torch.device | None, two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device(asked) == torch.device("cuda:1")
    assert two_gpus == [torch.device("cuda:1")]
    monkeypatch.delenv("LOCAL_RANK")
    assert choose_device(asked) == torch.device("cuda:0")


def test_a_gpu_that_is_not_there_is_refused(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert choose_device(None) == torch.device("cpu"), "more processes than GPUs"
    for asked in ("cuda", "cuda:2"):
        with pytest.raises(ValueError, match="device cuda:2 is not there: this machine has 2 GPUs"):
            choose_device(asked)
    assert choose_device("cuda:1") == torch.device("cuda:1")
