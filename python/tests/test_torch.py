"""torch: operators, compilation, autocast, gradients, and the models of transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import fovea  # noqa: E402
import fovea.flash_attn_2  # noqa: E402

DTYPE = {"cpu": torch.float32, "cuda": torch.float16}
TOLERANCE = {"cpu": dict(atol=2e-5, rtol=2e-5), "cuda": dict(atol=1e-2, rtol=1e-2)}


def randn(device, *shape, **options):
    """Numbers of the device's dtype, the same on every device."""
    numbers = (torch.randn(*shape) * 128).round() / 128
    return numbers.to(device, DTYPE[device]).requires_grad_(options.get("requires_grad", False))


def tensors(device="cpu", batch=2, rows=5, keys=7, heads=4, heads_kv=2, dim=16):
    torch.manual_seed(0)
    return (
        randn(device, batch, rows, heads, dim),
        randn(device, batch, keys, heads_kv, dim),
        randn(device, batch, keys, heads_kv, dim),
    )


def int32(device, numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def reference(q, k, v, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, enable_gqa=True, **options
    ).transpose(1, 2)


def everything(q, k, v, cos, sin):
    """One of each function, with sizes and options that differ."""
    rows = q.shape[1]
    one = fovea.flash_attn_func(q, k, v, causal=True, window_size=(4, None), softcap=3.0)
    two = fovea.sdpa(*(x.transpose(1, 2) for x in (one, k, v)), enable_gqa=True, is_causal=True)
    cu = int32(q.device, [0, 2, rows])
    three, lse = fovea.flash_attn_varlen_func(
        q[0], k[0], v[0], cu, cu, rows, rows, return_lse=True, attention_chunk=3
    )
    slopes = torch.ones(4, device=q.device)
    four = fovea.flash_attn_2.flash_attn_func(q, k, v, 0.0, 0.5, alibi_slopes=slopes)
    cache = [q.new_zeros(2, 9, 2, 16) for _ in range(2)]
    five = fovea.flash_attn_with_kvcache(
        q[:, :2], *cache, k[:, :2], v[:, :2], cache_seqlens=int32(q.device, [1, 4]),
        rotary_cos=cos, rotary_sin=sin, causal=True,
    )
    return one, two, three, lse, four, five, *cache


def test_compiles_without_graph_breaks(device):
    q, k, v = tensors(device)
    angles = torch.rand(9, 4)
    arguments = (q, k, v, *(x.to(q) for x in (angles.cos(), angles.sin())))
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*arguments), everything(*arguments), strict=True):
        torch.testing.assert_close(one, other)


def test_compiles_with_dynamic_shapes(device):
    compiled = torch.compile(
        lambda q, k, v: fovea.flash_attn_func(q, k, v, causal=True) + 1,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )
    for rows in (3, 4, 5):
        q, k, v = tensors(device, rows=rows, keys=rows + 2)
        torch.testing.assert_close(
            compiled(q, k, v), fovea.flash_attn_func(q, k, v, causal=True) + 1
        )


def test_operators_pass_torchs_own_checks(device):
    q, k, v = tensors(device)
    nothing = (None,) * 9
    torch.library.opcheck(
        torch.ops.fovea.attention.default,
        (q, k, v, *nothing, 0, 0, None, True, -1, -1, 0.0, 0.0, 0, False),
    )
    cache = [q.new_zeros(2, 9, 2, 16) for _ in range(2)]
    lengths, table = int32(device, [1, 2]), int32(device, [[0], [1]])
    torch.library.opcheck(
        torch.ops.fovea.append.default, (*cache, k, v, lengths, table, None, None, None, False)
    )
    angles = torch.rand(9, 4)
    torch.library.opcheck(
        torch.ops.fovea.rotate.default,
        (q, lengths, None, angles.cos().to(q), angles.sin().to(q), True, False),
    )


