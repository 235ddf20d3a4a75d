"""The same functions on a GPU: results like the CPU's, in the caller's stream, without waiting."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.gpu]

import fovea  # noqa: E402


def tensors(batch=2, rows=130, keys=300, heads=8, heads_kv=2, dim=128, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tuple(
        torch.randn(batch, n, h, dim).to(dtype)
        for n, h in ((rows, heads), (keys, heads_kv), (keys, heads_kv))
    )


def like_the_cpu(function, *inputs, **options):
    """function on the GPU against function in fp32 on the CPU."""
    to_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    on_gpu = function(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs), **to_gpu)
    widened = (
        x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    )
    on_cpu = function(*widened, **options)
    pairs = zip(on_gpu, on_cpu, strict=True) if isinstance(on_gpu, tuple) else [(on_gpu, on_cpu)]
    for one, other in pairs:
        assert one.is_cuda
        torch.testing.assert_close(one.float().cpu(), other.float(), atol=2e-2, rtol=2e-2)
    return on_gpu


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(60, 0)),
    "softcap": dict(softcap=5.0),
    "scale": dict(softmax_scale=0.03),
    "sink": dict(learnable_sink=torch.linspace(-1, 2, 8)),
    "alibi": dict(alibi_slopes=torch.linspace(0.01, 0.1, 8)),
    "splits": dict(num_splits=3),
    "chunks": dict(attention_chunk=64),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", OPTIONS)
def test_dense(option, dtype):
    options = dict(OPTIONS[option], return_lse=True)
    like_the_cpu(fovea.flash_attn_func, *tensors(dtype=dtype), **options)


@pytest.mark.parametrize("dim", [40, 64, 72, 96, 256])
def test_head_dims(dim):
    like_the_cpu(fovea.flash_attn_func, *tensors(dim=dim), causal=True, return_lse=True)


def test_ragged():
    q, k, v = tensors(batch=1)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 30, 30, 130], [0, 99, 130, 300]))
    like_the_cpu(
        fovea.flash_attn_varlen_func, q[0], k[0], v[0], cu_q, cu_k, 100, 170, causal=True,
        return_lse=True,
    )


def test_sdpa():
    q, k, v = (x.transpose(1, 2) for x in tensors(rows=300))
    like_the_cpu(fovea.sdpa, q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.rand(300, 300) < 0.5
    like_the_cpu(fovea.sdpa, q, k, v, mask, enable_gqa=True)


@pytest.mark.parametrize("paged", [False, True])
def test_decoding(paged):
    q, k_new, v_new = tensors(rows=1, keys=1)
    angles = torch.rand(512, 32)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    shape = (16, 64, 2, 128) if paged else (2, 512, 2, 128)
    caches = [torch.randn(shape).bfloat16() for _ in range(2)]
    table = torch.randperm(16, dtype=torch.int32).reshape(2, 8) if paged else None
    lengths = torch.tensor([100, 333], dtype=torch.int32)
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        held = [x.to(device, dtype, copy=True) for x in caches]
        moved = [x.to(device, dtype) for x in (q, k_new, v_new, cos, sin)]
        out = fovea.flash_attn_with_kvcache(
            moved[0], *held, moved[1], moved[2], rotary_cos=moved[3], rotary_sin=moved[4],
            cache_seqlens=lengths.to(device), causal=True,
            page_table=None if table is None else table.to(device),
        )
        results.append([x.float().cpu() for x in (out, *held)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_own_stream_and_no_waiting():
    """Neither pass waits for the device, and both work in the caller's stream."""
    q, k, v = (x.cuda().requires_grad_() for x in tensors(rows=1000, keys=1000))
    dout = torch.randn_like(q)
    expected = fovea.flash_attn_func(q, k, v, deterministic=True)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    stream = torch.cuda.Stream()
    inputs = [torch.zeros_like(x).requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
        for mine, other in zip(inputs, (q, k, v), strict=True):
            mine.data.copy_(other.data)
        out = fovea.flash_attn_func(*inputs, deterministic=True)
        assert not stream.query(), "the call waited"
        mine = torch.autograd.grad(out, inputs, dout)
        assert not stream.query(), "the backward pass waited"
    stream.synchronize()
    assert torch.equal(out, expected)
    for one, other in zip(mine, gradients, strict=True):
        assert torch.equal(one, other)


def test_nothing_synchronises():
    """Every function, once its kernels are there, in a mode where torch refuses to wait."""
    q, k, v = (x.cuda().requires_grad_() for x in tensors())
    new_q, new_k, new_v = (x.cuda() for x in tensors(rows=1, keys=1))
    cu_q, cu_k = (torch.tensor(x, device="cuda") for x in ([0, 130, 260], [0, 300, 600]))
    sink, slopes = torch.ones(8, device="cuda"), torch.rand(8, device="cuda")
    mask = torch.rand(130, 300, device="cuda") < 0.5
    caches = [torch.zeros(2, 64, 2, 128, dtype=q.dtype, device="cuda") for _ in range(2)]
    pages = [torch.zeros(8, 16, 2, 128, dtype=q.dtype, device="cuda") for _ in range(2)]
    table = torch.arange(8, dtype=torch.int32, device="cuda").reshape(2, 4)
    cos, sin = (torch.rand(64, 32, device="cuda").to(q.dtype) for _ in range(2))
    stack = lambda x: torch.stack([x, x]).float()  # noqa: E731

    def everything():
        out, lse = fovea.flash_attn_func(
            q, k, v, causal=True, learnable_sink=sink, alibi_slopes=slopes, return_lse=True
        )
        (out.float().sum() + lse.sum()).backward()
        fovea.flash_attn_func(q, k, v, attention_chunk=50, window_size=(20, 3), dropout_p=0.1)
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        fovea.flash_attn_varlen_func(*packed, cu_q, cu_k, 130, 300).sum().backward()
        fovea.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), mask, enable_gqa=True)
        for lengths in (7, [5, 6]):
            fovea.flash_attn_with_kvcache(
                new_q, *caches, new_k, new_v, rotary_cos=cos, rotary_sin=sin, causal=True,
                cache_seqlens=lengths, cache_batch_idx=[1, 0],
            )
        fovea.flash_attn_with_kvcache(
            new_q, *pages, new_k, new_v, cache_seqlens=9, page_table=table, cache_leftpad=[1, 0]
        )
        fovea.flash_attn_combine(stack(out), stack(lse.transpose(1, 2)))

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_layouts_of_one_shape():
    """Plans are kept from call to call, and depend on more than shapes."""
    q, k, v = (x.cuda() for x in tensors())
    expected = fovea.flash_attn_func(q, k, v)
    wide = torch.zeros(2, 300, 2, 129, dtype=q.dtype, device="cuda")[..., 1:]
    wide.copy_(k)
    shifted = torch.zeros(v.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(v.shape)
    shifted.copy_(v)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        for arguments in ((q, wide, v), (heads_first, k, shifted), (q, k, v)):
            torch.testing.assert_close(fovea.flash_attn_func(*arguments), expected)


def test_lengths_of_64_bits():
    q, k, v = (x[0].cuda() for x in tensors(batch=1))
    cu_q, cu_k = (torch.tensor(x, device="cuda") for x in ([0, 30, 130], [0, 99, 300]))
    assert torch.equal(
        fovea.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 100, 201),
        fovea.flash_attn_varlen_func(q, k, v, cu_q.int(), cu_k.int(), 100, 201),
    )


