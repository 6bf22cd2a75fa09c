"""The head that speculators 0.9.0 trains, on our rows: `states`, then `train`, `export`, `check`.

    python train_speculators.py states BASE DATA FOLDER [--kinds post] [--device cpu]
    python train_speculators.py train FOLDER/post RUN --tokens N [--lr 1e-3] [--device cpu]
    python train_speculators.py export BASE RUN HEAD
    python train_speculators.py check BASE FOLDER/post RUN HEAD

Everything but the rows is theirs: converter, command line (`speculators train`), offline data
format, packing, model, loss, optimizer, schedule, choice of checkpoint by validation loss. Ours:

- `states` writes the rows of a `mtp data prepare` folder, tokens and masks unchanged, with the
  base's hidden states, `FOLDER/post` after the final norm (what vLLM hands to the head) and
  `FOLDER/pre` before it (what their extraction takes). Held-out rows are their validation split.
  The start is ours too: our warm start, grafted as a native layer (`FOLDER/start`), which they
  convert. Not by `--from-pretrained`: with transformers 5 that trains bfloat16 weights.
- `train` stops after as many tokens as `mtp train` sees, and drafts four tokens instead of three.

Their defaults: Muon for matrices and AdamW for the rest, learning rate 1e-3, linear to 0 after 1 %
of warm-up, 8192 tokens a step, CE, step weights 0.6^k. Their two MTP recipes pass 1e-4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

NUM_STEPS = 4
TOKENS_PER_STEP = 8192  # their default, --total-seq-len
SEED = 42  # their default
TOKENS_PER_PASS = 32768  # of the base


def states(base: Path, data: Path, folder: Path, kinds: list[str], device: str) -> None:
    """Write a data folder for each kind, and the converted start."""
    from datasets import Dataset, concatenate_datasets

    from mtp.data.batches import collate, plan_batches, row_lengths
    from mtp.data.store import load_prepared
    from mtp.teacher import Teacher

    splits = load_prepared(data)
    rows = concatenate_datasets([splits["train"], splits["held_out"]])
    lengths = row_lengths(rows)
    kept = rows.select_columns(["input_ids", "loss_mask"])
    kept = kept.add_column("seq_len", lengths).with_format("torch")
    for name in kinds:
        kept.save_to_disk(str(folder / name))
        (folder / name / "hidden_states").mkdir()
        split = {"train": len(splits["train"]), "held_out": len(splits["held_out"])}
        (folder / name / "rows.json").write_text(json.dumps(split))
    assert isinstance(kept, Dataset)

    teacher = Teacher.load(base, device=device)
    before: list[torch.Tensor] = []
    teacher.model.get_decoder().norm.register_forward_pre_hook(
        lambda _, inputs: before.append(inputs[0])
    )

    def write(name: str, row: int, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        from safetensors.torch import save_file

        tensors = {"token_ids": ids.clone(), "hidden_states": hidden.unsqueeze(1).clone()}
        save_file(tensors, folder / name / "hidden_states" / f"hs_{row}.safetensors")

    with ThreadPoolExecutor(4) as pool:
        pending = []
        for indices in plan_batches(lengths, max_tokens=TOKENS_PER_PASS, seed=0, epoch=0):
            batch = collate(rows, indices)
            before.clear()
            found = {"post": teacher.batch_hidden(batch), "pre": before[0]}
            for name in kinds:
                hidden = found[name].to(torch.bfloat16).cpu()
                for place, row in enumerate(indices):
                    length = int(lengths[row])
                    ids = batch.input_ids[place, :length]
                    pending.append(pool.submit(write, name, row, ids, hidden[place, :length]))
        for job in pending:
            job.result()
    start(base, folder)


def start(base: Path, folder: Path) -> None:
    """Graft our warm start as the base's native layer, from which they start."""
    from graft.manifest import base_fingerprint
    from graft.reader import Checkpoint
    from graft.staging import staged_folder
    from mtp.head import save_head
    from mtp.warm_start import head_from_base

    checkpoint = Checkpoint(base)
    head = head_from_base(checkpoint, 1, "last")
    with staged_folder(folder / "start-head", overwrite=True) as staging:
        save_head(head, staging, base_fingerprint=base_fingerprint(checkpoint), provenance={})
    subprocess.run(
        [sys.executable, "-m", "mtp.cli", "graft", "--base", str(base), "--head",
         str(folder / "start-head"), "--out", str(folder / "start"), "--overwrite"], check=True,
    )  # fmt: skip


