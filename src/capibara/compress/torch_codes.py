"""PyTorch modules with quantized weights of an archive.

:func:`coded_module` copies a module with its linear layers, embeddings and convolutions as :class:`CodedLinear`,
:class:`CodedEmbedding` and :class:`CodedConvolution`: codes and scales are buffers, which are decoded a slab at a
time inside the product, and again for the gradient of the inputs. On CPUs compiled code reads the codes if there are
few vectors. A convolution's weight is decoded for each call, and discarded afterwards. Scales and levels are stored
as integers with the bits of float32: ``module.half()`` and ``to(dtype)`` change the layer's compute dtype, but not
the codes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from capibara.compress.codecs.fixed import Parts
from capibara.compress.codecs.fixed_native import NativeExecutor
from capibara.compress.container.reader import Archive
from capibara.compress.formats import NumberFormat
from capibara.compress.models.adapters import put_tensor
from capibara.compress.models.numbers import torch_from_bits
from capibara.compress.stored_codes import exact_changes, stored_parts
from capibara.errors import MissingExtraError
from capibara.native.loading import open_library

try:
    import torch
    from torch import nn
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode
except ImportError:
    raise MissingExtraError("torch", "torch", "Running a quantized torch module") from None

__all__ = [
    "CodedConvolution",
    "CodedEmbedding",
    "CodedLinear",
    "CodedWeight",
    "coded_module",
    "decoded_module",
]

_SLAB = 1 << 21  # numbers that are made at a time
_FEW = 8  # vectors that the kernels multiply as they read codes, without making numbers of them first
# Numbers of a matrix: below, a thread may take longer to begin than one needs for it all.
_WORTH_THREADS = 1 << 25


@functools.cache
def _kernels() -> NativeExecutor | None:
    library, _ = open_library()
    return None if library is None else NativeExecutor(library)


def _is_traced() -> bool:
    """Whether a program is made of what runs now, or its operations are watched: values are not to be asked for."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or is_in_torch_dispatch_mode()
    )


def _bits(values: np.ndarray) -> torch.Tensor:
    """float32 as int32, which ``to(dtype)`` leaves alone."""
    return torch.tensor(np.ascontiguousarray(values, np.float32).view(np.int32))