def test_graph_replayed_with_other_lengths():
    q, k, v = (x.cuda() for x in tensors(rows=1, keys=1024))
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    run = lambda: fovea.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for new in ([300, 0], [5, 1000]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        torch.testing.assert_close(out, run())


def test_graph_appends_to_quantized_pages():
    """A step of decoding is captured once: keys are appended, queries quantised and attended."""
    _, k, v = (x.cuda() for x in tensors())
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(12, device="cuda").to(torch.int32).reshape(2, 6)
    step_k, step_v = torch.empty_like(k[:, :1]), torch.empty_like(v[:, :1])
    lengths = torch.empty(2, dtype=torch.int32, device="cuda")

    def pool():
        made = fovea.QuantizedPages(12, 64, 2, 128, like=k, slots=2)
        lengths.copy_(made.append(k[:, :60], v[:, :60], table, [0, 0]))
        return made

    def step(pages):
        lengths.copy_(pages.append(step_k, step_v, table, lengths))
        return fovea.flash_attn_with_kvcache(
            k_cache=pages.k, v_cache=pages.v, key_scale=pages.key_scale,
            **pages.queries(q)._asdict(), block_table=table, cache_seqlens=lengths,
        )

    def replayed(run):
        outs = []
        for place in range(60, 100):
            step_k.copy_(k[:, place : place + 1])
            step_v.copy_(v[:, place : place + 1])
            outs.append(run().clone())
        return outs

    pages = pool()
    expected = replayed(lambda: step(pages))  # which compiles everything, too
    captured = pool()
    graph = torch.cuda.CUDAGraph()
    before = lengths.clone()
    with torch.cuda.graph(graph):
        out = step(captured)
    lengths.copy_(before)
    outs = replayed(lambda: (graph.replay(), out)[1])
    for one, other in zip(outs, expected, strict=True):
        assert torch.equal(one, other)
    exact = fovea.flash_attn_func(q.cpu().float(), k[:, :100].cpu().float(),
                                  v[:, :100].cpu().float())
    assert (outs[-1].cpu().float() - exact).square().mean().sqrt() < 0.05


def test_mixed_devices_and_what_a_gpu_cannot():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="^k is on cpu but q is on cuda:0"):
        fovea.flash_attn_func(q.cuda(), k, v)
    with pytest.raises(NotImplementedError):
        fovea.flash_attn_func(*(x.cuda().float() for x in (q, k, v)))


def test_plan():
    q, k, v = (x.cuda() for x in tensors())
    out, lse = torch.empty_like(q), torch.empty(2, 8, 130, device="cuda")
    plan = fovea.plan(q, k, v, out, lse, causal=True)
    assert plan.device == "cuda" and "forward" in plan.explain()
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    plan.run(workspace, k=k + 1)
    expected = fovea.flash_attn_func(q, k + 1, v, causal=True, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    with pytest.raises(ValueError, match="^workspace is on cpu but q is on cuda:0"):
        plan.run(workspace.cpu())


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = tensors(dtype=torch.float16)
    out, lse = fovea.flash_attn_func(
        *(cupy.asarray(x.numpy()) for x in (q, k, v)), causal=True, return_lse=True
    )
    assert type(out) is cupy.ndarray and lse.dtype == "float32"
    expected = fovea.flash_attn_func(*(x.float() for x in (q, k, v)), causal=True)
    torch.testing.assert_close(
        torch.from_numpy(cupy.asnumpy(out)).float(), expected, atol=2e-3, rtol=2e-3
    )


def test_call_overhead(capsys):
    from fovea import _bench

    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests take the time of this one")

    small = tuple(torch.ones(1, rows, 1, 64, dtype=torch.float16).cuda() for rows in (1, 16, 16))
    table = _bench.overhead(small)
    with capsys.disabled():
        print(f"\n{table}")
    assert table[0]["overhead"] < 20
