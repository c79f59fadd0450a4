"""The demo's parts: data, batches and the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo import data, health, model
from tests.support.bounds import sum_error

# Data


def test_split_is_disjoint_complete_and_skips_tests_and_third_parties(source_folder: Path) -> None:
    corpus = data.load_corpus(source_folder, 0.3)
    train_files, valid_files = set(corpus.train_files), set(corpus.valid_files)
    assert not train_files & valid_files
    assert train_files | valid_files == {f"package{i % 3}/module{i}.py" for i in range(20)}
    assert b"LEFT_OUT" not in corpus.train.numpy().tobytes() + corpus.valid.numpy().tobytes()
    for side, names in ((corpus.train, corpus.train_files), (corpus.valid, corpus.valid_files)):
        assert side.numpy().tobytes() == b"\x00".join((source_folder / name).read_bytes() for name in names)


def test_split_of_a_file_depends_on_its_path_only(source_folder: Path) -> None:
    before = data.load_corpus(source_folder, 0.3)
    (source_folder / "package0" / "a_new_file.py").write_text("x = 1\n" * 100)
    (source_folder / before.train_files[0]).write_text("changed = True\n")
    after = data.load_corpus(source_folder, 0.3)
    assert set(before.valid_files) <= set(after.valid_files)
    assert set(before.train_files) <= set(after.train_files)
    assert before.digest != after.digest


def test_split_is_the_same_on_every_machine_and_in_every_process() -> None:
    # Written down once: the sides must not depend on PYTHONHASHSEED or the version of Python.
    names = [
        "ast.py",
        "enum.py",
        "json/decoder.py",
        "os.py",
        "random.py",
        "turtle.py",
        "typing.py",
        "zipfile.py",
    ]
    expected = ["json/decoder.py", "random.py", "turtle.py", "typing.py", "zipfile.py"]
    assert [name for name in names if data.is_validation(name, 0.5)] == expected


def test_standard_library_gives_megabytes_on_both_sides() -> None:
    corpus = data.load_corpus(data.default_source_root(), 0.1)
    assert corpus.train.numel() > 4_000_000
    assert corpus.valid.numel() > 200_000
    assert not any("site-packages" in name for name in corpus.train_files + corpus.valid_files)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.py files"):
        data.load_corpus(tmp_path, 0.1)
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="none of them fell on the"):
        data.load_corpus(tmp_path, 0.1)
    with pytest.raises(ValueError, match="too few"):
        data.TrainBatches(torch.zeros(10, dtype=torch.uint8), seq_len=16, batch_size=1, seed=0)


numbers = torch.arange(4001, dtype=torch.int32)


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 200),
    seed=st.integers(0, 2**31),
)
def test_batch_does_not_depend_on_how_it_is_divided(world_size: int, step: int, seed: int) -> None:
    batches = data.TrainBatches(numbers, seq_len=20, batch_size=12, seed=seed)
    whole, targets = batches.batch(step)
    fresh = data.TrainBatches(numbers, seq_len=20, batch_size=12, seed=seed)
    parts = [fresh.batch(step, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([tokens for tokens, _ in parts]), whole)
    assert torch.equal(torch.cat([wanted for _, wanted in parts]), targets)
    assert torch.equal(whole + 1, targets)  # the data counts up: a target is the next byte
    assert whole.shape == (12, 20)
    assert whole.dtype == torch.int64


def test_batches_cover_a_pass_without_repeats_and_differ_by_seed_and_pass() -> None:
    batches = data.TrainBatches(numbers, seq_len=20, batch_size=1, seed=3)
    passes = [[batches.starts(step + p * batches.windows)[0] for step in range(batches.windows)] for p in (0, 1)]
    for starts in passes:
        assert len(set(starts)) == batches.windows
        assert len({start % 20 for start in starts}) == 1
        assert max(starts) + 21 <= len(numbers)
    assert passes[0] != passes[1]
    other = data.TrainBatches(numbers, seq_len=20, batch_size=1, seed=4)
    assert [other.starts(step)[0] for step in range(other.windows)] != passes[0]


def test_indivisible_batch_is_refused() -> None:
    batches = data.TrainBatches(numbers, seq_len=20, batch_size=12, seed=0)
    with pytest.raises(ValueError, match="12 does not divide over 5"):
        batches.batch(0, 0, 5)


def test_validation_windows_span_the_text_and_stay_the_same() -> None:
    def windows() -> torch.Tensor:
        return torch.cat([tokens for tokens, _ in data.valid_batches(numbers, 20, 3, windows=8)])

    first = windows()
    assert torch.equal(first, windows())
    assert first.shape == (8, 20)
    assert first[0, 0] == 0
    assert first[-1, -1] == 3999


# Model

VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": False},
    {"mlp": "swiglu"},
    {"tied_head": True},
    {"qk_norm": False, "mlp": "swiglu", "tied_head": True},
]


def tiny_gpt(**changes: Any) -> model.GPT:
    sizes = {"vocab_size": 256, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64, "seq_len": 24}
    gpt = model.build_model(model.ModelConfig(**{**sizes, **changes}), seed=1, device=torch.device("cpu"))
    with torch.no_grad():  # The real start has zero matrices, through which nothing could leak.
        for parameter in gpt.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return gpt


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_no_position_sees_the_future(changes: dict[str, Any]) -> None:
    gpt = tiny_gpt(**changes).double()
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    before = gpt(tokens)
    for position in (1, 13, 23):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        after = gpt(changed)
        # Numbers of size 1, some thousand roundings of 2**-53; what is seen shows by 1e-4 and more.
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=2.0**-33)
        assert (after[:, position:] - before[:, position:]).abs().amax(-1).min() > 1e-4


def test_attention_depends_on_distances_not_on_positions() -> None:
    cos, sin = model.rope_tables(40, 8, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def logit(i: int, j: int) -> float:
        return float((model.rotate(q, cos[i], sin[i]) * model.rotate(k, cos[j], sin[j])).sum())

    # Angles up to 40 are rounded in the tables, and eight products and rotations in the logits.
    bound = 2 * sum_error(40 + 8 + 6, torch.float32) * float(q.norm() * k.norm())
    assert logit(7, 3) == pytest.approx(logit(30, 26), abs=bound)
    assert logit(7, 3) != pytest.approx(logit(7, 4), rel=1e-3)
    assert logit(0, 0) == pytest.approx(float((q * k).sum()), abs=bound)


def test_order_of_the_bytes_matters() -> None:
    gpt = tiny_gpt(n_layers=1)
    tokens = torch.arange(24).unsqueeze(0)
    swapped = tokens.clone()
    swapped[0, 0], swapped[0, 1] = 1, 0
    # Without positions the last byte would attend to the same set of bytes and see no difference.
    assert (gpt(tokens)[0, -1] - gpt(swapped)[0, -1]).abs().max() > 1e-4


def test_qk_norm_makes_logits_independent_of_the_scale_of_wq() -> None:
    for qk_norm in (True, False):
        gpt = tiny_gpt(qk_norm=qk_norm).double()  # whose norms add 2e-16 to a mean of squares
        tokens = torch.arange(24).unsqueeze(0)
        before = gpt(tokens)
        with torch.no_grad():
            for name, parameter in gpt.named_parameters():
                if "wq" in name:
                    parameter.mul_(4)
        unchanged = torch.allclose(gpt(tokens), before, rtol=0, atol=2.0**-33)
        assert unchanged == qk_norm


def test_start_depends_on_the_seed_only_and_guesses_uniformly() -> None:
    config = model.ModelConfig(d_model=32, n_layers=2, n_heads=2, d_ff=64, seq_len=24)
    first, again, other = (model.build_model(config, seed, torch.device("cpu")) for seed in (1, 1, 2))
    torch.manual_seed(0)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert not torch.equal(first.output.weight, other.output.weight)
    tokens = torch.randint(256, (4, 24))
    assert first.loss(tokens, tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_head_may_be_tied() -> None:
    tied, untied = tiny_gpt(tied_head=True), tiny_gpt()
    assert tied.output.weight is tied.tok_embeddings.weight
    assert untied.output.weight is not untied.tok_embeddings.weight


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_bfloat16_weights_are_computed_with_in_float32(changes: dict[str, Any]) -> None:
    narrow, wide = tiny_gpt(weights="bfloat16", **changes), tiny_gpt(**changes)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.copy_(narrow.get_parameter(name))
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))
    assert torch.equal(narrow(tokens), wide(tokens))
    narrow.loss(tokens, tokens).backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.bfloat16 for parameter in narrow.parameters())


def test_too_long_input_is_refused() -> None:
    with pytest.raises(ValueError, match="25 positions given"):
        tiny_gpt()(torch.zeros(1, 25, dtype=torch.int64))


def test_health_is_drawn_and_told(tmp_path: Path) -> None:
    points = [
        {
            "step": step,
            "kinds": {
                "layers.*.w": {"update_to_weight": None if step == 10 else 0.1 / step, "gradient_norm": 1.0, "below_bound": 0.1}
            },
            "seconds": {"momentum": 0.1, "wait": 0.0, "metrics": 0.5},
            "balance": {},
        }
        for step in (10, 20, 30)
    ]
    health.draw_health(tmp_path / "health.png", points)
    assert (tmp_path / "health.png").read_bytes().startswith(b"\x89PNG")
    assert "No alarm was raised." in health.section("meshmuon", points, [], drawn=True)
    assert "- **step 20: w stops**" in health.section("meshmuon", points, ["step 20: w stops"], drawn=False)
    assert health.section("AdamW", [], [], drawn=True) == ""
