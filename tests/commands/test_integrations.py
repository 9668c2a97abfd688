"""DASO inside Hugging Face's Trainer and Accelerate, each with the real framework on ranks."""

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
    optim="sgd",  # of what AdamW steps are restored by, one copy for all tells nothing
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


def train(tmp_path, name, ranks, nodes_of, batch, steps, policy, resume="anew"):
    """Return what each rank ended with."""
    program, folder = tmp_path / "trainer.py", tmp_path / name
    program.write_text(TRAINER)
    words = [str(program), str(folder), str(batch), str(steps), policy, resume]
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


@pytest.mark.parametrize(("ranks", "nodes_of"), [(2, 1), (4, 2)])
def test_the_trainer_sees_all_ranks_and_trains_as_one_process(tmp_path, ranks, nodes_of):
    """Ranks take batches in turn: together they are the batches of one process."""
    steps, policy = 24, "daso.Fixed(1, 0)"
    found, folder = train(tmp_path, "ranks", ranks, nodes_of, 8 // ranks, steps, policy)
    alone, _ = train(tmp_path, "alone", 1, 1, 8, steps, policy)
    for name, one in found["model"].items():
        torch.testing.assert_close(one, alone["model"][name], rtol=1e-4, atol=1e-5)
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    saved = sorted(path.name for path in (folder / "checkpoint-24").iterdir())
    assert saved.count("optimizer.pt") == 1
    assert sum(name.startswith("rng_state") for name in saved) == ranks


def test_a_training_resumes_from_the_one_copy_to_the_same_bits(tmp_path):
    policy = "daso.Fixed(4, 2)"
    whole, _ = train(tmp_path, "whole", 2, 1, 4, 24, policy)
    train(tmp_path, "parts", 2, 1, 4, 12, policy)
    again, folder = train(tmp_path, "parts", 2, 1, 4, 24, policy, "resume")
    state = json.loads((folder / "checkpoint-24" / "trainer_state.json").read_text())
    assert state["global_step"] == 24
    for name, one in again["model"].items():
        assert torch.equal(one, whole["model"][name]), name


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


@pytest.mark.parametrize("policy", ["daso.Fixed(1, 0)", "daso.Fixed(3, 1)"])
def test_accelerate_prepares_gathers_accumulates_and_resumes(tmp_path: Path, policy: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(ACCELERATE)
    run = run_daso("run", "-n", "2", "--ranks-per-node", "1", str(program), str(tmp_path), policy)
    assert run.returncode == 0, run.stderr
    told = re.findall(
        r"rank \d: world 2, gathered \[0, 1\], batches 12, steps (\d+), sum (-?\d+\.\d{12})",
        run.stdout,
    )
    assert len(told) == 2
    assert told[0] == told[1]
    assert int(told[0][0]) in (18, 24)  # as loaded: 12 and 6 more
