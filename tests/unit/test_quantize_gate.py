"""The gate's interval against resampling in plain Python, and the checks of what was written."""

import random

import pytest
import torch
from tiny import write_base, write_tiny_head

from graft.errors import UserError
from graft.formats import head_tensors
from graft.layout import fuse_experts
from graft.manifest import HeadFolder, write_head
from graft.reader import Checkpoint
from mtp.acceptance import AcceptanceCounts
from quantize.calibration import ProjectionScales
from quantize.checks import check_written
from quantize.experts import pack_head
from quantize.gate import drops_too_far, paired_difference
from quantize.packing import WeightScales, largest


def prompts(seed, loss, num=40):
    """Counters of the same prompts for two heads, the second accepting less by `loss`."""
    generator = random.Random(seed)
    before, after = [], []
    for _ in range(num):
        drafts = generator.randint(20, 60)
        first = int(drafts * generator.uniform(0.5, 0.9))
        second = int(first * generator.uniform(0.4, 0.8))
        before.append(AcceptanceCounts(2, drafts, [first, second]))
        lost = sum(generator.random() < loss for _ in range(second))
        after.append(AcceptanceCounts(2, drafts, [first - lost, second - lost]))
    return before, after


def in_python(before, after, num_resamples=2000):
    def accepted(counts):
        return sum(sum(c.accepted_per_position) for c in counts) / sum(c.num_drafts for c in counts)

    generator = random.Random(1)
    drawn = []
    for _ in range(num_resamples):
        chosen = [generator.randrange(len(before)) for _ in before]
        drawn.append(accepted([after[i] for i in chosen]) - accepted([before[i] for i in chosen]))
    drawn.sort()
    return accepted(after) - accepted(before), drawn[50], drawn[1949]


def test_difference_and_interval_are_those_of_plain_resampling():
    before, after = prompts(0, 0.05)
    found = paired_difference(before, after)
    point, low, high = in_python(before, after)
    assert found["mean_accepted"] == pytest.approx(point)
    assert sum(found["cumulative"]) == pytest.approx(point)
    assert found["mean_accepted_interval"] == pytest.approx([low, high], rel=0.1)
    for value, (a, b) in zip(found["cumulative"], found["cumulative_interval"], strict=True):
        assert a <= value <= b


def test_pairing_is_what_makes_the_interval_narrow():
    before, after = prompts(0, 0.05)
    low, high = paired_difference(before, after)["mean_accepted_interval"]
    low_apart, high_apart = paired_difference(before, after[::-1])["mean_accepted_interval"]
    assert high - low < (high_apart - low_apart) / 3


@pytest.mark.parametrize(
    ("loss", "max_drop", "fails"), [(0.0, 0.01, False), (0.2, 0.01, True), (0.2, 0.5, False)]
)
def test_only_an_interval_beyond_the_limit_fails(loss, max_drop, fails):
    assert drops_too_far(paired_difference(*prompts(2, loss)), max_drop) is fails


def test_a_drop_that_few_prompts_do_not_prove_passes():
    before, after = prompts(3, 0.0, num=4)
    after[0] = AcceptanceCounts(2, after[0].num_drafts, [0, 0])
    difference = paired_difference(before, after)
    assert difference["mean_accepted"] < -0.01 and not drops_too_far(difference, 0.01)


@pytest.fixture
def heads(tmp_path):
    """A BF16 head and its tensors packed."""
    base = write_base(tmp_path / "base")
    source = HeadFolder(write_tiny_head(tmp_path / "bf16", base, num_layers=2))
    stacks = fuse_experts(source.load_all())
    scales = [
        {
            name: ProjectionScales(
                weight=WeightScales(amax=largest(stacks[f"mtp.layers.{n}.mlp.experts.{name}"])),
                input_amax=3.0,
            )
            for name in ("gate_up_proj", "down_proj")
        }
        for n in range(2)
    ]
    return base, source, pack_head(source, scales)


def written(heads, tmp_path, **changed):
    base, _, tensors = heads
    tensors = {name: t for name, t in (tensors | changed).items() if t is not None}
    return HeadFolder(
        write_tiny_head(
            tmp_path / "nvfp4", base, num_layers=2, form="nvfp4-modelopt", tensors=tensors
        )
    )


def test_a_sound_head_passes(heads, tmp_path):
    base, source, tensors = heads
    report = check_written(written(heads, tmp_path), source)
    assert report["num_matrices"] == 2 * 4 * 3 and report["matrices_compared"] == 2 * 2 * 3
    wanted = head_tensors(Checkpoint(base).text_config, 2, "nvfp4-modelopt")
    assert wanted.keys() == tensors.keys()


E = "mtp.layers.1.mlp.experts.3"
BROKEN = {
    "a tensor scale of up's own": (
        f"{E}.up_proj.weight_scale_2", lambda t: t * 2, "gate and up"),
    "a tensor scale of 0": (f"{E}.down_proj.weight_scale_2", torch.zeros_like, "above 0"),
    "an input scale that is not finite": (
        f"{E}.gate_proj.input_scale", lambda t: t / 0, "above 0"),
    "block scales that underflowed": (
        f"{E}.gate_proj.weight_scale", lambda t: (t.float() * 0).to(t.dtype), "above 0"),
    "one wrong byte": (f"{E}.down_proj.weight", lambda t: t ^ 1, "as modelopt"),
    "other block scales": (
        f"{E}.down_proj.weight_scale", lambda t: (t.float() * 1.2).to(t.dtype), "as modelopt"),
    "a missing input scale": (f"{E}.up_proj.input_scale", lambda t: None, "1 wrong"),
    "an unpacked matrix": (
        f"{E}.up_proj.weight", lambda t: torch.zeros(16, 32, dtype=torch.bfloat16), "1 wrong"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_head_is_seen(heads, tmp_path, what):
    name, change, expected = BROKEN[what]
    _, source, tensors = heads
    folder = written(heads, tmp_path, **{name: change(tensors[name])})
    with pytest.raises(UserError, match=expected):
        check_written(folder, source)


def test_stacked_packed_experts_are_seen(heads, tmp_path):
    _, source, tensors = heads
    stack = torch.stack(
        [tensors[f"mtp.layers.0.mlp.experts.{e}.down_proj.weight"] for e in range(4)]
    )
    folder = tmp_path / "stacked"
    folder.mkdir()
    write_head(folder, tensors | {"mtp.layers.0.mlp.experts.down_proj": stack},
               written(heads, tmp_path).metadata)  # fmt: skip
    with pytest.raises(UserError, match="every matrix 2-D"):
        check_written(HeadFolder(folder), source)


def test_scales_that_an_algorithm_chose_are_taken_as_they_are(heads, tmp_path):
    base, source, _ = heads
    stacks = fuse_experts(source.load_all())
    scales = []
    for layer in range(2):
        found = {}
        for name in ("gate_up_proj", "down_proj"):
            stack = stacks[f"mtp.layers.{layer}.mlp.experts.{name}"]
            own = stack.float().unflatten(-1, (-1, 16)).abs().amax(-1)
            weight = WeightScales(amax=largest(stack), block_amax=own * 0.8)
            found[name] = ProjectionScales(weight=weight, input_amax=3.0)
        scales.append(found)
    folder = written((base, source, pack_head(source, scales)), tmp_path)
    check_written(folder, source, own_scales=False)
    with pytest.raises(UserError, match="as modelopt"):
        check_written(folder, source)
