"""What a loss is a mean over (tokens, pixels, class weights, a mask) is seen by itself: no script says ``weight=``."""

from __future__ import annotations

from pathlib import Path

import pytest
from crew import nursery
from programs import apart, outcomes, results

pytestmark = pytest.mark.fleet

BEFORE = """
import logging
import torch
import torch.nn.functional as F
from torch import nn
import paceline

class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.rows[i]

def flat(model):
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]

# -- a GPT and texts of unlike lengths, some of whose tokens, or all, are ignored
torch.manual_seed(3)
VOCABULARY = 11
lengths = torch.randint(2, 17, (48,)).tolist()
texts = []
for number, length in enumerate(lengths):
    tokens = torch.randint(0, VOCABULARY, (length,))
    labels = torch.where(torch.rand(length) < 0.3, -100, tokens.roll(-1))
    texts.append((tokens, torch.full_like(labels, -100) if 12 <= number < 18 else labels))

def padded(rows):
    pad = lambda part, value: nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=value)
    return pad([tokens for tokens, _ in rows], 0), pad([labels for _, labels in rows], -100)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)
        self.double()
    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=torch.float64), 1)
        return self.head(self.block(self.tokens(tokens) + self.places.weight[:length], src_mask=mask))

rarity = torch.linspace(0.2, 3.0, VOCABULARY, dtype=torch.float64)

def text_loss(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)

# -- samples of eight features, and pictures of unlike sizes
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 5)
        self.double()
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

x = torch.randn(48, 8, dtype=torch.float64)
y = torch.randint(0, 5, (48,))
wanted = torch.rand(48, 5, dtype=torch.float64)
points = [(x[i], y[i], wanted[i]) for i in range(48)]
pictures = [torch.randn(int(n), 8, dtype=torch.float64) for n in torch.randint(1, 9, (48,))]
stacked = torch.utils.data.default_collate
tall = lambda a: a.abs().sum(1) > 5.0

def picture_loss(model, rows):
    return torch.cat([(model(one) - one[:, :5]).square().flatten() for one in rows]).mean()

def coded(a, model):
    code = model(a)
    return F.mse_loss(code, a[:, :5], reduction="sum") + code.square().sum()

CASES = {
    "class weights, ignored tokens": (GPT, texts, padded, lambda m, b: text_loss(m(b[0]), b[1], weight=rarity)),
    "tokens": (GPT, texts, padded, lambda m, b: text_loss(m(b[0]), b[1])),
    "smoothed": (GPT, texts, padded, lambda m, b: text_loss(m(b[0]), b[1], weight=rarity, label_smoothing=0.1)),
    "a mask": (GPT, texts, padded, lambda m, b: (text_loss(m(b[0]), b[1], reduction="none")
        * (b[1].flatten() != -100)).sum() / (b[1] != -100).sum().clamp(min=1)),
    "unlike pictures": (Net, pictures, list, picture_loss),
    "features, a penalty": (Net, points, stacked, lambda m, b: F.mse_loss(m(b[0]), b[2]) / 4
        + 1e-2 * sum(p.square().sum() for p in m.parameters()) + m.head.weight.abs().mean()),
    "probabilities": (Net, points, stacked, lambda m, b: F.cross_entropy(m(b[0]), b[2], weight=rarity[:5])),
    "rare classes": (Net, points, stacked, lambda m, b: F.binary_cross_entropy_with_logits(
        m(b[0]), b[2].round(), pos_weight=rarity[:5])),
    "proportional means": (Net, points, stacked,
        lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * m(b[0]).square().mean()),
    "sums": (Net, points, stacked, lambda m, b: coded(b[0], m) / len(b[0])),
    "rows first": (Net, points, stacked, lambda m, b: (m(b[0]) - b[2]).square().mean(0).mean()),
    "rows first, weighted": (Net, points, stacked,
        lambda m, b: ((m(b[0]) - b[2]).square().mean(0) * rarity[:5]).mean()),
    "features added": (Net, points, stacked, lambda m, b: (m(b[0]) - b[2]).square().mean(0) @ rarity[:5]),
    "weights of mean 1": (Net, points, stacked, lambda m, b: (
        F.cross_entropy(m(b[0]), b[1], reduction="none") * b[2][:, 0] / b[2][:, 0].mean()).mean()),
    "tasks weighted": (Net, points, stacked, lambda m, b: (
        torch.stack([F.cross_entropy(m(b[0]), b[1]), F.mse_loss(m(b[0]), b[2])]) * rarity[:2]).sum()),
    "a loss of each sample": (Net, points, stacked,
        lambda m, b: torch.stack([F.mse_loss(one, other) for one, other in zip(m(b[0]), b[2])]).mean()),
    "a mean of each text": (GPT, texts, list, lambda m, b: sum(
        F.cross_entropy(m(tokens[None])[0], tokens) for tokens, _ in b) / len(b)),
    "nothing to learn from": (Net, points, stacked,
        lambda m, b: F.mse_loss(m(b[0])[b[1] == 1], b[2][b[1] == 1]) if (b[1] == 1).any() else m(b[0]).sum() * 0),
    "chosen": (Net, points, stacked,
        lambda m, b: F.cross_entropy(m(b[0])[tall(b[0])], b[1][tall(b[0])], reduction="sum") / tall(b[0]).sum()),
}

def one_process(name):
    make, rows, collate, loss = CASES[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, 48, 16):
        optimizer.zero_grad()
        loss(model, collate(rows[start : start + 16])).backward()
        optimizer.step()
    return flat(model)

def steps_of(fleet, rows, collate):
    loader = torch.utils.data.DataLoader(Rows(rows), batch_size=3, collate_fn=collate)
    return fleet.steps(loader, global_batch=16, micro_batch=3, shuffle=False)
"""