class CodedPiece(nn.Module):
    """Rows that were stored together.

    Buffers: ``codes`` int8 [rows, length] or uint8 [rows, ceil(length / 2)]; ``scale_codes`` uint8 [rows, groups];
    ``table`` [256], ``levels``, ``change`` the bits of float32; ``row`` and ``column`` of values that are kept exactly.
    """

    codes: torch.Tensor
    scale_codes: torch.Tensor
    table: torch.Tensor
    levels: torch.Tensor | None
    row: torch.Tensor
    column: torch.Tensor
    change: torch.Tensor

    def __init__(self, parts: Parts, form: NumberFormat) -> None:
        super().__init__()
        # torch.tensor, not from_numpy: that gives empty arrays strides of 0, which torch.export cannot save.
        row, column, change = exact_changes(parts, form)
        self.length, self.group, self.rows = parts.length, parts.group, len(parts.codes)
        for name, value in (
            ("codes", torch.from_numpy(np.array(parts.codes))),
            ("scale_codes", torch.from_numpy(np.array(parts.scale_codes))),
            ("table", _bits(parts.table)),
            ("levels", None if parts.levels is None else _bits(parts.levels)),
            ("row", torch.tensor(row.astype(np.int32))),
            ("column", torch.tensor(column.astype(np.int32))),
            ("change", _bits(change)),
        ):
            self.register_buffer(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        table = state_dict.get(f"{prefix}table")
        # Earlier versions kept only the scales that occur.
        if isinstance(table, torch.Tensor) and table.ndim == 1 and 0 < len(table) < 256:
            state_dict[f"{prefix}table"] = torch.cat([table, table[-1:].expand(256 - len(table))])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def take(self, where: Any) -> torch.Tensor:
        """Rows as float32 [count, length], without the exact values."""
        codes, scale_codes = (
            # Strict about what is out of range, also in a program that was traced.
            t[where] if isinstance(where, slice) else t.index_select(0, where)
            for t in (self.codes, self.scale_codes)
        )
        scales = self.table.view(torch.float32)[scale_codes.int()]
        if self.levels is None:
            values = codes.float()
        else:
            # A byte is two numbers: one lookup makes both.
            levels, byte = self.levels.view(torch.float32), torch.arange(256, device=codes.device)
            pairs = torch.stack([levels[byte & 15], levels[byte >> 4]], -1)
            values = nn.functional.embedding(codes.int(), pairs).flatten(-2)[..., : self.length]
        whole = self.length // self.group
        cut = whole * self.group
        values[..., :cut].unflatten(-1, (whole, self.group)).mul_(scales[..., :whole, None])
        if cut < self.length:
            values[..., cut:].mul_(scales[..., whole:])
        return values

    def numbers(self, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` to ``last`` as float32 [count, length]."""
        values = self.take(slice(first, last))
        if len(self.row):
            inside = (self.row >= first) & (self.row < last)
            place = (self.row[inside].long() - first, self.column[inside].long())
            values.index_put_(place, self.change.view(torch.float32)[inside], accumulate=True)
        return values

    def by_kernel(self, x: torch.Tensor, across: bool) -> torch.Tensor | None:
        """The product of few vectors in compiled code, which reads codes; ``None`` if it is not possible.

        The time is then that of reading the matrix, and codes are a quarter or an eighth of it. Tracers and observers
        of operations must see PyTorch's own instead.
        """
        buffers = [b for b in self.buffers() if b.dtype == torch.uint8 or b.dtype == torch.int8]
        if (
            _is_traced()
            or type(x) is not torch.Tensor
            or x.dtype != torch.float32
            or not 0 < len(x) <= _FEW
            or self.codes.numel() == 0
            or any(type(b) is not torch.Tensor or b.device.type != "cpu" for b in (x, *self.buffers()))
            or not all(b.is_contiguous() for b in buffers)
            or (kernels := _kernels()) is None
        ):
            return None
        table = self.table.view(torch.float32)
        # A code beyond the table finds NaN.
        table = nn.functional.pad(table, (0, 256 - len(table)), value=torch.nan).numpy()
        out = torch.from_numpy(
            kernels.multiply(
                x.detach().contiguous().numpy(),
                self.codes.numpy(),
                self.scale_codes.numpy(),
                table,
                None if self.levels is None else self.levels.view(torch.float32).contiguous().numpy(),
                self.group,
                self.length,
                across=across,
                threads=torch.get_num_threads() if self.rows * self.length >= _WORTH_THREADS else 1,
            )
        )
        if len(self.row):
            change = self.change.view(torch.float32)
            taken, put = (self.row, self.column) if across else (self.column, self.row)
            out.index_add_(1, put, x.detach().index_select(1, taken) * change)
        return out

    def slabs(self) -> Iterator[tuple[int, int]]:
        step = max(_SLAB // max(self.length, 1), 1)
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)


class _Product(torch.autograd.Function):
    """``x [n, length] @ W.T``, or ``across`` ``x [n, rows] @ W``; W is made a slab at a time, in both passes."""

    @staticmethod
    def forward(x: torch.Tensor, piece: CodedPiece, across: bool) -> torch.Tensor:
        if (found := piece.by_kernel(x, across)) is not None:
            return found
        if across:
            out = x.new_zeros(len(x), piece.length)
            for first, last in piece.slabs():
                out += x[:, first:last] @ piece.numbers(first, last).to(x.dtype)
            return out
        parts = [x @ piece.numbers(first, last).to(x.dtype).T for first, last in piece.slabs()]
        return torch.cat(parts, 1) if parts else x.new_zeros(len(x), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.piece, ctx.across = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Product.apply(grads[0], ctx.piece, not ctx.across), None, None


class CodedWeight(nn.Module):
    """A quantized weight.

    Attributes:
      shape: of the weight.
      turned: groups run along the first axis of the weight; pieces are then runs of its rows, transposed.
      dtype: the original weight's, until ``to(dtype)``.
    """

    def __init__(
        self, parts: list[Parts], form: NumberFormat, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.turned = torch.Size(shape), parts[0].turned
        self.pieces = nn.ModuleList(CodedPiece(p, form) for p in parts)
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(b.nbytes for b in self.buffers())

    def _parts(self) -> list[CodedPiece]:
        return list(self.pieces)  # type: ignore[arg-type]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., in] @ W.T`` for a weight [out, in], as in ``functional.linear``."""
        flat = x.reshape(-1, self.shape[1])
        if self.turned:
            # Pieces hold W.T of some outputs: [in, outputs].
            parts = [_Product.apply(flat, p, True) for p in self._parts()]
        else:
            parts = [_Product.apply(flat, p, False) for p in self._parts()]
        return torch.cat(parts, 1).reshape(*x.shape[:-1], self.shape[0])

    def dense(self) -> torch.Tensor:
        """The decoded weight [*shape] of :attr:`dtype`, decoded at each call."""
        found = [p.numbers(0, p.rows).to(self.dtype) for p in self._parts()]
        return torch.cat([f.T for f in found] if self.turned else found).reshape(self.shape)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows [..., features] of a weight [count, features], looked up before decoding."""
        flat, at, out = indices.reshape(-1), 0, None
        if not _is_traced() and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.shape[0]:
            raise IndexError(
                f"indices: from {int(flat.min())} to {int(flat.max())}, expected 0 to {self.shape[0] - 1}"
            )
        parts = self._parts()
        for p in parts:
            found = p.take(flat if len(parts) == 1 else (flat - at).clamp(0, p.rows - 1))
            out = found if out is None else torch.where((flat >= at)[:, None], found, out)
            at += p.rows
        assert out is not None
        return out.to(self.dtype).reshape(*indices.shape, self.shape[1])

    @property
    def has_rows(self) -> bool:
        """Whether :meth:`rows` works."""
        return not self.turned and not any(len(p.row) for p in self._parts())


class _Coded(nn.Module):
    """A layer with a quantized weight."""

    def __init__(self, weight: CodedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.coded = weight
        self.bias = bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight as numbers, made each time it is asked for; what is changed in it changes nothing."""
        return self.coded.dense()

    def extra_repr(self) -> str:
        shape = "×".join(map(str, self.coded.shape))
        return f"{shape} in {self.coded.nbytes:,} bytes of codes, bias={self.bias is not None}"


class CodedLinear(_Coded):
    """``nn.Linear`` with a quantized weight; gradients reach its inputs and its bias."""

    def __init__(self, layer: nn.Linear, weight: CodedWeight) -> None:
        super().__init__(weight, layer.bias)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = self.coded.product(input)
        return out if self.bias is None else out + self.bias

    def decoded(self) -> nn.Module:
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        return _with_weight(made, self)


class CodedEmbedding(_Coded):
    """``nn.Embedding`` with a quantized table."""

    def __init__(self, layer: nn.Embedding, weight: CodedWeight) -> None:
        super().__init__(weight, None)
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx = layer.padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.coded.rows(input)

    def decoded(self) -> nn.Module:
        made = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        return _with_weight(made, self)


class CodedConvolution(_Coded):
    """``nn.Conv1d``, ``Conv2d`` or ``Conv3d`` with a quantized weight, decoded at each call."""

    def __init__(self, layer: Any, weight: CodedWeight) -> None:
        super().__init__(weight, layer.bias)
        self.layer = copy.copy(layer)  # its settings and its way to compute, without parameters
        self.layer._parameters = {"weight": None, "bias": None}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layer._conv_forward(input, self.coded.dense(), self.bias)

    def decoded(self) -> nn.Module:
        return _with_weight(copy.copy(self.layer), self)


def _with_weight(made: Any, layer: _Coded) -> nn.Module:
    made._parameters = {"weight": nn.Parameter(layer.coded.dense()), "bias": layer.bias}
    if isinstance(made, nn.Embedding):
        del made._parameters["bias"]
    made.train(layer.training)
    return made


_KINDS: dict[type, Callable[[Any, CodedWeight], _Coded]] = {
    nn.Linear: CodedLinear,
    nn.Embedding: CodedEmbedding,
    nn.Conv1d: CodedConvolution,
    nn.Conv2d: CodedConvolution,
    nn.Conv3d: CodedConvolution,
}


def _problem(layer: nn.Module, leaf: str, weight: CodedWeight) -> str | None:
    """Why a layer cannot run quantized."""
    kind = type(layer)
    if leaf != "weight" or kind not in _KINDS:
        return f"the {leaf} of {kind.__name__}, which runs with numbers"
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    ):
        return "an Embedding that changes its table"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return f"{kind.__name__} with hooks"
    return None


def coded_module(
    module: nn.Module, archive: Archive, tied: Mapping[str, str]
) -> tuple[nn.Module, list[str], dict[str, str]]:
    """Copy a module with the weights of an archive, quantized where possible.

    Args:
      module: with any values; it may be on the device ``"meta"``.
      archive: contains its tensors.
      tied: second names of tensors.

    Returns:
      The copy; the names of quantized weights; and the reasons for the decoded ones.
    """
    names = [n for n, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)]
    tensors = module.state_dict(keep_vars=True)
    coded: dict[str, CodedWeight] = {}
    why: dict[str, str] = {}
    same = {name: archive[name].same_as or name for name in names}
    for name in names:
        first = same[name]
        if first in why:
            continue
        if first not in coded:
            parts = stored_parts(archive, name)
            if isinstance(parts, str):
                why[first] = parts
                continue
            entry = archive[archive[name].same_as or name]
            coded[first] = CodedWeight(parts, entry.format, entry.shape, tensors[name].dtype)
        path, _, leaf = name.rpartition(".")
        if (problem := _problem(module.get_submodule(path), leaf, coded[first])) is not None:
            why[first] = problem
    # One tensor under several names is either codes for all of them or numbers for all of them.
    for first in why:
        coded.pop(first, None)
    quantized = [n for n in names if same[n] in coded]
    # Weights that become codes are not copied.
    memo: dict[int, Any] = {id(tensors[n]): nn.Parameter(torch.empty(0), False) for n in quantized}
    made = copy.deepcopy(module, memo)
    for name in names:
        path, _, leaf = name.rpartition(".")
        if same[name] in coded:
            layer = made.get_submodule(path)
            parent, _, child = path.rpartition(".")
            new = _KINDS[type(layer)](layer, coded[same[name]])
            new.train(layer.training)
            if not path:
                made = new
            else:
                made.get_submodule(parent)._modules[child] = new
    put_tensors(made, archive, [n for n in names if same[n] not in coded], tied)
    return made, quantized, {n: why[same[n]] for n in names if same[n] in why}


def put_tensors(module: nn.Module, archive: Archive, names: Iterable[str], tied: Mapping[str, str]) -> None:
    """Load the values of an archive into a module."""
    tensors = module.state_dict(keep_vars=True)
    for name in names:
        entry, first = archive[name], tied.get(name)
        if first is not None and not tensors[name].is_meta:
            continue
        if first is not None:
            put_tensor(module, name, module.state_dict(keep_vars=True)[first], module.get_parameter(first))
            continue
        value = torch_from_bits(archive.read(name).reshape(-1), entry.format, entry.shape)
        if tensors[name].is_meta:
            put_tensor(module, name, value)
        else:
            with torch.no_grad():
                tensors[name].copy_(value)


def decoded_module(module: nn.Module) -> nn.Module:
    """Copy a module with decoded weights, restoring the original kinds of layers."""
    pieces = [part for part in module.modules() if isinstance(part, CodedPiece)]
    memo: dict[int, Any] = {id(buffer): buffer for piece in pieces for buffer in piece.buffers()}
    made = copy.deepcopy(module, memo)
    dense: dict[int, nn.Parameter] = {}  # of a tied weight there is one

    @functools.cache
    def new(layer: Any) -> nn.Module:
        out: Any = layer.decoded()
        out._parameters["weight"] = dense.setdefault(id(layer.coded), out._parameters["weight"])
        return out

    if isinstance(made, _Coded):
        return new(made)
    for parent in list(made.modules()):
        for child, layer in parent._modules.items():
            if isinstance(layer, _Coded):
                parent._modules[child] = new(layer)
    return made
