"""An estimate includes the program's first evaluation, and changes none of the program's files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import warm_python

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20

HEAD = """\
import os, threading, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 8))
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(1280, 256))
held_out = TensorDataset(torch.randn(20480, 256))

def train(batch):
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

EVALUATES = """
for epoch in range(2):
    for (batch,) in DataLoader(data, 32, num_workers=WORKERS):
        train(batch)
    model.eval()
    total, results = 0.0, []
    with torch.no_grad():
        for (batch,) in DataLoader(held_out, 2048):
            results.append(model(batch.cuda()))
            total += results[-1].mean().item()
    model.train()
    AFTER
print("ended")
"""

IN_EVALUATION = 2048 * 1024 * 4
"""Bytes of the hidden layer of one batch of the evaluation; one of training has a 64th."""


def program(after: str, workers: int = 0) -> str:
    return HEAD + EVALUATES.replace("AFTER", after).replace("WORKERS", str(workers))


def estimate(folder: Path, text: str, *options: str) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(text)
    words = ("estimate", "--gpu", "t4", "--no-suggestions", "--json", *options, script)
    done = warm_python.gpuprobe(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("refused") in (0, 6)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def peaks(found: dict[str, Any]) -> dict[str, int]:
    return {row["phase"]: row["allocated"] for row in found["phases"]}


def assumed(found: dict[str, Any]) -> str:
    return next(text for text in found["assumed"] if "(--steps)" in text)


def test_the_evaluation_after_an_epoch_is_part_of_the_peak(tmp_path: Path) -> None:
    found = estimate(tmp_path, program("pass", workers=2))
    assert found["steps"] == 3
    assert peaks(found)["evaluation"] == found["peak_allocated"] > 2 * IN_EVALUATION
    assert peaks(found)["backward"] + IN_EVALUATION < peaks(found)["evaluation"]
    text = assumed(found)
    assert text.startswith("the epoch was ended after step 3 (--steps), and an evaluation")
    assert "until the next training step" in text
    assert not found["causes"]  # it runs without gradients


CHANGES = """
    thread = threading.Thread(target=lambda: open("best.pt", "w"))
    thread.start()
    thread.join()
    for change in (
        lambda: torch.save(model.state_dict(), "best.pt"),
        lambda: open("best.pt", "w"),
        lambda: open("best.pt", "a"),
        lambda: os.remove("best.pt"),
        lambda: os.rename("best.pt", "older.pt"),
        lambda: os.makedirs("runs", exist_ok=True),
    ):
        try:
            change()
        except BaseException as error:
            print("refused", type(error).__name__)
    os.makedirs("kept", exist_ok=True)
    open(os.devnull, "w").write(open("best.pt").read())
    torch.save(model.state_dict(), "best.pt")
"""


def test_no_file_of_the_program_is_changed(tmp_path: Path) -> None:
    best = tmp_path / "best.pt"
    best.write_text("trained for a week")
    (tmp_path / "kept").mkdir()
    found = estimate(tmp_path, program("pass" + CHANGES))
    assert best.read_text() == "trained for a week"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "kept", "train.py"]
    assert "until it would change best.pt: later code was not run" in assumed(found)
    assert peaks(found)["evaluation"] > 2 * IN_EVALUATION


def test_an_evaluation_with_gradients_grows_for_all_of_its_batches(tmp_path: Path) -> None:
    text = program("pass").replace("torch.no_grad()", "torch.enable_grad()")
    found = estimate(tmp_path, text)
    assert found["causes"][0]["rule"] == "kept-graphs"  # of each result, in a list
    assert peaks(found)["evaluation"] > 10 * IN_EVALUATION  # each batch stays


LOOPS = {
    "kept = DataLoader(data, 32, num_workers=1, persistent_workers=True)\n"
    "while True:\n    for (batch,) in kept:\n        train(batch)\n": (
        "until the next training step"
    ),
    # In an endless loader, nothing comes after the epoch.
    "while True:\n    for (batch,) in DataLoader(data, 32):\n        train(batch)\n": (
        "until the next training step"
    ),
    "batches = iter(DataLoader(data, 32))\nwhile True:\n    train(next(batches)[0])\n": (
        "until it took another batch of the epoch at train.py:16"
    ),
    "for batch in data[:][0].split(32):\n    train(batch)\nraise SystemExit(3)\n": (
        "stopped after step 3 (--steps): later code, such as an evaluation"
    ),
    "for (batch,) in DataLoader(data, 32):\n    train(batch)\n1 / 0\n": (
        "until it failed at train.py:16 (ZeroDivisionError: division by zero)"
    ),
    "for (batch,) in DataLoader(data, 32):\n    train(batch)\n"
    "while True:\n    model(batch.cuda())\n": "until 256 calls of models were made",
}


