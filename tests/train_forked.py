"""Training in child processes: several at once, and some that are killed.

A script rather than a fixture: it imports torch once and forks before it computes anything, which
is both quick and safe. Hidden states come from a cache, so that no child has to load the base.
Usage: train_forked.py FOLDER [DEVICE [PART...]]; base, data, cache and runs go to FOLDER. On
"cuda" each process has a GPU, and computes in float32 as on a CPU, so that sums differ by float
error alone. PART is parallel or kills.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe  # noqa: F401 (once, before forking)
from training import tiny_recipe, write_training_base, write_training_data

from mtp.held_out import held_out_text
from mtp.recipe import DSparkRecipe, TeacherRecipe
from mtp.teacher import Teacher
from mtp.teacher import source as teacher_source
from mtp.teacher.cache import build_cache
from mtp.train import train

torch.set_num_threads(1)


def start(function, rank=None, world=1, port=0):
    """Run `function` in a child; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        if world > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def finish(*children):
    """Wait for children that must succeed."""
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"child {child} ended with {status}"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_inputs(folder):
    """The base, the data and the cached states of all runs."""
    base = write_training_base(folder / "base")
    data = write_training_data(folder / "data", base)
    teacher = Teacher.load(base, device="cpu")
    build_cache(teacher, base, data, folder / "cache", splits=["train"], max_gigabytes=1)
    held_out_text(teacher, base, data, cached_recipe(folder))


def cached_recipe(folder, **settings):
    """The small recipe with accumulation, trained from the cache."""
    teacher = TeacherRecipe(kind="cache", cache=str(folder / "cache"))
    return replace(tiny_recipe(micro_batch_tokens=60, **settings), teacher=teacher)


def parallel(folder, device):
    """The same recipe in one process, in two that replicate, and in two that shard; then the
    sharded run's first half, gone on with by one; and the other draft, sharded."""

    def run(name, world, optimizer, recipe=None, **options):
        recipe = recipe or cached_recipe(
            folder, eval_every=3, keep_checkpoints=2, optimizer=optimizer
        )
        arguments = {"max_steps": 6, "overwrite": True, "device": device, **options}

        def one():
            train(folder / "base", folder / "data", folder / name, recipe, **arguments)

        port = free_port()
        finish(*[start(one, rank, world, port) for rank in range(world)])

    for optimizer in ("adamw", "muon"):
        run(f"{optimizer}-one", 1, optimizer)
        run(f"{optimizer}-replicated", 2, optimizer)
        run(f"{optimizer}-sharded", 2, optimizer, shard=True)
    shutil.copytree(folder / "adamw-sharded.run", folder / "moved.run")
    shutil.rmtree(folder / "moved.run" / "checkpoints" / "step-00000006")
    run("moved", 1, "adamw", resume=True)

    draft = DSparkRecipe(
        num_layers=2, block_size=4, num_speculative_tokens=3, draft_vocab_size=10,
        sliding_window=16, mask_token_id=15, markov_rank=4, max_anchors=5,
    )  # fmt: skip
    recipe = replace(tiny_recipe(draft="dspark", micro_batch_tokens=60), dspark=draft)
    for name, world in (("one", 1), ("sharded", 2)):
        run(f"dspark-{name}", world, "adamw", recipe, shard=world > 1)


def kills(folder, device):
    """A run that is killed again and again at random, beside one that is not."""
    recipe = cached_recipe(folder, steps=41, checkpoint_every=2, eval_every=5)
    draw = random.Random(int(os.environ.get("KILL_SEED", "0")))

    def go(name):
        def one():
            train(folder / "base", folder / "data", folder / name, recipe,
                  resume=True, overwrite=True, max_steps=40, device=device)  # fmt: skip

        return one

    finish(start(go("whole")))
    log = folder / "killed.run" / "history.jsonl"
    killed_at = []
    for number in range(6):
        child = start(go("killed"))
        # Three to six steps further, then anywhere within a step: also inside a checkpoint.
        target = lines(log) + draw.randint(0, 3) if number else draw.randint(0, 3)
        started = lines(log)
        ended = (0, 0)
        while lines(log) <= max(target, started) and ended == (0, 0):
            time.sleep(0.002)
            ended = os.waitpid(child, os.WNOHANG)
        if ended != (0, 0):  # quicker than the kills; the rest of the run is asserted all the same
            assert ended[1] == 0, f"child {child} ended with {ended[1]}"
            break
        time.sleep(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, f"child {child} ended with {status}"
            break
        killed_at.append(lines(log) - 1)
    if not (folder / "killed").exists():
        finish(start(go("killed")))
    (folder / "killed.json").write_text(json.dumps(killed_at))


def lines(path):
    try:
        return path.read_text().count("\n")
    except OSError:
        return 0


PARTS = {"parallel": parallel, "kills": kills}

if __name__ == "__main__":
    folder, device = Path(sys.argv[1]), (sys.argv[2:] or ["cpu"])[0]
    teacher_source.pick_dtype = lambda _: torch.float32
    finish(start(lambda: write_inputs(folder)))
    for part in sys.argv[3:] or PARTS:
        PARTS[part](folder, device)
