"""The routing table and the warnings about what users get wrong."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon, RoutingRow, RoutingWarning, get_default_muon_param_groups
from meshmuon.routing.table import is_first_of_ranks
from tests.support.reference import make_params
from tests.support.threads import run_threads


def named(name: str, *shape: int, use_muon: bool = True, **options: Any) -> dict[str, Any]:
    return {"params": make_params(shape), "names": [name], "use_muon": use_muon, **options}


def test_rows() -> None:
    optimizer = Muon(
        [
            named("layers.0.up", 100, 25),
            named("moe.experts.w1", 4, 25, 100, lr=0.004),
            named("conv", 16, 9, 2, 2, conv="flatten", adjust_lr_fn="original", lr=0.01),
            named("norm", 25, use_muon=False, lr=0.01),
            named("temperature", use_muon=False),
        ],
        lr=0.001,
        expert_keys=["experts"],
    )
    table = optimizer.routing_table()
    assert table.warnings == ()
    expected = [
        ("layers.0.up", (100, 25), "muon", 1, 0.001 * 2.0, 0.001 * 0.2),
        ("moe.experts.w1", (4, 25, 100), "muon", 4, 0.004 * 2.0, 0.004 * 0.2),
        ("conv", (16, 9, 2, 2), "muon", 1, 0.01, 0.01 / 6.0),
        ("norm", (25,), "adamw", 0, 0.01, 0.002),
        ("temperature", (), "adamw", 0, 0.001, 0.0002),
    ]
    for row, (name, shape, route, matrices, lr, rms) in zip(table.rows, expected, strict=True):
        assert (row.name, row.shape, row.layout, row.route, row.matrices) == (name, shape, "cpu", route, matrices)
        assert row.lr == pytest.approx(lr)
        assert row.rms == pytest.approx(rms)


def test_text() -> None:
    optimizer = Muon(
        [named("layers.0.up", 100, 25), named("norm", 25, use_muon=False), named("t", use_muon=False)], lr=0.001
    )
    assert str(optimizer.routing_table()).splitlines() == [
        "parameter    shape   layout  route  matrices  lr     update rms",
        "---------------------------------------------------------------",
        "layers.0.up  100×25  cpu     muon   1         0.002  0.0002",
        "norm         25      cpu     adamw  -         0.001  0.0002",
        "t            scalar  cpu     adamw  -         0.001  0.0002",
        "Muon: 1 matrix, 99 % of 2,526 parameters; AdamW: the rest",
    ]


def test_layers_that_are_alike_share_a_row() -> None:
    """Those that differ in any other column do not; ``full`` shows all."""
    names = [
        "embed",
        *(f"layers.{k}.{name}" for k in range(3) for name in ("up", "experts.0.w", "experts.1.w")),
        "layers.3.up",
    ]
    model = {name: nn.Parameter(torch.ones(8, 4 + 4 * name.endswith("3.up"))) for name in names}
    groups = [
        {"params": [model["embed"]], "names": ["embed"], "use_muon": False},
        {"params": [model[name] for name in names[1:]], "names": names[1:], "use_muon": True},
    ]
    table = Muon(groups, lr=0.001).routing_table()
    assert [line.split("  ")[0] for line in str(table).splitlines()[2:-1]] == [
        "embed",
        "layers.*.up ×3",
        "layers.*.experts.*.w ×6",
        "layers.3.up",
    ]
    full = Muon(groups, lr=0.001).routing_table(full=True)
    assert [line.split()[0] for line in str(full).splitlines()[2:-1]] == names == [row.name for row in table.rows]


def test_the_table_notes_that_adamw_is_advised_for_lora() -> None:
    model = nn.ModuleDict({"lora_A": nn.Linear(64, 8, bias=False), "lora_B": nn.Linear(8, 64, bias=False)})
    table = Muon(get_default_muon_param_groups(model)).routing_table()
    assert len(table.notes) == 1
    assert str(table).splitlines()[-2] == f"note: {table.notes[0]}"
    assert table.notes[0].startswith("2 factors of LoRA go to Muon, and AdamW usually trains them better")
    asked = get_default_muon_param_groups(model, is_muon_func=lambda name, param: "lora_B" in name)
    assert Muon(asked).routing_table().notes == (), "the user has decided"


def test_a_row_as_text() -> None:
    assert str(RoutingRow("w", (3, 4), "cpu", "muon", 1, 0.25, 0.5)) == "w  3×4  cpu  muon  1  0.25  0.5"


def test_the_table_follows_the_group() -> None:
    optimizer = Muon([named("w", 100, 25)], lr=0.001)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    table = optimizer.routing_table()
    assert table.rows[0].lr == pytest.approx(1.0)
    assert len(table.warnings) == 1
    assert str(table).splitlines()[-2] == f"warning: {table.warnings[0]}"


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "module.output.weight"])
def test_a_table_in_muon_warns(name: str) -> None:
    with pytest.warns(RoutingWarning, match=f"{name} looks like an embedding or an output head.*use_muon=False"):
        Muon([named(name, 10, 4)])


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.qkv.weight",
        "layers.0.attn.qkv_proj.weight",
        "h.0.attn.c_attn.weight",
        "layers.0.mlp.gate_up_proj.weight",
    ],
)
def test_fused_projections_warn(name: str) -> None:
    with pytest.warns(RoutingWarning, match=f"{name} looks like several projections fused"):
        Muon([named(name, 12, 4)])


@pytest.mark.parametrize("dims", ["out_in", "in_out"])
def test_fused_experts_warn(dims: str) -> None:
    """They hold several matrices in any case; whether each is a fused one is another question."""
    name = "layers.0.experts.gate_up_proj"
    options: dict[str, Any] = {"expert_keys": ["experts"], "matrices": {name: {"dims": dims}}}
    with pytest.warns(
        RoutingWarning, match=f"{name} looks like several projections fused.*each of its experts as one matrix"
    ):
        Muon([named(name, 4, 8, 8, **options)])


@pytest.mark.parametrize("split", [4, (4, 4), (8,), lambda name, shape: 4])
def test_fused_weights_that_are_split_do_not_warn(split: Any, recwarn: pytest.WarningsRecorder) -> None:
    options: dict[str, Any] = {"expert_keys": ["experts"], "split": split}
    Muon([named("layers.0.experts.gate_up_proj", 4, 8, 8, **options), named("layers.0.qkv.weight", 8, 8, **options)])
    assert not [one for one in recwarn if issubclass(one.category, RoutingWarning)]


def test_a_group_that_is_added_warns() -> None:
    """Of itself alone, by its own number, at the caller's line."""
    with pytest.warns(RoutingWarning):
        optimizer = Muon([named("qkv.weight", 8, 4)])
    with pytest.warns(RoutingWarning) as record:
        optimizer.add_param_group(named("lm_head.weight", 8, 4, lr=0.5))
    texts = [str(one.message) for one in record]
    assert len(texts) == 2
    assert texts[0].startswith("group 1: lr=0.5 with")
    assert texts[1].startswith("lm_head.weight looks like an embedding or an output head")
    assert {one.filename for one in record} == {__file__}


