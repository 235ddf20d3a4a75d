"""Keys and values in 8 bits as the kernels read them: with key_scale, dense and in pages."""

from __future__ import annotations

import numpy as np
import pytest
from eight_bits import KINDS, Cuda, Torch, tensors, widened
from reference import attention, rotate

import fovea


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param()


def same(kind, one, other):
    """To the bit on the CPU, whose arithmetic does not know of pages and layouts."""
    one, other = kind.back(one), kind.back(other)
    if isinstance(kind, Cuda):
        assert np.abs(one - other).max() < 2**-4 * np.abs(other).max()
    else:
        np.testing.assert_array_equal(one, other)


def pool_of(kind, like, page_size=32, pages=20, **options):
    """Pages of sequences as `like`, and a table of them in random order, three pages each."""
    _, _, heads_kv, dim = like.shape
    pages = fovea.QuantizedPages(pages, page_size, heads_kv, dim, like=kind.make(like), **options)
    order = np.random.default_rng(3).permutation(pages.pages)
    columns = -(-like.shape[1] // page_size)
    table = order[: like.shape[0] * columns].reshape(-1, columns).astype(np.int32)
    return pages, kind.make(table)


def attend(pages, queries, table, lengths, **options):
    return fovea.flash_attn_with_kvcache(
        k_cache=pages.k, v_cache=pages.v, key_scale=pages.key_scale, **queries._asdict(),
        block_table=table, cache_seqlens=lengths, **options,
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("packed", [False, True])
def test_transposed_values(kind, rng, dtype, packed):
    q, k, v = (kind.make(x) for x in tensors(rng, dim=40))
    lengths, function = {}, fovea.flash_attn_func
    if packed:
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        lengths["cu_seqlens_q"] = kind.make(np.array([0, 33, 140], np.int32))
        lengths["cu_seqlens_k"] = kind.make(np.array([0, 111, 180], np.int32))
        function = fovea.flash_attn_varlen_func
    rows = fovea.quantize_fp8(q, k, v, dtype=dtype, **lengths)
    made = fovea.quantize_fp8(q, k, v, dtype=dtype, values="transposed", **lengths)
    assert made.k_descale is made.v_descale is rows.key_scale is None
    assert tuple(made.v.shape) == ((2, 40, 256) if packed else (2, 2, 40, 96))
    assert tuple(made.key_scale.shape) == (24 if packed else 20, 4)
    expected = function(**rows._asdict(), **lengths, causal=True)
    same(kind, function(**made._asdict(), **lengths, causal=True), expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("page_size", [32, 64, 96])
def test_pages(kind, rng, dtype, page_size):
    q, k, v = tensors(rng, rows=9, dim=40)
    pages, table = pool_of(kind, k, page_size, dtype=dtype)
    pages.write(kind.make(k), kind.make(v), table)
    queries = pages.queries(kind.make(q))
    for options in ({"causal": True}, {"window_size": (20, 5)}, {"softcap": 3.0}):
        out, lse = attend(pages, queries, table, 90, return_softmax_lse=True, **options)
        arguments = [kind.make(x) for x in (q, k, v)]
        dense = fovea.quantize_fp8(*arguments, dtype=dtype, values="transposed")
        like_dense, like_lse = fovea.flash_attn_func(**dense._asdict(), return_lse=True, **options)
        same(kind, out, like_dense)
        same(kind, lse, like_lse)
        # What the codes mean, attended to in double precision.
        rows = fovea.quantize_fp8(*arguments, dtype=dtype)
        wide = [
            widened(kind, x, s)
            for x, s in zip(rows[:3], (rows.q_descale, rows.k_descale, rows.v_descale), strict=True)
        ]
        if "window_size" in options:
            options = {"window": options["window_size"]}
        exact, _ = attention(*wide, softmax_scale=queries.softmax_scale, **options)
        kind.close(out, exact)
        exact, _ = attention(q, k, v, **options)
        error = np.sqrt(np.mean((kind.back(out) - exact) ** 2))
        assert 1e-3 < error < (0.15 if dtype == "float8_e5m2" else 0.07)


def test_lengths_and_packed_tensors(kind, rng):
    q, k, v = tensors(rng, rows=9)
    pages, table = pool_of(kind, k)
    used = np.array([90, 41], np.int32)
    cu = np.array([0, 90, 131], np.int32)
    keys, values = (kind.make(np.concatenate([x[0], x[1, :41]])) for x in (k, v))
    pages.write(keys, values, table, cu_seqlens_k=kind.make(cu))
    queries = pages.queries(kind.make(q))
    out = attend(pages, queries, table, kind.make(used), causal=True)
    for one, n in enumerate(used):
        exact, _ = attention(*(x[one : one + 1] for x in (q, k[:, :n], v[:, :n])), causal=True)
        assert np.sqrt(np.mean((kind.back(out)[one] - exact[0]) ** 2)) < 0.07
    # Queries of other lengths, packed.
    cu_q = kind.make(np.array([0, 2, 11], np.int32))
    packed = kind.make(np.concatenate([q[0, -2:], q[1]]))
    queries = pages.queries(packed, cu_seqlens_q=cu_q)
    assert tuple(queries.q_descale.shape) == (1, 4, 3)
    again = fovea.flash_attn_varlen_func(
        k=pages.k, v=pages.v, key_scale=pages.key_scale, **queries._asdict(), cu_seqlens_q=cu_q,
        max_seqlen_q=9, seqused_k=kind.make(used), block_table=table, causal=True,
    )
    same(kind, again[2:], out[1])


def test_what_is_written(kind, rng):
    """Blocks of the keys given, and nothing beside them."""
    _, k, v = tensors(rng)
    pages, table = pool_of(kind, k)
    numbers = kind.back(table).astype(int)
    for tensor in (pages.k, pages.v):
        bytes_of(kind, tensor)[...] = 77
    pages.key_scale[...] = 77.0
    pages.write(
        kind.make(k[:, :40]), kind.make(v[:, :40]), table, kind.make(np.array([0, 64], np.int32)),
        seqused_k=kind.make(np.array([40, 20], np.int32)),
    )
    written = {numbers[0, 0], numbers[0, 1], numbers[1, 2]}
    for page in range(pages.pages):
        for tensor in (pages.k, pages.v):
            changed = (bytes_of(kind, tensor)[page] != 77).any()
            assert bool(changed) == (page in written)
        scales = kind.back(pages.key_scale)[2 * page : 2 * page + 2]
        assert (scales != 77).any() == (page in written)
    assert (kind.back(pages.key_scale)[40:] == 77).all()


def bytes_of(kind, tensor):
    if isinstance(kind, Torch):
        import torch

        return tensor.view(torch.uint8)
    return tensor.view(np.uint8)


@pytest.mark.parametrize("turned", [False, True])
def test_append(kind, rng, turned):
    """Key by key and in chunks, in slots of any order, as if written at once."""
    q, k, v = tensors(rng, rows=5)
    tables = {}
    if turned:
        angles = np.arange(92)[:, None] / 10.0 ** (np.arange(12) / 8)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        tables = {"rotary_cos": kind.make(cos), "rotary_sin": kind.make(sin), "first_position": 2}
    expected, table = pool_of(kind, k)
    expected.write(kind.make(k), kind.make(v), table, **tables)
    pages, _ = pool_of(kind, k, slots=4)
    slots = kind.make(np.array([3, 1], np.int32))
    lengths = kind.make(np.zeros(2, np.int32))
    for begin, end in ((0, 37), (37, 38), (38, 64), (64, 64), (64, 89), (89, 90)):
        lengths = pages.append(
            kind.make(k[:, begin:end]), kind.make(v[:, begin:end]), table, lengths, slots, **tables
        )
    assert kind.back(lengths).tolist() == [90, 90]
    turn = {**tables, "cache_seqlens": lengths} if turned else {}
    outs = [
        attend(pool, pool.queries(kind.make(q), **turn), table, lengths, causal=True)
        for pool in (pages, expected)
    ]
    np.testing.assert_array_equal(kind.back(outs[0]), kind.back(outs[1]))
    if turned:
        q = rotate(np.concatenate([q, q[..., 24:]], -1)[..., :32], cos, sin,
                   np.arange(87, 92)[None].repeat(2, 0), False)
        k = rotate(k, cos, sin, np.arange(2, 92)[None].repeat(2, 0), False)
    exact, _ = attention(q, k, v, causal=True)
    assert np.sqrt(np.mean((kind.back(outs[0]) - exact) ** 2)) < 0.07


def test_append_of_different_lengths(kind, rng):
    q, k, v = tensors(rng, rows=1)
    pages, table = pool_of(kind, k, slots=2)
    lengths = [0, 0]
    for begin, counts in ((0, [50, 3]), (50, [0, 0]), (50, [40, 20])):
        new = [
            np.stack([np.roll(x[one], -lengths[one], 0)[:50] for one in range(2)]) for x in (k, v)
        ]
        made = pages.append(
            *(kind.make(x) for x in new), table, kind.make(np.array(lengths, np.int32)),
            seqused_k=kind.make(np.array(counts, np.int32)),
        )
        lengths = kind.back(made).astype(int).tolist()
    assert lengths == [90, 23]
    out = attend(pages, pages.queries(kind.make(q)), table, made)
    for one, n in enumerate(lengths):
        exact, _ = attention(*(x[one : one + 1] for x in (q, k[:, :n], v[:, :n])))
        assert np.sqrt(np.mean((kind.back(out)[one] - exact[0]) ** 2)) < 0.1


@pytest.mark.torch
@pytest.mark.filterwarnings("error")
def test_gradients_stay_outside(rng):
    """What append() keeps holds no graph, and codes of tensors with one are those without."""
    import torch

    kind = Torch()
    q, k, v = tensors(rng, rows=3)
    outs = []
    for wanted in (False, True):
        pages, table = pool_of(kind, k, slots=2)
        new = [kind.make(x).requires_grad_(wanted) * 1 for x in (k, v)]
        lengths = pages.append(*(x[:, :37] for x in new), table, [0, 0])
        lengths = pages.append(*(x[:, 37:] for x in new), table, lengths)
        assert not pages._open_k.requires_grad and not pages._open_v.requires_grad
        queries = pages.queries(kind.make(q).requires_grad_(wanted))
        outs.append(attend(pages, queries, table, lengths))
        pages.write(*new, table)
        outs.append(attend(pages, queries, table, lengths))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_memory_of_the_caller(kind, rng):
    q, k, v = tensors(rng, rows=3, dim=40)
    shapes = fovea.QuantizedPages.shapes(20, 32, 2, 40)
    assert shapes == ((20, 32, 2, 64), (20, 2, 40, 32), (48, 4))
    made, table = pool_of(kind, k)
    pages, _ = pool_of(kind, k, storage=(made.k, made.v, made.key_scale))
    assert pages.k is made.k
    pages.write(kind.make(k), kind.make(v), table)
    queries = made.queries(kind.make(q))
    same(kind, attend(made, queries, table, 90), attend(pages, queries, table, 90))


def test_shapes():
    """Of numpy's integers too, whose products would overflow, and of pools that can be."""
    sizes = np.int32(2**20), np.int32(64), np.int32(64), np.int32(100)
    shapes = fovea.QuantizedPages.shapes(*sizes)
    assert shapes == ((2**20, 64, 64, 128), (2**20, 64, 100, 64), (2**27 + 8, 4))
    assert all(type(extent) is int for shape in shapes for extent in shape)
    with pytest.raises(ValueError, match="^page_size is 48; it must be a multiple of 32"):
        fovea.QuantizedPages.shapes(4, 48, 2, 32)


def test_plan(kind, rng):
    q, k, v = tensors(rng, rows=1)
    pages, table = pool_of(kind, k, slots=2)
    pages.write(kind.make(k), kind.make(v), table)
    queries = pages.queries(kind.make(q))
    out = kind.make(np.zeros((2, 1, 4, 32), np.float32))
    lengths = kind.make(np.array([64, 1], np.int32))
    given = dict(
        q=queries.q, k=pages.k, v=pages.v, q_descale=queries.q_descale, key_scale=pages.key_scale,
        block_table=table, softmax_scale=queries.softmax_scale,
    )
    if isinstance(kind, Cuda):
        out = out.bfloat16()
    plan = fovea.plan(**given, out=out, seqused_k=lengths)
    text = fovea.explain(**given, seqused_k=lengths)
    assert ("pages      " if isinstance(kind, Cuda) else "of 8 bits") in text
    for n in (64, 90):
        lengths = kind.make(np.array([n, 1], np.int32))
        plan.run(out=out, seqused_k=lengths)
        expected = kind.back(attend(pages, queries, table, lengths))
        np.testing.assert_allclose(kind.back(out), expected, rtol=2**-7, atol=1e-3)
    with pytest.raises(ValueError, match="^q_descale has shape"):
        fovea.plan(**{**given, "q_descale": kind.make(np.ones((2, 3), np.float32))}, out=out,
                   seqused_k=lengths)


def test_libraries_without_pages():
    """Refused at once: arrays of jax cannot be written to, and cupy has no dtypes of float8."""
    jax = pytest.importorskip("jax")
    ndarray = type("ndarray", (), {"__module__": "cupy", "dtype": np.dtype(np.float32)})
    for like, said in ((jax.numpy.ones(3), "ArrayImpl of jax"), (ndarray(), "ndarray of cupy")):
        with pytest.raises(TypeError, match=f"^like is a {said}.*; quantised pages are tensors"):
            fovea.QuantizedPages(4, 32, 2, 32, like=like)


def test_faults_are_named(kind, rng):
    q, k, v = (kind.make(x) for x in tensors(rng, rows=1))
    pages, table = pool_of(kind, tensors(rng)[1], slots=1)
    lengths = kind.make(np.array([64, 64], np.int32))
    queries = pages.queries(q)
    fp8 = fovea.quantize_fp8(q, k, v, values="transposed")

    def refuses(exception, match, function, *arguments, **options):
        with pytest.raises(exception, match="^" + match):
            function(*arguments, **options)

    def made(**options):
        named = {"pages": 4, "page_size": 32, "heads_kv": 2, "head_dim": 32, "like": k, **options}
        return fovea.QuantizedPages(**named)

    refuses(ValueError, "page_size is 48; it must be a multiple of 32", made, page_size=48)
    refuses(ValueError, "pages is 0; it must lie in 1", made, pages=0)
    refuses(ValueError, "head_dim is 257; it must lie in 1..256", made, head_dim=257)
    refuses(ValueError, "dtype is float32; it must be float8_e4m3fn", made, dtype="float32")
    refuses(ValueError, "like has dtype .*; it must be float32", made, like=fp8.k)
    refuses(TypeError, "rotate is 'yes'", made, rotate="yes")
    refuses(ValueError, "seed is -1", made, seed=-1)
    refuses(ValueError, "storage holds 2 tensors", made, storage=(k, v))
    refuses(ValueError, "storage's v has shape .* it must be", made,
            storage=(pages.k[:4], pages.v, pages.key_scale[:16]))
    own = made()
    storage = {"k": own.k, "v": own.v, "key_scale": own.key_scale}

    def refuses_storage(exception, fault, **others):
        which = next(iter(others))
        refuses(exception, f"storage's {which} {fault}", made,
                storage=tuple({**storage, **others}.values()))

    refuses_storage(ValueError, "has shape .* and dtype .*uint8; it must be .* in float8_e4m3fn",
                    k=bytes_of(kind, own.k))
    refuses(ValueError, "storage's k has shape .* and dtype .*uint8; it must be .* in int8", made,
            dtype="int8", storage=(bytes_of(kind, own.k), own.v, own.key_scale))
    refuses(TypeError, "storage is a int; it must hold k, v and key_scale", made, storage=3)
    if not isinstance(kind, Torch):
        kept = own.k.copy()
        kept.flags.writeable = False
        refuses_storage(TypeError, "is read-only; it is written to", k=kept)
    swapped = own.v.reshape(4, 32, 2, 32).swapaxes(1, 2).swapaxes(2, 3)
    refuses_storage(ValueError, "is not contiguous; it must be", v=swapped)
    refuses_storage(TypeError, r"is a list; it must be a tensor", key_scale=[1.0])
    if isinstance(kind, Torch):
        refuses_storage(TypeError, "is a ndarray but `like` is a Tensor",
                        key_scale=kind.back(own.key_scale))
    if isinstance(kind, Cuda):
        refuses_storage(ValueError, "is not on the device of `like`; it must be", k=own.k.cpu())

    heads = kind.make(np.ones((2, 9, 3, 32), np.float32))
    refuses(ValueError, r"k has shape \(2, 9, 3, 32\); beside these pages it must be \(batch, "
            r"seqlen, 2, 32\)", pages.write, heads, v, table)
    refuses(ValueError, r"v has shape .* must be \(total, 2, 32\)", pages.write, k[0], v, table,
            cu_seqlens_k=[0, 90])
    refuses(TypeError, "block_table is None", pages.write, k, v, None)
    for function, last in ((pages.write, None), (made(slots=2).append, [0, 0])):
        for wrong in (table[0], table[:1], table[None], [[0, 1, 2]]):
            refuses(ValueError, r"block_table has shape .*; it must be \(2, pages of a sequence\)",
                    function, k, v, wrong, last)
        refuses(ValueError, r"block_table is \[\[0, 1\], \[2\]\]; its rows must be of one length",
                function, k, v, [[0, 1], [2]], last)
    for wrong in ([32], [[0], [0]], [[0, 0]]):
        refuses(ValueError, r"first_keys has shape .*; it must be \(2,\), one for each",
                pages.write, k, v, table, wrong)
        refuses(ValueError, r"seqused_k has shape .*; it must be \(2,\), one for each",
                pages.write, k, v, table, seqused_k=wrong)
    for wrong in ([], [[0, 90]]):
        refuses(ValueError, r"cu_seqlens_k has shape .*; it must be \(batch \+ 1,\)", pages.write,
                k[0], v[0], table, cu_seqlens_k=wrong)
        refuses(ValueError, r"cu_seqlens_q has shape .*; it must be \(batch \+ 1,\)",
                pages.queries, q[0], cu_seqlens_q=wrong)
    refuses(ValueError, "q has shape .* heads, 32", pages.queries, q[..., :16])
    refuses(ValueError, "q has dtype .*", pages.queries, queries.q)
    refuses(ValueError, "cache_seqlens is None; rotary_cos", pages.queries, q,
            rotary_cos=kind.make(np.ones((99, 8), np.float32)))
    refuses(TypeError, "cache_seqlens is None", pages.append, k, v, table, None)
    refuses(ValueError, r"cache_seqlens has shape \(1,\)", pages.append, k, v, table, [0])
    refuses(ValueError, "slots holds 2 numbers, but these pages were made with slots=1",
            pages.append, k, v, table, [0, 0])

    cache = {"k_cache": pages.k, "v_cache": pages.v, "key_scale": pages.key_scale}
    cache |= {"block_table": table, "cache_seqlens": lengths}
    attend_to = fovea.flash_attn_with_kvcache
    refuses(ValueError, "k is given beside key_scale; .* QuantizedPages.append", attend_to,
            **queries._asdict(), k=k, v=v, **cache)
    refuses(ValueError, "key_scale belongs to 8-bit inputs", attend_to, q, **cache)
    refuses(ValueError, "qv is given beside key_scale", fovea.flash_attn_func, **fp8._asdict(),
            qv=q)
    refuses(ValueError, "k_descale is present beside key_scale", attend_to, **queries._asdict(),
            k_descale=kind.make(np.ones((2, 2), np.float32)), **cache)
    refuses(ValueError, "key_scale has shape .*; it must be", attend_to, **queries._asdict(),
            **{**cache, "key_scale": pages.key_scale[:-1]})
    refuses(ValueError, "v_cache has shape .* heads_kv, head_dim, rows", attend_to,
            **queries._asdict(), **{**cache, "v_cache": pages.v[0]})
    flat = pages.v.reshape(-1)
    refuses(ValueError, "v has shape .*; it must have 3 or 4 dimensions", fovea.flash_attn_func,
            **{**fp8._asdict(), "v": flat})
    refuses(ValueError, "v has shape .*; it must have 3 or 4 dimensions", fovea.explain, queries.q,
            pages.k, flat, key_scale=pages.key_scale, block_table=table, seqused_k=lengths)
    refuses(TypeError, "v is a list; it must be a tensor", fovea.explain, q, k, [1.0])
    refuses(ValueError, "key_scale has shape", fovea.flash_attn_func,
            **{**fp8._asdict(), "key_scale": fp8.key_scale[0]})
    refuses(ValueError, "values is 'columns'", fovea.quantize_fp8, q, k, v, values="columns")
    refuses(TypeError, "values is None", fovea.quantize_fp8, q, k, v, values=None)
    short = r"v has shape \(2, 40, 2, 32\); beside k of .* it must be \(2, 90, 2, 32\)"
    for function in (pages.write, made(slots=2).append):
        refuses(ValueError, short, function, k, v[:, :40], table, [0, 0])
    refuses(ValueError, "v has shape", pages.write, k[:, :0], v, table)
    if isinstance(kind, Cuda):
        return  # where the values are the caller's word
    for used, entry in (([20, 3], 0), ([3, 4], 1), ([-3, 3], 0)):
        refuses(ValueError, rf"seqused_k is {used[entry]} at entry {entry}; it must lie in 0\.\.3",
                made(slots=2).append, k[:, :3], v[:, :3], table, [0, 0], seqused_k=used)
    refuses(ValueError, "first_keys is 33 at entry 1; it must be a multiple of 32", pages.write, k,
            v, table, [0, 33])
    refuses(ValueError, "block_table is 20 at row 0, column 0, but the pool has 20", pages.write, k,
            v, table * 0 + 20)
    one = k[:1], v[:1], table[:1]
    refuses(ValueError, r"slots holds \[1\]; they must differ and lie in 0..0", pages.append, *one,
            [0], [1])
    refuses(ValueError, "cache_seqlens is -1 at entry 0; it must not", pages.append, *one, [-1])
    refuses(ValueError, "cache_seqlens is 7 at entry 0, where 90 keys are added, but a row of "
            "block_table has room for 96", pages.append, *one, [7])
    refuses(ValueError, "cache_seqlens is 7 at entry 0, where 90 keys are added, but a row of "
            "block_table has room for 96", pages.append, *one[:2], [[0, 1, 2]], [7])
    table_of_angles = kind.make(np.ones((80, 8), np.float32))
    refuses(ValueError, "rotary.cos has 80 rows but the last key", pages.write, *one,
            rotary_cos=table_of_angles, rotary_sin=table_of_angles)
    few = k[:1, :3], v[:1, :3], table[:1]
    refuses(ValueError, "cache_seqlens is 74 at entry 0, where 3 keys are added, but behind "
            "first_position rotary_cos has rows for 76", pages.append, *few, [74],
            rotary_cos=table_of_angles, rotary_sin=table_of_angles, first_position=4)
    refuses(ValueError, r"rotary_cos has shape \(8,\); it must be \(positions", pages.append, *few,
            [0], rotary_cos=table_of_angles[0], rotary_sin=table_of_angles)
    refuses(ValueError, "cache_seqlens .*81", pages.queries, q, cache_seqlens=[80, 81],
            rotary_cos=table_of_angles, rotary_sin=table_of_angles)
