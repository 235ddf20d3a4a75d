"""A cache of keys and values in 8 bits, in pages that the kernels read where they lie."""

from __future__ import annotations

from typing import Any, NamedTuple

from fovea import _libraries, _native
from fovea._core import with_names
from fovea._fp8 import (
    call_of,
    code_name,
    current,
    not_quantized,
    operands,
    settings,
    value_name,
    workspace_of,
)
from fovea._libraries import Array, Library, host_int32, library_of, same_int32
from fovea._options import integer, real

BLOCK = 32  # keys that share scales


class Queries(NamedTuple):
    """What goes beside the pages: flash_attn_with_kvcache(**queries._asdict(), ...)."""

    q: Array
    q_descale: Array
    softmax_scale: float


class QuantizedPages:
    """Keys and values of many sequences in 8 bits, with scales for every 32 keys.

    k: (pages, page_size, heads_kv, head_dim padded to a multiple of 32)
    v: (pages, heads_kv, head_dim_v, page_size), in the order that the kernels read
    key_scale: (pages * heads_kv * page_size / 32 + 8, 4) float32

    flash_attn_with_kvcache, flash_attn_varlen_func and plan() take the three with a table of page
    numbers, and queries() makes the q that belongs to them. Which pages are whose is the caller's
    to say: sequences may share pages to read, and a page that no table names may hold anything.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        like: Array,
        dtype: object = "float8_e4m3fn",
        rotate: bool = True,
        seed: int = 0,
        slots: int = 0,
        storage: tuple[Array, Array, Array] | None = None,
    ) -> None:
        """pages, page_size: of the pool; page_size is a multiple of 32
        like: a tensor of the library (torch or numpy), device and dtype that keys and values come
            in
        dtype, rotate, seed: as quantize_fp8 has them, of the pool and of its queries
        slots: how many sequences append() may let grow at a time; each keeps up to 31 keys and
            values in the dtype of `like`
        storage: k, v and key_scale in memory that is there already: contiguous, of shapes(), at
            multiples of 16 bytes
        """
        self.pages, self.page_size, self.heads_kv, self.head_dim, self.head_dim_v = _sizes(
            pages, page_size, heads_kv, head_dim, head_dim_v
        )
        self._library = _writable_library(like)
        self._name = code_name(dtype)
        self._how = (rotate, seed)
        settings(self._name, "block", rotate, seed, None, None, False, 0)  # checks them
        shapes = self.shapes(
            self.pages, self.page_size, self.heads_kv, self.head_dim, self.head_dim_v
        )
        if storage is None:
            made = operands(self._library, like, [None, None, *shapes, None, None], self._name)
            storage = made[2], made[3], made[4]
        else:
            self._check_storage(storage, shapes, like)
        self.k, self.v, self.key_scale = storage
        slots = integer(slots, "slots", 0)
        open_shape = slots, BLOCK, self.heads_kv
        self._open_k = self._library.empty(like, (*open_shape, self.head_dim))
        self._open_v = self._library.empty(like, (*open_shape, self.head_dim_v))

    @staticmethod
    def shapes(
        pages: int, page_size: int, heads_kv: int, head_dim: int, head_dim_v: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of k and v, in elements of 8 bits, and of key_scale, in float32."""
        pages, page_size, heads_kv, head_dim, head_dim_v = _sizes(
            pages, page_size, heads_kv, head_dim, head_dim_v
        )
        return (
            (pages, page_size, heads_kv, -(-head_dim // BLOCK) * BLOCK),
            (pages, heads_kv, head_dim_v, page_size),
            (pages * heads_kv * page_size // BLOCK + 8, 4),
        )

    def write(
        self,
        k: Array,
        v: Array,
        block_table: Array,
        first_keys: Array = None,
        *,
        seqused_k: Array = None,
        cu_seqlens_k: Array = None,
        rotary_cos: Array = None,
        rotary_sin: Array = None,
        rotary_interleaved: bool = False,
        first_position: int = 0,
    ) -> None:
        """Quantise keys and values into whole blocks of 32 keys; everything else stays.

        k: (batch, seqlen, heads_kv, head_dim), or with cu_seqlens_k packed (total, heads_kv,
            head_dim); v: as k, with head_dim_v
        block_table: (batch, pages of a sequence) int32: where each sequence's keys lie
        first_keys: (batch) int32, multiples of 32: key j of a sequence is its key first_keys + j;
            default 0
        seqused_k: (batch) int32: only the first so many keys of a sequence count
        rotary_cos, rotary_sin, rotary_interleaved: turn k first, as quantize_fp8 does; key j stands
            at first_position + first_keys + j. On a device plans are kept by where the tables are:
            leave them there

        No two sequences of one call may write to one block of 32 keys: which would win is not said.
        A last block may be short; behind its keys v is zero. To let it grow, write it again from
        its beginning: append() does.
        """
        k, v = self._keys_and_values(k, v, cu_seqlens_k)
        library = self._library
        cu = self._cumulative(cu_seqlens_k, "cu_seqlens_k")
        batch = k.shape[0] if cu is None else len(cu) - 1
        table = self._table(block_table, batch)
        used, first = (
            None if numbers is None else self._one_each(numbers, name, batch)
            for numbers, name in ((seqused_k, "seqused_k"), (first_keys, "first_keys"))
        )
        how = settings(
            self._name, "block", *self._how, rotary_cos, rotary_sin, rotary_interleaved,
            first_position,
        )
        if 0 in k.shape:
            return
        # A call has queries; these are not quantised.
        q = library.empty(k, (batch, 1, self.heads_kv, self.head_dim))
        try:
            with current(library, self.k):
                call = call_of(library, q, k, v, (None, cu, None, used), None)
                plan = _native.plan_quantize(
                    call, how, pages=self.pages, page_size=self.page_size
                )
                plan.run(
                    call, [None, None, self.k, self.v, self.key_scale, None, None], table, first,
                    workspace_of(library, q, plan),
                )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise with_names(error, {"q": "k"}) from None

    def append(
        self,
        k: Array,
        v: Array,
        block_table: Array,
        cache_seqlens: Array,
        slots: Array = None,
        *,
        seqused_k: Array = None,
        rotary_cos: Array = None,
        rotary_sin: Array = None,
        rotary_interleaved: bool = False,
        first_position: int = 0,
    ) -> Array:
        """Add keys to sequences that began with append(); returns (batch) int32, the new lengths.

        k, v, block_table, seqused_k, rotary_*: as write(); k is (batch, seqlen, ...)
        cache_seqlens: (batch) int32: keys of each sequence so far, 0 for a new one
        slots: (batch) int32, no two alike: which slot keeps the last, short block of each sequence
            in the dtype of k; default 0, 1, ...

        On a device nothing waits, and a graph can capture it, where the table, lengths and slots
        are on the device already.
        """
        k, v = self._keys_and_values(k, v, None)
        for name, tensor in (("k", k), ("v", v)):
            if tensor.dtype != self._open_k.dtype:
                raise ValueError(
                    f"{name} has dtype {tensor.dtype}; it must be {self._open_k.dtype}, that of "
                    "`like`, in which short blocks are kept"
                )
        np = _namespace(self._open_k)
        batch, rows = k.shape[:2]
        table = self._table(block_table, batch)
        lengths, added, slots = self._places(cache_seqlens, seqused_k, slots, batch, rows)
        positions = _positions(rotary_cos, first_position)
        self._check_places(lengths, added, slots, rows, table.shape[1] * self.page_size, positions)
        inside = lengths % BLOCK
        first = lengths - inside
        sequence, row = self._column(batch), self._column(BLOCK + rows).reshape(1, -1)
        new = inside.reshape(-1, 1) + row[:, :rows]
        end = lengths + added
        kept = (end - end % BLOCK - first).reshape(-1, 1) + row[:, :BLOCK]
        kept = kept.clip(0, BLOCK + rows - 1)
        steps = []
        for source, blocks in ((k, self._open_k), (v, self._open_v)):
            step = self._library.empty(blocks, (batch, BLOCK + rows, *blocks.shape[2:]))
            step[:, :BLOCK] = blocks[slots]
            step[sequence, new] = np.asarray(source)
            steps.append(step)
        # Tables may end where the keys do.
        bound = BLOCK + rows if positions is None else max(min(BLOCK + rows, positions), 1)
        self.write(
            *(step[:, :bound] for step in steps), table, first, seqused_k=inside + added,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
            first_position=first_position,
        )
        for step, blocks in zip(steps, (self._open_k, self._open_v), strict=True):
            blocks[slots] = step[sequence, kept]
        return end

    def queries(
        self,
        q: Array,
        *,
        cu_seqlens_q: Array = None,
        softmax_scale: float | None = None,
        cache_seqlens: Array = None,
        rotary_cos: Array = None,
        rotary_sin: Array = None,
        rotary_interleaved: bool = False,
        first_position: int = 0,
    ) -> Queries:
        """q in 8 bits, rotated as the keys are: (q, q_descale, softmax_scale) to pass on.

        q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q packed
        softmax_scale: default 1 / sqrt(head_dim), of the head dimension before it is padded
        rotary_cos, rotary_sin, rotary_interleaved: turn q first. The last query of a sequence
            stands at first_position + cache_seqlens - 1, beside its last key
        cache_seqlens: (batch) int32: keys of each sequence, which rotary_cos needs
        """
        q = self._checked(q, "q", self.head_dim, cu_seqlens_q, heads=False)
        library = self._library
        if rotary_cos is not None and cache_seqlens is None:
            raise ValueError("cache_seqlens is None; rotary_cos needs to know where queries stand")
        softmax_scale = (
            self.head_dim**-0.5 if softmax_scale is None else real(softmax_scale, "softmax_scale")
        )
        cu = self._cumulative(cu_seqlens_q, "cu_seqlens_q")
        batch = q.shape[0] if cu is None else len(cu) - 1
        used = (
            None if cache_seqlens is None else self._one_each(cache_seqlens, "cache_seqlens", batch)
        )
        how = settings(
            self._name, "block", *self._how, rotary_cos, rotary_sin, rotary_interleaved,
            first_position,
        )
        # A call has keys: as many as there are positions, of which none is read.
        positions = _positions(rotary_cos, first_position)
        k = _repeated(library.empty(q, (batch, 1, 1, self.head_dim)), max(positions or 1, 1))
        lengths = cu, None, None, None if rotary_cos is None else used
        try:
            with current(library, self.k):
                call = call_of(library, q, k, k, lengths, softmax_scale)
                plan = _native.plan_quantize(call, how)
                shapes = [*plan.shapes[:2], None, None, None, None, None]
                made = operands(library, q, shapes, self._name)
                plan.run(call, made, workspace=workspace_of(library, q, plan))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise with_names(error, {"seqused_k": "cache_seqlens", "k": "rotary_cos"}) from None
        codes = made[0] if len(q.shape) == 4 else made[0][0]
        return Queries(library.finish(codes, q), library.finish(made[1], q), softmax_scale)

    def _check_storage(
        self, storage: tuple[Array, ...], shapes: tuple[tuple[int, ...], ...], like: Array
    ) -> None:
        if not isinstance(storage, (tuple, list)):
            raise TypeError(
                f"storage is a {type(storage).__name__}; it must hold k, v and key_scale"
            )
        if len(storage) != 3:
            raise ValueError(f"storage holds {len(storage)} tensors; it must hold k, v, key_scale")
        names = self._name, value_name(self._name), "float32"
        for which, tensor, shape, dtype in zip(
            ("k", "v", "key_scale"), storage, shapes, names, strict=True
        ):
            which = f"storage's {which}"
            if library_of(tensor, which) is not self._library:
                raise TypeError(
                    f"{which} is a {type(tensor).__name__} but `like` is a {type(like).__name__}"
                )
            if self._library.device(tensor) != self._library.device(like):
                raise ValueError(f"{which} is not on the device of `like`; it must be")
            name = str(tensor.dtype).removeprefix("torch.")
            if tuple(tensor.shape) != shape or name != dtype:
                raise ValueError(
                    f"{which} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; it must be "
                    f"{shape} in {dtype}"
                )
            if not _is_contiguous(tensor):
                raise ValueError(f"{which} is not contiguous; it must be")
            if not _libraries.is_torch(tensor) and not tensor.flags.writeable:
                raise TypeError(f"{which} is read-only; it is written to")

    def _keys_and_values(self, k: Array, v: Array, cu_seqlens: Array) -> tuple[Array, Array]:
        """Both as _checked(), and of the same sequences."""
        k = self._checked(k, "k", self.head_dim, cu_seqlens)
        v = self._checked(v, "v", self.head_dim_v, cu_seqlens)
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"v has shape {tuple(v.shape)}; beside k of {tuple(k.shape)} it must be "
                f"{(*k.shape[:-1], self.head_dim_v)}"
            )
        return k, v

    def _checked(
        self, x: Array, name: str, head_dim: int, cu_seqlens: Array, heads: bool = True
    ) -> Array:
        """Rows that fit the pages, without the graph of torch's gradients: codes have none, and
        what append() keeps would keep the graph as well."""
        library = not_quantized(x, name)
        if library is not self._library:
            raise TypeError(
                f"{name} is a {type(x).__name__} but the pages hold a {type(self._open_k).__name__}"
            )
        if library.device(x) != library.device(self._open_k):
            raise ValueError(f"{name} is not on the device of the pages; it must be")
        rank = 4 if cu_seqlens is None else 3
        right = "heads" if not heads else self.heads_kv
        if (
            len(x.shape) != rank
            or x.shape[-1] != head_dim
            or (heads and x.shape[-2] != self.heads_kv)
        ):
            first = "batch, seqlen" if rank == 4 else "total"
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; beside these pages it must be ({first}, "
                f"{right}, {head_dim})"
            )
        return x.detach() if _libraries.is_torch(x) else x

    def _column(self, count: int) -> Array:
        """(count, 1): 0, 1, ... to index with."""
        return _index(host_int32(range(count), self._open_k)).reshape(-1, 1)

    def _cumulative(self, cu_seqlens: Array, name: str) -> Array:
        if cu_seqlens is None:
            return None
        numbers = host_int32(cu_seqlens, self.k, name)
        if len(numbers.shape) != 1 or not len(numbers):
            raise ValueError(
                f"{name} has shape {tuple(numbers.shape)}; it must be (batch + 1,), where each "
                "sequence begins and the last one ends"
            )
        return numbers

    def _table(self, block_table: Array, batch: int) -> Array:
        table = host_int32(_given(block_table, "block_table"), self.k, "block_table")
        if len(table.shape) != 2 or table.shape[0] != batch:
            raise ValueError(
                f"block_table has shape {tuple(table.shape)}; it must be ({batch}, pages of a "
                "sequence)"
            )
        return table

    def _one_each(self, numbers: Array, name: str, batch: int) -> Array:
        numbers = host_int32(numbers, self.k, name)
        if tuple(numbers.shape) != (batch,):
            raise ValueError(
                f"{name} has shape {tuple(numbers.shape)}; it must be ({batch},), one for each "
                "sequence"
            )
        return numbers

    def _places(
        self, cache_seqlens: Array, seqused_k: Array, slots: Array, batch: int, rows: int
    ) -> tuple[Array, Array, Array]:
        """Lengths, how many keys are new, and slots, to count and to index with."""
        lengths = self._one_each(_given(cache_seqlens, "cache_seqlens"), "cache_seqlens", batch)
        if seqused_k is None:
            seqused_k = same_int32(rows, batch, self._open_k)
        added = self._one_each(seqused_k, "seqused_k", batch)
        slots = self._one_each(range(batch) if slots is None else slots, "slots", batch)
        return lengths, added, _index(slots)

    def _check_places(
        self, lengths: Array, added: Array, slots: Array, rows: int, room: int,
        positions: int | None,
    ) -> None:
        """rows: of k; room: keys that a row of block_table has pages for; positions: of rotary
        tables, None without them."""
        count = self._open_k.shape[0]
        if len(slots) > count:
            raise ValueError(
                f"slots holds {len(slots)} numbers, but these pages were made with slots={count}"
            )
        if self._library.device(self._open_k) is not None:
            return  # the values are the caller's word
        slots = [int(slot) for slot in slots]
        if len(set(slots)) != len(slots) or not all(0 <= slot < count for slot in slots):
            raise ValueError(
                f"slots holds {slots}; they must differ and lie in 0..{count - 1}"
            )
        for entry, (length, more) in enumerate(zip(lengths, added, strict=True)):
            length, more = int(length), int(more)
            if length < 0:
                raise ValueError(
                    f"cache_seqlens is {length} at entry {entry}; it must not be negative"
                )
            if not 0 <= more <= rows:
                raise ValueError(
                    f"seqused_k is {more} at entry {entry}; it must lie in 0..{rows}, the keys of "
                    "a sequence of k"
                )
            for most, what in (
                (room, "a row of block_table has room for"),
                (positions, "behind first_position rotary_cos has rows for"),
            ):
                if most is not None and length + more > most:
                    raise ValueError(
                        f"cache_seqlens is {length} at entry {entry}, where {more} keys are added, "
                        f"but {what} {most}"
                    )


def _sizes(
    pages: int, page_size: int, heads_kv: int, head_dim: int, head_dim_v: int | None
) -> tuple[int, int, int, int, int]:
    """The same as integers of Python's, which do not overflow; refused where no pool has them."""
    page_size = integer(page_size, "page_size", 1)
    if page_size % BLOCK:
        raise ValueError(
            f"page_size is {page_size}; it must be a multiple of {BLOCK}, since as many keys share "
            "scales"
        )
    pages = integer(pages, "pages", 1, 2**31 - 1)
    heads_kv = integer(heads_kv, "heads_kv", 1)
    head_dim = integer(head_dim, "head_dim", 1, 256)
    if head_dim_v is None:
        return pages, page_size, heads_kv, head_dim, head_dim
    return pages, page_size, heads_kv, head_dim, integer(head_dim_v, "head_dim_v", 1, 256)


def _writable_library(like: Array) -> Library:
    """Of pages that are written to and hold float8: jax's arrays are constants, and cupy has no
    such dtype."""
    library = not_quantized(like, "like")
    if not _libraries.is_torch(like) and library is not _libraries.Numpy:
        raise TypeError(
            f"like is a {type(like).__name__} of {type(like).__module__.split('.')[0]}; quantised "
            "pages are tensors of torch or arrays of numpy"
        )
    return library


def _is_contiguous(tensor: Array) -> bool:
    if _libraries.is_torch(tensor):
        return tensor.is_contiguous()
    return tensor.flags.c_contiguous


def _given(argument: Any, name: str) -> Any:
    if argument is None:
        raise TypeError(f"{name} is None; it says where keys go")
    return argument


def _positions(rotary_cos: Array, first_position: int) -> int | None:
    """Keys of a sequence that a rotary table has angles for."""
    if rotary_cos is None:
        return None
    library_of(rotary_cos, "rotary_cos")
    if len(rotary_cos.shape) != 2:
        raise ValueError(
            f"rotary_cos has shape {tuple(rotary_cos.shape)}; it must be (positions, rotary_dim / "
            "2)"
        )
    first_position = integer(first_position, "first_position", 0, 2**31 - 1)
    return max(rotary_cos.shape[0] - first_position, 0)


def _index(numbers: Array) -> Array:
    return numbers.long() if _libraries.is_torch(numbers) else numbers


def _namespace(like: Array) -> Any:
    if _libraries.is_torch(like):
        import torch as namespace
    else:
        import numpy as namespace
    return namespace


def _repeated(x: Array, rows: int) -> Array:
    """(batch, 1, heads, head_dim), the one row seen `rows` times."""
    shape = x.shape[0], rows, x.shape[2], x.shape[3]
    return _namespace(x).broadcast_to(x, shape)