def test_torchs_attention_is_split_and_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    table = Muon(get_default_muon_param_groups(nn.MultiheadAttention(8, 2))).routing_table()
    assert [(row.name, row.matrices, row.why) for row in table.rows[:2]] == [
        ("in_proj_weight", 3, "fused q, k, v"),
        ("out_proj.weight", 1, "matrix"),
    ]
    assert not recwarn.list
    head, _, first, *_ = str(table).splitlines()
    assert head.endswith("update rms  why")
    assert first.endswith("fused q, k, v")


class Tower(nn.Module):
    """Fused weights of a kind that nobody knows: what is inside cannot follow from its size."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"my_qkv_proj": nn.Linear(8, 20)}) for _ in range(layers)])


@pytest.mark.parametrize(
    ("layers", "subject"), [(1, "weight looks like"), (5, "weight (and 4 more of its kind) looks like")]
)
def test_one_warning_for_all_layers(layers: int, subject: str) -> None:
    with pytest.warns(RoutingWarning) as record:
        optimizer = Muon(get_default_muon_param_groups(Tower(layers)))
    assert [str(warning.message) for warning in record] == list(optimizer.routing_table().warnings)
    assert len(record) == 1
    assert str(record[0].message).startswith(f"layers.0.my_qkv_proj.{subject} several projections fused")


def test_an_unknown_stack_goes_to_adamw_and_warns() -> None:
    model = nn.Module()
    model.blend = nn.Parameter(torch.zeros(5, 8, 6))
    with pytest.warns(RoutingWarning, match="blend has more than two dims and is not known to be a stack"):
        optimizer = Muon(get_default_muon_param_groups(model))
    assert [(row.route, row.why) for row in optimizer.routing_table().rows] == [
        ("adamw", "more than two dims, not known as a stack of matrices")
    ]


def test_reasons_that_are_not_ours_do_not_matter() -> None:
    """A group may have any further key."""
    assert [row.why for row in Muon([named("w", 8, 8, reasons=3)]).routing_table().rows] == [""]


@pytest.mark.parametrize(
    ("rule", "lr", "message"),
    [
        (
            "match_rms_adamw",
            0.02,
            'group 0: lr=0.02 with adjust_lr_fn="match_rms_adamw" moves entries by 0.004.*"original"',
        ),
        ("original", 3e-4, 'group 0: lr=0.0003 is small for adjust_lr_fn="original".*"match_rms_adamw"'),
        ("spectral", 3e-4, 'group 0: lr=0.0003 is small for adjust_lr_fn="spectral"'),
    ],
)
def test_lr_of_the_wrong_convention_warns(rule: str, lr: float, message: str) -> None:
    with pytest.warns(RoutingWarning, match=message):
        Muon([named("w", 4, 4)], lr=lr, adjust_lr_fn=rule)
    with pytest.warns(RoutingWarning, match=message):
        Muon([named("w", 4, 4)], lr=torch.tensor(lr, dtype=torch.float64), adjust_lr_fn=rule)


@pytest.mark.parametrize(
    ("rule", "lr"),
    [
        ("match_rms_adamw", 0.019),
        ("match_rms_adamw", 0.0),
        ("original", 0.02),
        ("original", 0.0),
        ("spectral", 2e-3),
        (lambda rows, cols: 1.0, 1e-6),
    ],
)
def test_usual_rates_do_not_warn(rule: Any, lr: float, recwarn: pytest.WarningsRecorder) -> None:
    """lr=0 is how warm-up starts."""
    Muon([named("w", 4, 4), named("lm_head.weight", 4, 4, use_muon=False, lr=0.3)], lr=lr, adjust_lr_fn=rule)
    assert not [warning for warning in recwarn if issubclass(warning.category, RoutingWarning)]


@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_warns_for_all(sharded: bool) -> None:
    """Plain tensors: rank 0. DTensors: the first rank of their mesh, which may be another one."""

    def main(rank: int) -> bool:
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
        param = torch.zeros(8, 4)
        if sharded:
            param = distribute_tensor(param, meshes["shard"], [Shard(0)], src_data_rank=None)
        return is_first_of_ranks(Muon([{"params": [nn.Parameter(param)], "use_muon": True}]).param_groups)  # type: ignore[arg-type]

    assert run_threads(4, main) == ([True, False, True, False] if sharded else [True, False, False, False])


def test_keys_of_matrices_that_fit_nothing_are_named() -> None:
    """Once for the optimizer: groups share its option, and each has only some of the parameters."""
    halves = {"split": (4, 4)}
    groups = [
        named("layers.3.qkv.weight", 8, 4),
        named("layers.3.wo.weight", 8, 4),
        named("emb.weight", 8, 4, use_muon=False),
    ]
    with pytest.warns(RoutingWarning) as record:
        Muon(groups, matrices={"layers.*.qkv.weight": halves, "layers.*.w0.weight": halves, "emb.weight": halves})
    found = sorted(str(warning.message) for warning in record)
    assert len(found) == 2
    assert found[0].startswith("matrices['emb.weight'] fits AdamW's parameters only, so that it has no effect.")
    assert "matrices['layers.*.w0.weight'] fits no parameter" in found[1]
    assert "The nearest names are layers.3.wo.weight" in found[1]


def test_a_group_that_is_added_may_share_the_entries_of_the_others(recwarn: pytest.WarningsRecorder) -> None:
    optimizer = Muon([named("a", 8, 4)], matrices={"a": {"split": (4, 4)}})
    optimizer.add_param_group(named("b", 8, 4))
    assert not [warning for warning in recwarn if issubclass(warning.category, RoutingWarning)]
    with pytest.warns(RoutingWarning, match="fits no parameter"):
        optimizer.add_param_group(named("c", 8, 4, matrices={"d": {"split": (4, 4)}}))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weigth_decay", "weight_decay"),
        ("weight_decays", "weight_decay"),
        ("momentm", "momentum"),
        ("beta", "betas"),
        ("adam_betas", "adamw_betas"),
        ("nesterovs", "nesterov"),
        ("LR", "lr"),
        ("learning_rate", "lr"),
        ("adjust_lr", "adjust_lr_fn"),
    ],
)
def test_a_key_that_is_nearly_an_option_warns_once(key: str, meant: str, recwarn: pytest.WarningsRecorder) -> None:
    """Of all groups together, at the caller's line, beside the option or in its place; steps say no more."""
    warnings.simplefilter("always")
    groups = [named("w", 4, 4, **{key: 0.5}), named("b", 4, use_muon=False, betas=(0.9, 0.95), **{key: 0.5})]
    optimizer = Muon(groups)
    told = [f"group 0: {key} is no option and has no effect: did you mean {meant}?"]
    assert list(optimizer.routing_table().warnings) == told
    for params in (group["params"] for group in optimizer.param_groups):
        params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert [(str(one.message), one.filename) for one in recwarn] == [(told[0], __file__)]
    with pytest.warns(RoutingWarning, match=f"^group 2: {key} is no option"):
        optimizer.add_param_group(named("late", 4, 4, **{key: 0.5}))


