"""Model files: what was written comes back, and nothing else is taken, least of all code."""

import pickle
from pathlib import Path

import pytest
import torch

from paceline.research.deep.deep_forecast import Deep
from paceline.research.deep.model import DeepModel, Shape, load_model, save_model

TINY = Shape(lag=4, memory=8, state=2, context=6, hidden=8, summary=6)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    target = tmp_path / "model.pt"
    save_model(DeepModel(TINY), target, about={"learned_from": ["a.csv"]})
    return target


def change(file: Path, **fields: object) -> None:
    torch.save({**torch.load(file, weights_only=True), **fields}, file)


def test_a_model_comes_back_as_it_was(tmp_path: Path) -> None:
    model = DeepModel(TINY)
    save_model(model, tmp_path / "model.pt")
    found = load_model(tmp_path / "model.pt")
    assert found.shape == TINY
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_forecast_is_made_from_a_file(file: Path) -> None:
    assert not Deep(file).learns
    assert not Deep(str(file)).learns


def test_a_missing_or_unwritable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the model .*none\.pt"):
        load_model(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="cannot write the model"):
        save_model(DeepModel(TINY), tmp_path / "nowhere" / "model.pt")


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_a_truncated_file_is_refused(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="damaged"):
        load_model(file)


def test_text_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("step,a,b\n1,1.0,2.0\n")
    with pytest.raises(ValueError, match="not a forecast"):
        load_model(tmp_path / "model.pt")


def test_a_checkpoint_of_something_else_is_not_a_forecast(tmp_path: Path) -> None:
    for content in ({"weights": torch.ones(3)}, torch.ones(3), [1, 2], {"kind": "other", "version": 1}):
        torch.save(content, tmp_path / "model.pt")
        with pytest.raises(ValueError, match="is not a forecast"):
            load_model(tmp_path / "model.pt")


class _Touches:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    plain, zipped = tmp_path / "plain.pt", tmp_path / "zipped.pt"
    plain.write_bytes(pickle.dumps(_Touches(touched), protocol=2))
    torch.save({"kind": "paceline deep forecast", "weights": _Touches(touched)}, zipped)
    for file in (plain, zipped):
        with pytest.raises(ValueError, match="not a forecast"):
            load_model(file)
    assert not touched.exists()


def test_another_version_is_refused_and_says_so(file: Path) -> None:
    change(file, version=99)
    with pytest.raises(ValueError, match="version 99"):
        load_model(file)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"weights": None}, "damaged"),
        ({"weights": {}}, "do not match"),
        ({"shape": {"lag": 7}}, "size"),
        ({"shape": {"lag": 0}}, "lag"),
        ({"shape": {"depth": 3}}, "sizes"),
        ({"shape": None}, "damaged"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(file: Path, fields: dict[str, object], part: str) -> None:
    change(file, **fields)
    with pytest.raises(ValueError, match=part):
        load_model(file)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(file: Path, wrong: float) -> None:
    weights = torch.load(file, weights_only=True)["weights"]
    weights["emit.bias"][0] = wrong
    change(file, weights=weights)
    with pytest.raises(ValueError, match="finite"):
        load_model(file)
