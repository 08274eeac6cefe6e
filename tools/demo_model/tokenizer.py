"""The demo model's tokenizer: llama.cpp's SPM algorithm, in a few lines of Python.

A space is written as U+2581 and one is put before the text; then the adjacent pair whose union is
the best-scored piece is merged, the leftmost among equals, until none is left. A character that
is no piece becomes its UTF-8 bytes, one token each.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

SPACE: Final = "\u2581"

UNKNOWN: Final = 0
BOS: Final = 1
EOS: Final = 2
FIRST_BYTE: Final = 3

# Token types as GGUF counts them.
TYPE_NORMAL: Final = 1
TYPE_UNKNOWN: Final = 2
TYPE_CONTROL: Final = 3
TYPE_BYTE: Final = 6

_SPECIALS: Final = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
_SPECIAL_TYPES: Final = (TYPE_UNKNOWN, TYPE_CONTROL, TYPE_CONTROL, *[TYPE_BYTE] * 256)


class Tokenizer:
    """A vocabulary of special tokens, then the learned pieces, the best first."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.tokens: Final = (*_SPECIALS, *pieces)
        self.types: Final = (*_SPECIAL_TYPES, *[TYPE_NORMAL] * len(pieces))
        self.scores: Final = (*[0.0] * len(_SPECIALS), *(-float(i) for i in range(len(pieces))))
        self._ids: Final = {piece: len(_SPECIALS) + i for i, piece in enumerate(pieces)}
        self._encode_word = lru_cache(maxsize=65536)(self._encode_new_word)

    @classmethod
    def of_tokens(cls, tokens: Sequence[str]) -> "Tokenizer":
        """Return the tokenizer whose whole vocabulary, special tokens included, is this list."""
        if tuple(tokens[: len(_SPECIALS)]) != _SPECIALS:
            raise ValueError("the list does not begin with this tokenizer's special tokens")
        return cls(tokens[len(_SPECIALS) :])

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids, the beginning-of-sequence token first."""
        ids = [BOS]
        if text:
            for word in _words(SPACE + text.replace(" ", SPACE)):
                ids += self._encode_word(word)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, without control tokens and without the space put first."""
        raw = b"".join(self._bytes(token) for token in ids)
        return raw.decode("utf-8", errors="replace").removeprefix(" ")

    def _bytes(self, token: int) -> bytes:
        kind = self.types[token]
        if kind == TYPE_BYTE:
            return bytes([token - FIRST_BYTE])
        return self.tokens[token].replace(SPACE, " ").encode() if kind == TYPE_NORMAL else b""

    def _encode_new_word(self, word: str) -> tuple[int, ...]:
        parts = list(word)
        while (at := self._best_merge(parts)) is not None:
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(token for part in parts for token in self._ids_of_part(part))

    def _best_merge(self, parts: Sequence[str]) -> int | None:
        """Return where the pair to merge next begins, or None if no pair makes a piece."""
        found = [
            (self._ids[left + right], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in self._ids
        ]
        return min(found)[1] if found else None

    def _ids_of_part(self, part: str) -> tuple[int, ...]:
        if part in self._ids:
            return (self._ids[part],)
        return tuple(FIRST_BYTE + byte for byte in part.encode())


def _words(text: str) -> list[str]:
    """Return the text cut before every space mark: no learned piece reaches across one."""
    first, *others = text.split(SPACE)
    return [*([first] if first else []), *(SPACE + word for word in others)]