FLEET = """
result = {}
with paceline.join() as fleet:
    models = {make: fleet.model(make()) for make in (GPT, Net)}
    for name, (make, rows, collate, loss) in CASES.items():
        model = models[make]
        model.load_state_dict(make().state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        weights = []
        for step in steps_of(fleet, rows, collate):
            for batch in step:
                step.backward(loss(model, batch))
            step.commit(optimizer)
            weights.append(step.record.weight)
        result[name] = [flat(model), one_process(name), weights]
"""


def test_a_step_is_the_mean_of_one_process_whatever_the_loss_is_a_mean_over(tmp_path: Path) -> None:
    two = results(tmp_path, FLEET, before=BEFORE, PACELINE_PACE="fixed:1,3")
    assert two[0] == two[1]
    for name, (ours, plain, _) in two[0].items():
        assert apart(ours, plain) < 1e-12, name
    for name in ("features, a penalty", "proportional means", "sums", "rows first", "a loss of each sample"):
        assert two[0][name][2] == [16.0] * 3, "such a mean counts by samples"
    assert two[0]["tokens"][2] != [16.0] * 3


LIGHTNING = """
import lightning.pytorch as pl
from paceline.adapters.lightning import PacelineStrategy

class Texts(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.gpt = GPT()
        self.loss = nn.CrossEntropyLoss(weight=rarity, label_smoothing=0.1)
    def training_step(self, batch):
        return self.loss(self.gpt(batch[0]).flatten(0, 1), batch[1].flatten())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

def trained(strategy, size):
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, precision="64-true", **options)
    module = Texts()
    trainer.fit(module, torch.utils.data.DataLoader(Rows(texts), batch_size=size, collate_fn=padded))
    return flat(module)

ours = trained(PacelineStrategy(16, 3, quiet=True), 3)
result = [ours, trained("auto", 16)]
"""

