"""DASO inside Trainer, Accelerate and Lightning, each with the real framework on ranks."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from jobs import started

pytestmark = [
    pytest.mark.later("starts ranks with a framework of seconds to import"),
    pytest.mark.slow("starts ranks with a framework of seconds to import"),
]
run_daso = partial(started, "daso")

COMMON = """
import json, sys
from pathlib import Path

import torch
from torch import nn

import daso


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        out = self.layers(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
data = [{"x": x, "labels": x.sum()} for x in xs]
"""

TRAINER = (
    COMMON
    + """
folder, batch_size, epochs, policy, resume = sys.argv[1:6]
world = daso.integrations.start(cpu=True)
import transformers

torch.manual_seed(world.rank)
model = Model()
if world.rank == 0:
    torch.manual_seed(0)
    model.load_state_dict(Model().state_dict())
arguments = transformers.TrainingArguments(
    output_dir=folder,
    use_cpu=True,
    num_train_epochs=4,
    max_steps=int(epochs),
    per_device_train_batch_size=int(batch_size),
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    optim="sgd",
    save_steps=6,
    eval_strategy="epoch",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = daso.integrations.DasoTrainer(
    model,
    arguments,
    train_dataset=data,
    eval_dataset=data[:32],
    daso={"policy": eval(policy, {"daso": daso}), "wire": "fp32"},
)
trainer.train(resume_from_checkpoint=resume == "resume" or None)
torch.save(
    {
        "model": model.state_dict(),
        "steps": trainer.state.global_step,
        "loss": trainer.evaluate()["eval_loss"],
        "world": [arguments.world_size, arguments.process_index],
    },
    Path(folder) / f"rank-{world.rank}.pt",
)
"""
)


def unclipped(program):
    """One copy has no measurements: clipped steps, and large ones, are merged by them."""
    for old in ("gradient_clip_val=1.0", "parameters(), 1.0)"):
        program = program.replace(old, old.replace("1.0", "1e9"))
    program = program.replace('optim="sgd"', 'optim="sgd", max_grad_norm=1e9')
    return program.replace("lr=0.1", "lr=0.01")


def train(
    tmp_path,
    name,
    ranks,
    nodes_of,
    batch,
    steps,
    policy,
    *,
    resume="anew",
    program=TRAINER,
    epochs=0,
):
    """Return what each rank ended with; until so many steps, or epochs."""
    path, folder = tmp_path / "train.py", tmp_path / name
    path.write_text(program)
    words = [str(path), str(folder), str(batch), str(epochs or steps), policy, resume]
    run = run_daso("run", "-n", str(ranks), "--ranks-per-node", str(nodes_of), *words)
    assert run.returncode == 0, run.stderr
    ends = [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]
    assert [end["world"] for end in ends] == [[ranks, rank] for rank in range(ranks)]
    for end in ends:
        assert end["steps"] == steps
        assert end["loss"] == ends[0]["loss"]
        for key, one in end["model"].items():
            assert torch.equal(one, ends[0]["model"][key]), key
    return ends[0], folder


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_the_trainer_sees_all_ranks_and_trains_as_one_process(tmp_path):
    """Ranks take batches in turn: together they are the batches of one process."""
    steps, policy = 24, "daso.Fixed(1, 0)"
    found, folder = train(tmp_path, "ranks", 4, 2, 2, steps, policy)
    alone, _ = train(tmp_path, "alone", 1, 1, 8, steps, policy)
    for name, one in found["model"].items():
        torch.testing.assert_close(one, alone["model"][name], rtol=1e-4, atol=1e-5)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    saved = sorted(path.name for path in (folder / "checkpoint-24").iterdir())
    assert saved.count("optimizer.pt") == 1
    assert sum(name.startswith("rng_state") for name in saved) == 4


def test_a_training_resumes_from_the_one_copy_to_the_same_bits(tmp_path):
    policy = "daso.Fixed(4, 2)"
    common = {"program": unclipped(TRAINER)}
    whole, _ = train(tmp_path, "whole", 2, 1, 4, 24, policy, **common)
    train(tmp_path, "parts", 2, 1, 4, 12, policy, **common)
    again, folder = train(tmp_path, "parts", 2, 1, 4, 24, policy, resume="resume", **common)
    state = json.loads((folder / "checkpoint-24" / "trainer_state.json").read_text())
    assert state["global_step"] == 24
    for name, one in again["model"].items():
        assert torch.equal(one, whole["model"][name]), name


def test_a_trainer_evaluates_and_trains_again(tmp_path):
    """With moments of a node's own, and nothing saved: all is the same on all ranks at the end."""
    program = TRAINER.replace('optim="sgd"', 'optim="adamw_torch"').replace(
        "save_steps=6", 'save_strategy="no"'
    )
    again = """
trainer.train()
trainer.evaluate()
trainer.train()
assert not trainer.accelerator.handles
"""
    assert "trainer.train(resume" in program
    program = program.replace("trainer.train(resume", f"{again}trainer.train(resume")
    train(tmp_path, "again", 2, 1, 4, 10, "daso.Fixed(4, 2)", program=program)


def test_a_framework_that_does_not_see_the_ranks_is_refused(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        COMMON
        + """
accelerator = daso.integrations.DasoAccelerator()  # start() is forgotten
model = Model()
accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""
    )
    run = run_daso("run", "-n", "2", "--ranks-per-node", "1", str(program))
    assert run.returncode == 1
    assert (
        "Accelerate must see all 2 ranks, but it sees 1; call daso.integrations.start" in run.stderr
    )


ACCELERATE = (
    COMMON
    + """
folder, policy = Path(sys.argv[1]), eval(sys.argv[2], {"daso": daso})
world = daso.integrations.start(cpu=True)

accelerator = daso.integrations.DasoAccelerator(
    cpu=True, gradient_accumulation_steps=2, daso={"policy": policy, "wire": "fp32"}
)
torch.manual_seed(world.rank)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def epoch():
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def bits():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


for _ in range(2):
    epoch()
accelerator.save_state(str(folder / "state"))
saved = bits()
epoch()
accelerator.synchronize()
after = bits()
accelerator.load_state(str(folder / "state"))
assert torch.equal(bits(), saved)
epoch()
accelerator.synchronize()
assert torch.equal(bits(), after), (bits() - after).abs().max()
everyones = accelerator.gather_for_metrics(torch.tensor([world.rank]))
(handle,) = accelerator.handles.values()
report = handle.report()
accelerator.close()
accelerator.close()
print(
    f"rank {world.rank}: world {accelerator.num_processes}, gathered {everyones.tolist()}, "
    f"batches {len(loader)}, steps {report['batches']}, sum {float(after.double().sum()):.12f}"
)
"""
)


def test_accelerate_prepares_gathers_accumulates_and_resumes(tmp_path: Path) -> None:
    policy = "daso.Fixed(3, 1)"
    program = tmp_path / "program.py"
    program.write_text(unclipped(ACCELERATE))
    run = run_daso("run", "-n", "2", "--ranks-per-node", "1", str(program), str(tmp_path), policy)
    assert run.returncode == 0, run.stderr
    told = re.findall(
        r"rank \d: world 2, gathered \[0, 1\], batches 12, steps (\d+), sum (-?\d+\.\d{12})",
        run.stdout,
    )
    assert len(told) == 2
    assert told[0] == told[1]
    assert int(told[0][0]) == 18  # as loaded: 12 and 6 more


LIGHTNING = (
    COMMON
    + """
folder, batch_size, epochs, policy, resume = sys.argv[1:6]
world = daso.integrations.start(cpu=True)
from lightning import pytorch as lightning
from lightning.pytorch.callbacks import ModelCheckpoint


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def validation_step(self, batch, _):
        self.log("loss", self.model(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(self.note)
        return optimizer

    def note(self, _, args, kwargs):
        self.closures = getattr(self, "closures", 0) + (kwargs.get("closure") is not None)

    def on_train_end(self):
        self.open_at_end = len(self.trainer.strategy.handles)


torch.manual_seed(0 if world.rank == 0 else 5)
lit = Lit()
save = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world.local_size,
    num_nodes=world.nodes,
    strategy=daso.integrations.DasoStrategy(
        daso={"policy": eval(policy, {"daso": daso}), "wire": "fp32"}
    ),
    max_epochs=int(epochs),
    gradient_clip_val=1.0,
    callbacks=[save],
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = torch.utils.data.DataLoader(data, batch_size=int(batch_size))
checks = torch.utils.data.DataLoader(data[:32], batch_size=int(batch_size))
last = str(Path(folder) / "last.ckpt") if resume == "resume" else None
trainer.fit(lit, loader, checks, ckpt_path=last)
torch.save(
    {
        "model": lit.state_dict(),
        "steps": trainer.global_step,
        "loss": float(trainer.callback_metrics["loss"]),
        "world": [trainer.world_size, trainer.global_rank],
        "closures": lit.closures,
        "open at end": lit.open_at_end,
    },
    Path(folder) / f"rank-{world.rank}.pt",
)
"""
)


def test_lightning_sees_all_ranks_and_trains_as_one_process(tmp_path):
    policy = "daso.Fixed(1, 0)"
    common = {"program": LIGHTNING, "epochs": 2}
    found, folder = train(tmp_path, "ranks", 4, 2, 2, 24, policy, **common)
    alone, _ = train(tmp_path, "alone", 1, 1, 8, 24, policy, **common)
    for name, one in found["model"].items():
        torch.testing.assert_close(one, alone["model"][name], rtol=1e-4, atol=1e-5)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert (folder / "last.ckpt").exists()
    assert found["closures"] == 0, "a step of SGD stands behind its closure, and looks at gradients"
    assert found["open at end"] == 0, "later the module is on the CPU"


def test_a_training_of_lightning_resumes_to_the_same_bits(tmp_path):
    policy = "daso.Fixed(5, 2)"
    common = {"program": unclipped(LIGHTNING)}
    whole, _ = train(tmp_path, "whole", 2, 1, 4, 24, policy, epochs=2, **common)
    train(tmp_path, "parts", 2, 1, 4, 12, policy, epochs=1, **common)
    again, _ = train(tmp_path, "parts", 2, 1, 4, 24, policy, resume="resume", epochs=2, **common)
    for name, one in again["model"].items():
        assert torch.equal(one, whole["model"][name]), name