def keys_of_torch() -> set[str]:
    """Of the param groups of all optimizers of torch but Rprop, whose ``etas`` look like betas."""
    keys: set[str] = set()
    for kind in vars(torch.optim).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, torch.optim.Optimizer)
            and kind.__name__ not in ("Optimizer", "Rprop")
        ):
            keys |= set(kind([("w", nn.Parameter(torch.ones(2, 2)))]).param_groups[0])  # type: ignore[call-arg, arg-type]
    return keys


OF_TRAINERS = """
initial_lr fused foreach capturable differentiable max_lr min_lr base_momentum max_momentum swa_lr lr_scale
weight_decay_mult weight_decay_scale weight_decay_ weight_decay_l1 initial_weight_decay no_weight_decay name group_name
amsgrad decoupled_weight_decay corrected_weight_decay fix_layers layer_decay layer_id lr_mult wd_mult decay_mult
pre_lr_mult pre_wd_mult start_wd end_wd is_expert_parallel is_decoupled_lr default_config step bias_correction moe
is_moe ds_pg_index freeze_step scheduled_lr lr_max weight_lr_power weight_sum train_mode k d optim_bits
percentile_clipping block_wise max_unorm skip_zeros no_prox caution decouple rank scale proj_type update_proj_gap fqns
module_name param_group_name target_lr warmup_steps schedule momentum_decay lr_decay
"""