def test_operator_equals_the_direct_way(device):
    q, k, v = tensors(device)
    direct = fovea.flash_attn_func(q, k, v, causal=True)
    out, _, _ = torch.ops.fovea.attention(
        q, k, v, *(None,) * 9, 0, 0, None, True, -1, -1, 0.0, 0.0, 1, False
    )
    assert torch.equal(direct, out)
    torch.testing.assert_close(
        fovea.flash_attn_func(*tensors(device, keys=5), causal=True),
        reference(*tensors(device, keys=5), is_causal=True),
        **TOLERANCE[device],
    )


def test_sdpa_equals_torchs(device):
    torch.manual_seed(1)
    q, k, v = (randn(device, 2, 4, rows, 16) for rows in (5, 9, 9))
    theirs = torch.nn.functional.scaled_dot_product_attention
    mask = (torch.rand(2, 1, 5, 9) < 0.5).to(device)
    mask[..., 0] = True  # torch gives NaN where there is no key
    bias = randn(device, 5, 9)
    causal, scaled, masked, biased = (
        {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask}, {"attn_mask": bias}
    )
    for options in ({}, causal, scaled, masked, biased):
        torch.testing.assert_close(
            fovea.sdpa(q, k, v, **options), theirs(q, k, v, **options), **TOLERANCE[device]
        )
    noncontiguous = q.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(
        fovea.sdpa(noncontiguous, k, v), theirs(q, k, v), **TOLERANCE[device]
    )