def num_packed_steps(data: Path, num_rows: int, num_tokens: int, per_step: int) -> tuple[int, int]:
    """(optimizer steps, epochs) in which their sampler shows so many tokens of the first rows."""
    from datasets import load_from_disk
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    lengths = load_from_disk(str(data)).with_format(None)["seq_len"][:num_rows]
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=per_step, lengths=lengths, num_replicas=1, rank=0, seed=SEED
    )
    steps = max(round(num_tokens / sum(lengths) * len(sampler)), 1)
    return steps, -(-steps // len(sampler))


def train(data: Path, run: Path, *, tokens: int, per_step: int, rate: str, device: str) -> None:
    """Their `speculators train`; on a CPU with its trainer told so."""
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    counts = json.loads((data / "rows.json").read_text())
    total = counts["train"] + counts["held_out"]
    steps, epochs = num_packed_steps(data, counts["train"], tokens, per_step)
    arguments = {
        "speculator-type": "mtp",
        "verifier-name-or-path": (data.parent / "start").resolve(),
        "num-speculative-steps": NUM_STEPS,
        "data-path": data,
        "on-missing": "raise",
        # They cut at int(total * ratio).
        "train-data-ratio": (counts["train"] + 0.5) / total,
        "total-seq-len": per_step,
        "seed": SEED,
        "max-steps": steps,
        "epochs": epochs,
        "save-path": run,
        "log-dir": run / "logs",
        "log-freq": 50,
        "num-workers": 0 if device == "cpu" else 2,
    }
    if rate:
        arguments["lr"] = rate
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    print("speculators train", *words, flush=True)
    if device == "cpu":
        cli.Trainer = trainer_on_cpu(cli.Trainer)
    cli.main(TrainConfig.resolve(words))


def trainer_on_cpu(trainer: Any) -> Any:
    """Their trainer, which takes an accelerator for granted."""

    class Trainer(trainer):  # type: ignore[misc]
        def setup_trainer(self) -> None:
            self.local_rank, self.device_type = "cpu", "cpu"
            super().setup_trainer()

    torch.accelerator.synchronize = lambda *_: None
    return Trainer


def export(base: Path, run: Path, out: Path) -> None:
    """The checkpoint of the lowest validation loss, as their recipes take it, as a head folder."""
    from safetensors.torch import load_file
    from speculators.cli.stitch import _filter_frozen_keys, _remap_key

    from graft.manifest import base_fingerprint
    from graft.reader import Checkpoint
    from graft.staging import staged_folder
    from mtp.head import MTPHead, save_head

    best = run / "checkpoint_best"
    found = _filter_frozen_keys(load_file(best / "model.safetensors"))
    state = {_remap_key(name).removeprefix("mtp."): tensor for name, tensor in found.items()}
    checkpoint = Checkpoint(base)
    head = MTPHead(checkpoint.text_config, 1)
    head.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    validation = json.loads((best / "val_metrics.json").read_text())
    provenance = {"tool": "speculators 0.9.0", "checkpoint": best.resolve().name} | validation
    with staged_folder(out, overwrite=True) as staging:
        save_head(
            head, staging, base_fingerprint=base_fingerprint(checkpoint), provenance=provenance
        )
    print(out, provenance)


@torch.no_grad()
def check(base: Path, data: Path, run: Path, head_folder: Path) -> None:
    """Largest difference of their model's logits and the exported head's, on the first row."""
    from safetensors.torch import load_file
    from speculators.models.mtp import MTPDraftModel
    from transformers import AutoConfig

    from mtp.head import load_head
    from mtp.teacher import Teacher

    start = data.parent / "start"
    theirs = MTPDraftModel.from_training_args(
        AutoConfig.from_pretrained(start), num_speculative_steps=NUM_STEPS,
        verifier_name_or_path=str(start),
    ).eval()  # fmt: skip
    trained = load_file(run / "checkpoint_best" / "model.safetensors")
    theirs.load_state_dict({n: tensor.float() for n, tensor in trained.items()}, strict=False)
    row = load_file(data / "hidden_states" / "hs_0.safetensors")
    hidden, ids = row["hidden_states"][None, :, 0].float(), row["token_ids"][None]
    teacher = Teacher.load(base, device="cpu")
    wanted, _, _ = theirs(input_ids=ids, hidden_states=hidden)
    found = load_head(head_folder).eval().chain(hidden, teacher.embed(ids).float(), NUM_STEPS)
    for k, (logits, output) in enumerate(zip(wanted, found, strict=True)):
        own = (output @ teacher.lm_head.float().T)[:, : logits.shape[1]]
        print(f"step {k}: {(logits - own).abs().max():.2g} of {logits.abs().max():.3g}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["states", "train", "export", "check"])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["post", "pre"])
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    parser.add_argument("--lr", default="")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.action == "states":
        base, data, folder = given.folders
        states(base, data, folder, given.kinds, given.device)
    elif given.action == "train":
        train(
            *given.folders, tokens=given.tokens,
            per_step=given.tokens_per_step, rate=given.lr, device=given.device,
        )  # fmt: skip
    elif given.action == "export":
        export(*given.folders)
    else:
        check(*given.folders)


if __name__ == "__main__":
    main()
