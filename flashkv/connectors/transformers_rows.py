"""Sequences of a batch, padded on the left, and the blocks that they are made of in a cache.

Invariants
 - a Row's tokens are those that the model computes, without padding; token i of the row lies in
   column `first_column + i` of the batch and of every layer of its cache, at position i;
 - a block's key tells all tokens of the row up to the block's end; a Span is read or written in one
   call, in place in the cache's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from flashkv.errors import MemoryViewError
from flashkv.geometry import MemoryView
from flashkv.identity import CHAIN_TOKENS
from flashkv.memory import Regions

if TYPE_CHECKING:
    from flashkv.namespace import Namespace

BLOCK_TOKENS: Final = CHAIN_TOKENS
# Each layer's K and V is memory of its own: [kv_head, token, dim], the tokens of a block in a row.
VIEW: Final = MemoryView("layer plane head token", regions=("layer", "plane"))


class Row(NamedTuple):
    """A sequence of the batch.

    number        of the row.
    first_column  columns of padding before its first token.
    ids           int32[tokens].
    """

    number: int
    first_column: int
    ids: npt.NDArray[np.int32]

    @property
    def end_column(self) -> int:
        """One past the column of its last token."""
        return self.first_column + self.ids.size


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[Row]:
    """Rows of int[tokens] or int[batch, tokens].

    attention_mask: of the same shape, 0 for padding. Raises MemoryViewError.
    """
    ids = _array(input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not len(ids) or (ids.size and ids.dtype.kind not in "iu"):
        raise MemoryViewError(
            "input_ids must be ints of one sequence, or of a batch of them",
            value=f"{ids.dtype}{list(ids.shape)}",
            limit="[tokens] or [batch, tokens]",
        )
    padding = np.zeros(len(ids), np.int64)
    if attention_mask is not None:
        padding = _left_padding(_array(attention_mask), ids.shape)
    return [
        Row(number, int(first), ids[number, int(first) :].astype(np.int32))
        for number, first in enumerate(padding)
    ]


def _left_padding(mask: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Columns of padding of each row. Raises MemoryViewError where it isn't all on the left."""
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != shape:
        raise MemoryViewError(
            "attention_mask has another shape than input_ids",
            value=list(mask.shape),
            limit=list(shape),
        )
    computed = mask != 0
    padding = shape[1] - computed.sum(axis=1)
    if (computed != (np.arange(shape[1]) >= padding[:, None])).any():
        raise MemoryViewError(
            "padding must be on the left",
            value=f"row {int(np.argmax((computed[:, :-1] > computed[:, 1:]).any(axis=1)))}",
            advice="Give the tokenizer padding_side='left'",
        )
    return np.asarray(padding, np.int64)


def _array(values: Any) -> npt.NDArray[Any]:
    plain = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    return np.asarray(plain)


class Span(NamedTuple):
    """Blocks of a row, one behind the other.

    keys          uint8[blocks, 32].
    first_column  of the first block's first token.
    tokens        of each block; fewer than BLOCK_TOKENS only where there is one block.
    parent        key of the block before the first; b"" at the row's beginning.
    """

    row: Row
    keys: npt.NDArray[np.uint8]
    first_column: int
    tokens: int
    parent: bytes


class Chains:
    """The blocks of rows in one namespace. salt: separates prefixes that must not meet."""

    def __init__(self, namespace: Namespace, salt: bytes) -> None:
        self._namespace = namespace
        self._salt = salt

    def keys(self, row: Row, blocks: int) -> npt.NDArray[np.uint8]:
        """Keys of a row's first blocks: uint8[blocks, 32]."""
        ids = row.ids[: blocks * BLOCK_TOKENS]
        return self._namespace.token_keys(ids, block_tokens=BLOCK_TOKENS, salt=self._salt)

    def until(self, rows: Sequence[Row], columns: int) -> list[Span]:
        """What fills all rows up to a column: of each row its whole blocks, then a part of one."""
        return [span for row in rows for span in self._until(row, columns)]

    def _until(self, row: Row, columns: int) -> Iterator[Span]:
        tokens = max(0, columns - row.first_column)
        whole, rest = divmod(tokens, BLOCK_TOKENS)
        keys = self.keys(row, whole + (rest > 0))
        if whole:
            yield _span(row, keys, 0, whole, BLOCK_TOKENS)
        if rest:
            yield _span(row, keys, whole, whole + 1, rest)

    def whole(self, rows: Sequence[Row], columns: int, restored: int = 0) -> list[Span]:
        """Of each row the whole blocks that end behind column `restored`, up to `columns`."""
        spans = []
        for row in rows:
            end = max(0, min(columns, row.end_column) - row.first_column) // BLOCK_TOKENS
            first = max(0, restored - row.first_column) // BLOCK_TOKENS
            if end > first:
                spans.append(_span(row, self.keys(row, end), first, end, BLOCK_TOKENS))
        return spans

    def put(self, tensors: Sequence[Any], span: Span) -> dict[str, Any]:
        """Arguments of the put that stores a span of whole blocks."""
        return {
            "keys": span.keys,
            "data": regions(tensors, span),
            "view": VIEW,
            "parents": [span.parent, *(key.tobytes() for key in span.keys[:-1])],
            "position": span.first_column - span.row.first_column,
        }


def _span(row: Row, keys: npt.NDArray[np.uint8], first: int, end: int, tokens: int) -> Span:
    """Blocks first to end of the chain whose keys are given."""
    parent = keys[first - 1].tobytes() if first else b""
    return Span(row, keys[first:end], row.first_column + first * BLOCK_TOKENS, tokens, parent)


def regions(tensors: Sequence[Any], span: Span) -> Regions:
    """The columns of a span in each tensor [row, head, column, dim], in place, as
    [head, block, token, dim].
    """
    shape = (len(span.keys), span.tokens)
    end = span.first_column + shape[0] * shape[1]
    columns = slice(span.first_column, end)
    blocked = [tensor[span.row.number, :, columns].unflatten(1, shape) for tensor in tensors]
    return Regions(blocked, row_axis=1)


def read_options(span: Span) -> dict[str, Any]:
    """Options of the get that fills a span."""
    part = None if span.tokens == BLOCK_TOKENS else (0, span.tokens)
    return {"view": VIEW, "token_range": part}