def test_keys_of_trainers_do_not_warn() -> None:
    """Those of torch's optimizers and schedulers, of timm, DeepSpeed, Megatron, bitsandbytes and others."""
    groups = [named("w", 4, 4), named("b", 4, use_muon=False)]
    known = set(Muon(groups).param_groups[0]) | {"params", "param_names", "betas", "eps"}
    assert len(keys_of_torch()) > 30
    added = dict.fromkeys(sorted({*keys_of_torch(), *OF_TRAINERS.split()} - known), 1.0)
    optimizer = Muon([{**group, **added} for group in groups])
    for make in (
        lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=9),
        lambda: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.01),
        lambda: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01),
    ):
        make()
        assert optimizer.routing_table().warnings == ()


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((8192, 512), "is 8192×512 and looks like an embedding or an output head.*use_muon=False"),
        ((500, 8000), ""),
        ((8192, 513), ""),
        ((512, 8192), "is 512×8192 and looks like an embedding"),
        ((8191, 8), ""),
        ((24, 8), r"is 24×8 and looks like several projections fused.*split=\(\.\.\.\)"),
        ((23, 8), ""),
        ((8, 24), ""),
        ((5, 24, 8), "is 24×8 and looks like several projections fused"),
    ],
)
def test_without_names_shapes_warn(shape: tuple[int, ...], told: str, recwarn: pytest.WarningsRecorder) -> None:
    """Once for all that are alike; names, or a split, say that it is meant."""
    warnings.simplefilter("always")
    group: dict[str, Any] = {"params": make_params(shape, shape), "use_muon": True, "expert_keys": ["param"]}
    Muon([group])
    texts = [str(one.message) for one in recwarn]
    assert len(texts) == bool(told)
    if told:
        assert re.match(rf"group0\.param0 \(and 1 more of its kind\) {told}.*give the group \"names\"", texts[0])
    recwarn.clear()
    Muon([{**group, "names": ["layers.0.up", "layers.1.up"], "expert_keys": ["up"]}])
    Muon([{**group, "use_muon": False}], allow_inactive=True)
    if "fused" in told:
        Muon([group], split=(8, 8, 8))
        Muon([group], split=(24,))
    assert not recwarn.list