TRANSFORMERS = """
import os
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from paceline.adapters.transformers import PacelineArguments, PacelineTrainer

def gpt():
    torch.manual_seed(5)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=20, n_embd=16, n_layer=1, n_head=2, **still))

def collate(rows):
    tokens, labels = padded(rows)
    return {"input_ids": tokens, "labels": labels}

def loss(outputs, labels, num_items_in_batch=None):
    return text_loss(outputs["logits"], labels, weight=rarity.float())

usual = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 2, "save_strategy": "no",
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False}
given = {"train_dataset": Rows(texts), "data_collator": collate, "compute_loss_func": loss}
folder = os.path.dirname(os.path.abspath(__file__))
args = PacelineArguments(f"{folder}/ours", global_batch=16, micro_batch=3, quiet=True, **usual)
ours = PacelineTrainer(gpt(), args, **given)
ours.train()
plain = Trainer(gpt(), TrainingArguments(f"{folder}/plain", per_device_train_batch_size=16, **usual), **given)
if ours.fleet.world_size == 1:
    plain.train()
ours.end()
result = [flat(ours.model), flat(plain.model)]
"""


def test_lightning_takes_the_same_weight(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    nursery().load("lightning.pytorch")
    two = results(tmp_path, LIGHTNING, before=BEFORE, PACELINE_PACE="fixed:1,3")
    assert two[0] == two[1]
    assert apart(*two[0]) < 1e-12


def test_transformers_takes_the_same_weight(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    nursery().load("paceline.adapters.transformers")
    two = results(tmp_path / "two", TRANSFORMERS, before=BEFORE, PACELINE_PACE="fixed:1,3")
    ((alone, plain),) = results(tmp_path / "one", TRANSFORMERS, workers=1, before=BEFORE)
    assert two[0][0] == two[1][0]
    assert apart(two[0][0], plain) < 1e-6
    assert apart(alone, plain) < 1e-6


COUPLED = """
def contrastive(a, m):
    code = F.normalize(m(a), dim=1)
    return F.cross_entropy(code @ code.t() / 0.1, torch.arange(len(a)))

with paceline.join() as fleet:
    model = fleet.model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for loss in (lambda a, b: F.cross_entropy(model(a), b), lambda a, b: contrastive(a, model)):
        print("next", file=__import__("sys").stderr)
        for step in steps_of(fleet, points, stacked):
            for a, b, _ in step:
                step.backward(loss(a, b))
            step.commit(optimizer)
result = 0
"""


def test_a_loss_that_couples_samples_is_told_of_once(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, COUPLED, before=BEFORE)
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    said = ended[0].err.split("next")
    assert "couples the samples" not in said[1]
    assert said[2].count("the loss couples the samples of a micro-batch") == 1


LATER = """
def loss(m, b, step):
    code = F.normalize(m(b[0]), dim=1)
    plain = F.cross_entropy(m(b[0]), b[1])
    return plain + F.cross_entropy(code @ code.t(), torch.arange(len(code))) if step.index > 0 else plain

with paceline.join() as fleet:
    model = fleet.model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps_of(fleet, points, stacked):
        for batch in step:
            step.backward(loss(model, batch, step))
        step.commit(optimizer)
        print("done", step.index, file=__import__("sys").stderr)
result = 0
"""


def test_a_coupling_that_begins_later_reaches_the_log_of_a_leader_without_a_share(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, LATER, before=BEFORE, PACELINE_PACE="fixed:0,1")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    said = ended[0].err.split("done 0")
    assert "couples the samples" not in said[0]
    assert said[1].count("the loss couples the samples of a micro-batch") == 1


VARYING = """
seen = 0
with paceline.join() as fleet:
    model = fleet.model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for how in (lambda step, batch: 0.5 ** step.index, lambda step, batch: seen, lambda step, batch: batch[2].mean()):
        print("next", file=__import__("sys").stderr)
        for step in steps_of(fleet, points, stacked):
            for batch in step:
                seen += 1
                step.backward(F.cross_entropy(model(batch[0]), batch[1]) * how(step, batch))
            step.commit(optimizer)
result = 0
"""


def test_a_factor_that_changes_from_micro_batch_to_micro_batch_is_told_of(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, VARYING, before=BEFORE)
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    said = ended[0].err.split("next")
    assert "is not the same in every micro-batch" not in said[1]
    assert "class weight in the loss is not the same in every micro-batch" in said[2]


RARE = """
def focal(m, b):
    positives = (b[1] == 4).sum()
    return F.cross_entropy(m(b[0]), b[1], reduction="sum") / positives.clamp(min=1)

def exact():
    model.load_state_dict(Net().state_dict())
    for step in steps_of(fleet, points, stacked):
        for batch in step:
            step.add(positives=(batch[1] == 4).sum())
            step.backward(F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(batch[0]))
        step.reduce()
        for p in model.parameters():
            p.grad *= step.record.weight / max(step.sums["positives"], 1)
        step.commit(optimizer)

with paceline.join() as fleet:
    model = fleet.model(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps_of(fleet, points, stacked):
        for batch in step:
            step.backward(focal(model, batch))
        step.commit(optimizer)
    exact()
    plain = Net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01)
    for start in range(0, 48, 16):
        sgd.zero_grad()
        focal(plain, stacked(points[start : start + 16])).backward()
        sgd.step()
    result = [flat(model), flat(plain)]
"""


def test_a_count_of_nothing_made_one_beside_a_loss_is_told_of_with_what_is_exact(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, RARE, before=BEFORE, PACELINE_PACE="fixed:1,3")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    assert ended[0].err.count("divided by a count of exactly 1") == 1
    assert apart(*ended[0].value) < 1e-12


REFUSED = """
result = {}
def attempt(name, make, rows, collate, backward):
    model = models[make]
    model.load_state_dict(make().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in steps_of(fleet, rows, collate):
            for number, batch in enumerate(step):
                backward(step, model, batch, number)
            step.commit(optimizer)
        result[name] = "trained"
    except paceline.MisuseError as error:
        result[name] = str(error)

def normalised(m, b):
    w = b[2][:, 0].exp()
    return (w / w.sum() * F.cross_entropy(m(b[0]), b[1], reduction="none")).sum()

def two_means(step, m, b, number):
    logits = m(b[0])
    step.backward(text_loss(logits, b[1]) + logits.mean(dim=(1, 2)).mean())

def some_given(step, m, b, number):
    step.backward(text_loss(m(b[0]), b[1]), weight=len(b[0]) if number % 2 else None)

def by_rank(step, m, b, number):
    weight = len(b[0]) if fleet.rank else None
    step.backward(F.mse_loss(m(b[0]), b[2]), weight=weight)

with paceline.join() as fleet:
    models = {make: fleet.model(make()) for make in (GPT, Net)}
    attempt("a sum", Net, points, stacked,
        lambda s, m, b, n: s.backward(F.mse_loss(m(b[0]), b[2], reduction="sum")))
    attempt("weights of sum 1", Net, points, stacked, lambda s, m, b, n: s.backward(normalised(m, b)))
    attempt("a number", Net, points, stacked,
        lambda s, m, b, n: s.backward(F.mse_loss(m(b[0]), b[2], reduction="none").sum() / 16))
    attempt("a sum with a weight", Net, points, stacked,
        lambda s, m, b, n: s.backward(F.mse_loss(m(b[0]), b[2], reduction="sum"), weight=1))
    attempt("two means", GPT, texts, padded, two_means)
    attempt("some given", GPT, texts, padded, some_given)
    attempt("given by rank", Net, points, stacked, by_rank)
"""


def test_losses_without_one_weight_are_refused_with_what_to_write(tmp_path: Path) -> None:
    ended = outcomes(tmp_path, REFUSED, before=BEFORE, PACELINE_PACE="fixed:1,3")
    assert [one.code for one in ended] == [0, 0], [one.err[-3000:] for one in ended]
    for said in (one.value for one in ended):
        assert "the loss is a sum over the micro-batch and not a mean" in said["a sum"]
        assert "loss / len(x)" in said["a sum"]
        assert "write (w * l).sum() / w.sum() with the weights as they were" in said["weights of sum 1"]
        assert "weight=len(x)" not in said["a sum"] + said["weights of sum 1"]
        assert "a sum divided by 16, which is neither" in said["a number"]
        assert said["a sum with a weight"] == "trained"
        assert "means over unlike things" in said["two means"]
        assert "others were given a weight" in said["some given"]
        assert "others were given a weight" in said["given by rank"]


WARNED = """
def given(step, m, b, number):
    step.backward(F.mse_loss(m(b[0]), b[2], reduction="sum"), weight=len(b[0]))

def by_samples(step, m, b, number):
    step.backward(text_loss(m(b[0]), b[1]), weight=len(b[0]))

def two_kinds(step, m, b, number):
    out, labelled = m(b[0]), (b[1] > 1).all()
    step.backward(F.cross_entropy(out, b[1]) if labelled else F.mse_loss(out, b[2]) / 5)

def own_pace(step, m, b, number):
    count = (b[1] != -100).sum()
    loss = text_loss(m(b[0]), b[1], reduction="sum")
    step.backward(loss / (count + 1e-6), weight=count)

def scaled(step, m, b, number):
    step.backward(F.mse_loss(m(b[0]), b[2]), weight=len(b[0]))

with paceline.join() as fleet:
    model = fleet.model(MAKE())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps_of(fleet, ROWS, COLLATE):
        for number, batch in enumerate(step):
            LOSS(step, model, batch, number)
        step.commit(optimizer)
    result = "trained"
"""
OF_POINTS, OF_TEXTS = ("Net", "points", "stacked"), ("GPT", "texts", "padded")


@pytest.mark.parametrize(
    ("loss", "of", "said"),
    [
        ("given", OF_POINTS, "write (w * l).sum() / w.sum() with the weights as they were"),
        ("by_samples", OF_TEXTS, "is not proportional to what the loss is divided by"),
        ("two_kinds", OF_POINTS, "micro-batches have unlike terms"),
        ("own_pace", OF_TEXTS, ""),
        ("scaled", OF_POINTS, ""),
    ],
)
def test_a_weight_beside_what_the_loss_shows_and_unlike_terms_are_warned_of(
    tmp_path: Path, loss: str, of: tuple[str, str, str], said: str
) -> None:
    script = WARNED
    for name, value in zip(("MAKE", "ROWS", "COLLATE", "LOSS"), (*of, loss), strict=True):
        script = script.replace(name, value)
    ended = outcomes(tmp_path, script, before=BEFORE, PACELINE_PACE="fixed:1,3")
    assert [one.value for one in ended] == ["trained"] * 2, [one.err[-3000:] for one in ended]
    told = [one for one in ended[0].err.splitlines() if "step is not that of one process" in one or "a sum" in one]
    assert len(told) == bool(said), ended[0].err
    assert said in "".join(told)


BY_HAND = """
class ByHand(Net):
    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h - h.mean(0) if MIXES else h)

with paceline.join() as fleet:
    model = fleet.model(ByHand())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps_of(fleet, points, stacked):
        for a, b, _ in step:
            step.backward(F.cross_entropy(model(a), b))
        step.commit(optimizer)
    result = "trained"
"""


@pytest.mark.parametrize("mixes", [True, False])
def test_a_model_that_mixes_the_samples_of_a_batch_is_warned_of(tmp_path: Path, mixes: bool) -> None:
    ended = outcomes(tmp_path, BY_HAND.replace("MIXES", str(mixes)), before=BEFORE, PACELINE_PACE="fixed:1,3")
    assert [one.value for one in ended] == ["trained"] * 2, [one.err[-3000:] for one in ended]
    assert ended[0].err.count("the model mixes the samples of a micro-batch") == mixes
