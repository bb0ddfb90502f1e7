"""The collectives in a compiled program's text are found and counted."""

import pytest

from keras_dist_jax.targets.hlo import collectives_in
from keras_dist_jax.targets.hlo import host_transfers_in

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    head = "ENTRY %main (p: f32[8]) -> f32[8] {"
    return f"HloModule jit_step\n{ADD}{others}\n{head}\n{body}\n}}\n"


def only(*lines, others="", devices=8):
    (found,) = collectives_in(program(*lines, others=others), devices)
    return found.kind, found.devices, found.count, found.num_bytes, found.sent


@pytest.mark.parametrize(
    "groups, devices",
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("{}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=4,'b'=2] {'a'}", 4),
        ("mesh['a'=4,'b'=2] {'a', 'b'}", 8),
    ],
)
def test_how_many_devices_exchange_values(groups, devices):
    line = (
        "%r = f32[16]{0} all-reduce(%p), channel_id=1, "
        f"replica_groups={groups}, to_apply=%add"
    )
    sent = 2 * (devices - 1) * 64 // devices
    assert only(line) == ("all-reduce", devices, 1, 64, sent)


@pytest.mark.parametrize(
    "line, kind, num_bytes",
    [
        ("(bf16[4]{0}, f32[2,3]{1,0}) all-reduce(%p, %q)", "all-reduce", 32),
        ("f32[16]{0} all-reduce-start(%p)", "all-reduce", 64),
        ("(f32[2]{0}, f32[16]{0}) all-gather-start(%p)", "all-gather", 64),
        (
            "((f32[2]{0}, /*index=1*/f32[1,3]{1,0:T(8,128)}), (f32[16]{0}, "
            "f32[8,3]{1,0})) all-gather-start(%p, %q)",
            "all-gather",
            160,
        ),
        ("f32[2]{0} reduce-scatter(%p)", "reduce-scatter", 64),
        (
            "((f32[16]{0}), (f32[2]{0})) reduce-scatter-start(%p)",
            "reduce-scatter",
            64,
        ),
        (
            "(f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p)",
            "collective-permute",
            16,
        ),
        ("pred[3]{0} collective-broadcast(%p)", "collective-broadcast", 3),
        ("c64[2]{0} all-to-all(%p)", "all-to-all", 16),
        ("s4[5]{0} all-to-all(%p)", "all-to-all", 3),
    ],
)
def test_bytes_of_the_whole_values(line, kind, num_bytes):
    found = only(f"%r = {line}, channel_id=1")
    assert (found[0], found[3]) == (kind, num_bytes)


def test_what_ends_a_collective_is_not_another_one():
    found = only(
        "%s = f32[16]{0} all-reduce-start(%p), replica_groups={}",
        "%d = f32[16]{0} all-reduce-done(%s)",
    )
    assert found[2] == 1


LOOP = """
%body (b: f32[16]) -> f32[16] {
  ROOT %r = f32[16]{0} all-reduce(%b), replica_groups={}, to_apply=%add
}

%inside (c: f32[16]) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %index = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%index, %limit), direction=LT
}

%open (c: f32[16]) -> pred[] {
  ROOT %lt = pred[] parameter(0)
}
"""


@pytest.mark.parametrize(
    "rest, times",
    [
        ("condition=%inside, body=%body", 7),
        ("condition=%open, body=%body", 1),
        (
            "condition=%open, body=%body, backend_config="
            '{"known_trip_count":{"n":"5"}}',
            5,
        ),
    ],
)
def test_a_loop_counts_as_often_as_it_runs(rest, times):
    found = only(f"%w = (f32[16]{{0}}) while(%p), {rest}", others=LOOP)
    assert found[2:4] == (times, 64 * times)


def test_collectives_of_branches_and_of_asynchronous_calls():
    lines = (
        "%c = f32[16] conditional(%i, %p, %p), "
        "branch_computations={%body, %body}",
        "%a = (f32[16]) async-start(%p), calls=%body",
    )
    assert only(*lines, others=LOOP)[2] == 3


def test_attributes_of_kernels_have_several_lines():
    kernel = (
        "%k = f32[2]{0} custom-call(%p), frontend_attributes={more={",
        '"more":"{}",',
        "}}, metadata={}",
    )
    group = "replica_groups={{0,1}}"
    text = program(
        *kernel,
        "%r = f32[4]{0} all-reduce(%k), frontend_attributes={a={",
        "}}, " + group,
    ).replace("\n  }}", "\n}}")
    assert "\n}}" in text
    (found,) = collectives_in(text, 8)
    assert (found.devices, found.num_bytes) == (2, 16)


def test_one_device_exchanges_nothing():
    line = "%r = f32[16]{0} all-reduce(%p), replica_groups={{0},{1}}"
    assert collectives_in(program(line), 2) == ()


def test_exchanges_with_the_host():
    text = program(
        "%i = (f32[2]{0}, token[]) infeed(%t)",
        "%s = (f32[2]{0}) send(%p, %t), channel_id=1, is_host_transfer=true",
        "%o = (f32[2]{0}) send(%p, %t), channel_id=2",
        '%k = f32[2] custom-call(%p), custom_call_target="xla_python_callback"',
        '%g = f32[2] custom-call(%p), custom_call_target="__cublas$gemm"',
    )
    assert host_transfers_in(text) == 3


def fused(name, *lines):
    """A fusion's computation of that name."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: f32[16]) -> f32[2] {{\n{body}\n}}\n"


def test_a_tpu_s_reduce_scatter_is_a_fusion():
    inside = fused(
        "all-reduce-scatter.1",
        "%r = f32[16]{0} all-reduce(%p), channel_id=3, to_apply=%add",
        "ROOT %s = f32[2]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={2}",
    )
    line = (
        "%f = f32[2]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    )
    assert only(line, others=inside) == ("reduce-scatter", 8, 1, 64, 56)


def test_a_tpu_s_collective_in_several_fusions_is_one():
    gather = (
        "f32[16]{0} all-gather(%p), channel_id=1, dimensions={0}, "
        'frontend_attributes={chain_id="0"}'
    )
    others = fused("begin", f"%g = {gather}") + fused("go_on", f"%h = {gather}")
    lines = [
        "%a = f32[16]{0} fusion(%p), kind=kCustom, calls=%begin",
        "%b = f32[16]{0} fusion(%a), kind=kOutput, calls=%go_on",
    ]
    assert only(*lines, others=others) == ("all-gather", 8, 1, 64, 56)