@pytest.mark.parametrize("loop", LOOPS, ids=range(len(LOOPS)))
def test_what_follows_the_epoch_never_fails_the_estimate(tmp_path: Path, loop: str) -> None:
    found = estimate(tmp_path, HEAD + "\n" + loop)
    assert found["steps"] == 3
    assert LOOPS[loop] in assumed(found).replace(f"{tmp_path}/", "")


def test_a_checkpoint_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    """In the steps, too, where the values that it would have were not computed."""
    last = tmp_path / "last.pt"
    last.write_text("trained for a week")
    text = HEAD + (
        "\nfor (batch,) in DataLoader(data, 32):\n    train(batch)\n"
        "    torch.save(model.state_dict(), 'last.pt')\n    torch.save({}, 'new.pt')\n"
    )
    found = estimate(tmp_path, text)
    assert last.read_text() == "trained for a week"
    assert (tmp_path / "new.pt").stat().st_size > 0
    kept = "last.pt is kept: what the program writes there is discarded"
    assert [text for text in found["assumed"] if " is kept" in text] == [kept]


def test_other_files_of_the_user_are_kept_too(tmp_path: Path) -> None:
    """As is what the program deletes; it reads what it has written."""
    for name in ("last.pt", "best.pt", "out/log.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("trained for a week")
    text = HEAD + (
        "\nimport shutil\nshutil.rmtree('out')\nos.makedirs('out')\n"
        "for (batch,) in DataLoader(data, 32):\n    train(batch)\n"
        "    with open('last.pt', 'wb') as file:\n        torch.save(model.state_dict(), file)\n"
        "    with open('last.pt', 'rb') as file:\n        model.load_state_dict(torch.load(file))\n"
        "    torch.save({}, 'best.tmp')\n    os.replace('best.tmp', 'best.pt')\n"
    )
    found = estimate(tmp_path, text)
    for name in ("last.pt", "best.pt", "out/log.txt"):
        assert (tmp_path / name).read_text() == "trained for a week"
    assert [text for text in found["assumed"] if " is kept" in text] == [
        f"{name} is kept: what the program writes there is discarded"
        for name in ("out", "last.pt", "best.pt")
    ]


BY_HAND = """
for batch in data[:][0].cuda().split(32):
    loss = model(batch).square().mean()
    STEP
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.1 * gradient
open("ended", "w")
"""


@pytest.mark.parametrize(
    "step",
    [
        "loss.backward(); gradients = [p.grad for p in model.parameters()]",
        "gradients = torch.autograd.grad(loss, model.parameters())",
    ],
)
def test_a_program_without_an_optimizer_is_stopped_too(tmp_path: Path, step: str) -> None:
    head = HEAD.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "")
    found = estimate(tmp_path, head + BY_HAND.replace("STEP", step))
    assert found["steps"] == 3
    assert "after step 3 (--steps), counted by backward passes" in assumed(found)
    assert not (tmp_path / "ended").exists()


def test_a_batch_that_was_read_ahead_is_trained(tmp_path: Path) -> None:
    """As Accelerate does, which gives a batch when it has the next one."""
    text = program("pass").replace(
        "for (batch,) in DataLoader(data, 32, num_workers=0)",
        "for (batch,) in ahead(DataLoader(data, 32))",
    )
    ahead = (
        "\ndef ahead(loader):\n"
        "    batches = iter(loader)\n    now = next(batches)\n"
        "    for then in batches:\n        yield now\n        now = then\n"
        "    yield now\n"
    )
    found = estimate(tmp_path, HEAD + ahead + text.removeprefix(HEAD))
    assert found["steps"] == 4
    assert peaks(found)["evaluation"] > 2 * IN_EVALUATION


def test_a_decision_by_the_result_needs_no_second_run(tmp_path: Path) -> None:
    """Nearly all programs compare the result with the best so far: no memory depends on it."""
    text = program("if results[-1].mean() < 1e9: print('better')")
    found = estimate(tmp_path, text.replace("1024", "4096").replace("2048)", "20480)"))
    assert found["compute_why"] == "no line of the script decides by them"
    assert peaks(found)["evaluation"] > 20480 * 4096 * 4
    assert not found["causes"]  # it runs without gradients


@pytest.mark.parametrize("compute", ["shapes", "real"])
def test_a_run_without_values_replaces_no_checkpoint(tmp_path: Path, compute: str) -> None:
    """`gpuprobe run --gpu`: with all values, the program's files are as without gpuprobe."""
    last = tmp_path / "last.pt"
    last.write_text("trained for a week")
    os.utime(last, (1, 1))
    (tmp_path / "train.py").write_text(HEAD + "\ntorch.save(model.state_dict(), 'last.pt')\n")
    words = ("run", "--gpu", "t4", "--compute", compute, "train.py")
    assert warm_python.gpuprobe(*words, cwd=tmp_path).returncode == 0
    done = warm_python.gpuprobe("report", "train.gpuprobe", "-v", cwd=tmp_path)
    is_kept = last.read_bytes() == b"trained for a week"
    assert is_kept == ("last.pt is kept" in done.stdout) == (compute == "shapes"), done.stdout