def definition(q, k, v, *, scale, visible, softcap=0.0, bias=0.0, sink=None):
    """(out, lse) in differentiable steps; q, k, v (batch, seqlen, heads, head_dim)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~visible, float("-inf"))
    if sink is not None:
        extra = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], -1)
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), torch.logsumexp(scores, -1)


def close_gradients(device, mine, expected):
    for one, other in zip(mine, expected, strict=True):
        assert one.device.type == device
        torch.testing.assert_close(one, other.to(one.dtype), **TOLERANCE[device])


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_also_of_lse_sink_and_bias(device, compiled):
    q, k, v = (x.requires_grad_() for x in tensors(device))
    sink = torch.randn(4).to(device).requires_grad_()
    bias = randn(device, 1, 4, 5, 7, requires_grad=True)
    dout, dlse = randn(device, 2, 5, 4, 16), torch.randn(2, 4, 5).to(device)

    def loss(q, k, v, sink):
        out, lse = fovea.flash_attn_func(
            q, k, v, 0.3, True, softcap=4.0, learnable_sink=sink, return_lse=True
        )
        return (out * dout).float().sum() + (lse * dlse).sum()

    if compiled:
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    visible = torch.arange(7, device=device) <= torch.arange(5, device=device)[:, None] + 2
    out, lse = definition(
        *(x.double() for x in (q, k, v)), scale=0.3, visible=visible, softcap=4.0,
        sink=sink.double(),
    )
    inputs = (q, k, v, sink)
    expected = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), inputs)
    close_gradients(device, torch.autograd.grad(loss(*inputs), inputs), expected)

    out = fovea.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), bias, enable_gqa=True)
    theirs, _ = definition(
        *(x.double() for x in (q, k, v)), scale=0.25, bias=bias.double(),
        visible=torch.ones(5, 7, dtype=torch.bool, device=device),
    )
    inputs = (q, k, v, bias)
    expected = torch.autograd.grad(theirs.sum(), inputs)
    close_gradients(device, torch.autograd.grad(out.float().sum(), inputs), expected)


def test_gradients_of_ragged_batches(device):
    cu_q, cu_k = int32(device, [0, 3, 3, 8]), int32(device, [0, 4, 6, 7])
    q = randn(device, 8, 4, 16, requires_grad=True)
    k, v = (randn(device, 7, 2, 16, requires_grad=True) for _ in range(2))
    dout = randn(device, 8, 4, 16)
    out = fovea.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 4)
    mine = torch.autograd.grad(out, (q, k, v), dout)
    parts = []
    for b in (0, 2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        part, _ = definition(
            *(x[None].double() for x in (q[rows], k[keys], v[keys])), scale=0.25,
            visible=torch.tensor(True, device=device),
        )
        parts.append((part[0] * dout[rows]).sum())
    close_gradients(device, mine, torch.autograd.grad(sum(parts), (q, k, v)))


def test_dropout_is_the_same_backward(device):
    q, k = randn(device, 1, 8, 2, 8) * 0, randn(device, 1, 8, 2, 8) * 0
    v = torch.eye(8)[None, :, None].expand(1, 8, 2, 8).to(q).clone().requires_grad_()
    out = fovea.flash_attn_func(q, k, v, dropout_p=0.5)  # the weights themselves
    assert set(out.detach().unique().tolist()) == {0, 0.25}
    dout = randn(device, 1, 8, 2, 8)
    (dv,) = torch.autograd.grad(out, v, dout)
    expected = torch.einsum("bqhk,bqhd->bkhd", out.detach().double(), dout.double())
    torch.testing.assert_close(dv, expected.to(dv.dtype), **TOLERANCE[device])


def test_what_has_no_gradient_says_so(device):
    q, k, v = (x.requires_grad_() for x in tensors(device))
    slopes = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^alibi_slopes requires a gradient"):
        fovea.flash_attn_func(q, k, v, alibi_slopes=slopes).sum().backward()
    out = fovea.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="^dout requires a gradient"):
        dq.sum().backward()
    pages = randn(device, 4, 4, 2, 16, requires_grad=True)
    with pytest.raises(NotImplementedError):
        fovea.flash_attn_with_kvcache(
            q, pages, pages, cache_seqlens=7,
            block_table=int32(device, [[0, 1], [2, 3]]),
        ).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    q, k, v = (x.float().requires_grad_() for x in tensors(device, keys=5))
    with torch.autocast(device, dtype):
        out = fovea.flash_attn_func(q, k, v)
    assert out.dtype is dtype
    expected = reference(q, k, v)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    mine = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for one, other in zip(
        mine, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True
    ):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


def test_dropout_follows_torchs_seed(device):
    q, k, v = tensors(device)
    torch.manual_seed(5)
    one, two = (fovea.flash_attn_func(q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(one, fovea.flash_attn_func(q, k, v, dropout_p=0.3))
    assert not torch.equal(one, two)


def test_wrong_calls():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="^k is a ndarray but q a torch.Tensor"):
        fovea.flash_attn_func(q, k.numpy(), v)
    with pytest.raises(ValueError, match="^k has dtype"):
        fovea.flash_attn_func(q, k.half(), v)
    with pytest.raises(TypeError, match="^q has dtype"):
        fovea.flash_attn_func(*(x.double() for x in (q, k, v)))
    for needs_gradient in (False, True):  # the direct way, and the operator's
        q.requires_grad_(needs_gradient)
        for wrong in (
            {"softcap": "x"}, {"num_splits": 2.5}, {"causal": None}, {"alibi_slopes": [1.0] * 4},
            {"window_size": ("a", 0)}, {"learnable_sink": [1.0] * 4},
        ):
            (name,) = wrong
            with pytest.raises(TypeError, match=f"^{name} is"):
                fovea.flash_attn_func(q, k, v, **wrong)
    square = q.transpose(1, 2).detach()
    with pytest.raises(TypeError, match="^attn_mask has dtype torch.int32"):
        fovea.sdpa(square, square, square, torch.ones(5, 5, dtype=torch.int32))
    with pytest.raises(TypeError, match="^cu_seqlens_q"):
        fovea.flash_attn_varlen_func(q[0], k[0], v[0], [0, 2.5], [0, 7], 5, 7)


def test_numbers_of_torch_are_numbers():
    q, k, v = tensors()
    assert torch.equal(
        fovea.flash_attn_func(
            q, k, v, torch.tensor(0.5), window_size=torch.tensor([3, 1]), softcap=torch.tensor(2.0)
        ),
        fovea.flash_attn_func(q, k, v, 0.5, window_size=(3, 1), softcap=2.0),
    )


def test_meta_tensors_give_shapes():
    out, lse = fovea.flash_attn_func(*(x.to("meta") for x in tensors()), return_lse=True)
    assert out.is_meta and out.shape == (2, 5, 4, 16) and lse.shape == (2, 4, 5)


def test_torch_after_fovea():
    code = (
        "import fovea, torch; q = torch.ones(1, 4, 2, 8); out = fovea.flash_attn_func(q, q, q);"
        "assert isinstance(out, torch.Tensor) and torch.equal(out, q)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_openmp_runtime():
    """torch and fovea share one pool of threads, whoever comes first."""
    for order in ("fovea, torch", "torch, fovea"):
        code = (
            f"import {order}; q = torch.ones(1, 64, 8, 64); fovea.flash_attn_func(q, q, q);"
            "torch.ones(512, 512) @ torch.ones(512, 512);"
            "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l}))"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "1", order


def test_sdpa_override():
    impls = pytest.importorskip("torch.nn.attention")
    if not hasattr(impls, "register_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash attention implementations")
    assert "torch" in fovea.register()
    q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(theirs.square().sum(), (q, k, v))
    calls = []
    from fovea import _torch_sdpa

    original = _torch_sdpa.sdpa_with_lse
    _torch_sdpa.sdpa_with_lse = lambda *a, **o: calls.append(1) or original(*a, **o)
    impls.activate_flash_attention_impl("fovea")
    try:
        ours = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(ours, theirs)
        for mine, other in zip(
            torch.autograd.grad(ours.square().sum(), (q, k, v)), gradients, strict=True
        ):
            torch.testing.assert_close(mine, other)
    finally:
        impls.restore_flash_attention_impl()
        _torch_sdpa.sdpa_with_lse = original
    assert calls, "torch did not come to fovea"
    count = len(calls)
    torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert len(calls) == count


def test_steps_on_a_device_equal_the_cpus():
    """What CUDA tensors take, run on the CPU beside what CPU tensors take."""
    from fovea import _native, _torch_device

    torch.manual_seed(2)
    angles = torch.rand(12, 4)
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    table = torch.tensor([[4, 1, 2], [0, 5, 3]], dtype=torch.int32)
    cu = torch.tensor([0, 1, 5], dtype=torch.int32)
    for cu_new, shape in ((None, (2, 4)), (cu, (5,))):
        k, v = (torch.randn(*shape, 2, 16) for _ in range(2))
        for interleaved in (False, True):
            caches = [[torch.zeros(6, 4, 2, 16) for _ in range(2)] for _ in range(2)]
            rest = (k, v, lengths, table, cu_new, cos, sin, interleaved)
            _native.append(*caches[0], *rest)
            _torch_device.append(*caches[1], *rest)
            for one, other in zip(*caches, strict=True):
                torch.testing.assert_close(one, other)
            for still in (False, True):
                turned = torch.empty_like(k)
                rest = (lengths, cu_new, cos, sin, interleaved, still)
                _native.rotate(k, turned, *rest)
                torch.testing.assert_close(_torch_device.rotate(k, *rest), turned)

    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4)
    lses[1], outs[1] = -torch.inf, torch.nan
    lses[:, 0, 0] = -torch.inf
    for sink in (None, torch.randn(4)):
        expected, expected_lse = fovea.flash_attn_combine(outs, lses, learnable_sink=sink)
        out = torch.empty_like(expected)
        lse = _torch_device.combine(outs, lses, out, sink)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_host_numbers_stay_out_of_graphs(monkeypatch):
    """A graph would keep them, and what it calls with later would be ignored."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    like = torch.zeros(1).as_subclass(OnDevice)
    there = torch.ones(2, dtype=torch.int32).as_subclass(OnDevice)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for numbers in ([1, 2], torch.ones(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="^cache_seqlens is on the host, and a graph"):
            fovea._libraries.host_int32(numbers, like, "cache_seqlens")
    for numbers in (range(2), there):
        assert fovea._libraries.host_int32(numbers, like, "cache_seqlens").shape == (2,)
