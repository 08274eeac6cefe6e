"""The demo model's tokenizer: learns pieces by byte-pair merging, encodes as llama.cpp does."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

SPACE: Final = "\u2581"
BOS: Final = 1
EOS: Final = 2
FIRST_BYTE: Final = 3

_SPECIAL: Final = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
# as GGUF numbers them: unknown, control, control, byte …, normal
_SPECIAL_TYPES: Final = (2, 3, 3, *[6] * 256)
_NORMAL: Final = 1

# words and punctuation marks apart, so that no piece holds both
_WORD: Final = re.compile(f"{SPACE}?(?:[A-Za-z]+|[^A-Za-z{SPACE}])")


class Tokenizer:
    """A vocabulary of special tokens, then the learned pieces, the best first."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.tokens: Final = [*_SPECIAL, *pieces]
        self.types: Final = [*_SPECIAL_TYPES, *[_NORMAL] * len(pieces)]
        self.scores: Final = [*[0.0] * len(_SPECIAL), *(-float(i) for i in range(len(pieces)))]
        self._ids: Final = {piece: len(_SPECIAL) + i for i, piece in enumerate(pieces)}
        self._encode_word = lru_cache(maxsize=65536)(self._encode_new_word)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text with a space before it, beginning with BOS."""
        marked = SPACE + text.replace(" ", SPACE) if text else ""
        # no piece has a space inside
        words = re.findall(f"{SPACE}?[^{SPACE}]+|{SPACE}", marked)
        return [BOS, *(token for word in words for token in self._encode_word(word))]

    def _encode_new_word(self, word: str) -> list[int]:
        """Merge the adjacent pair whose union is the best piece, the leftmost of equals, until no
        union is a piece. A character that is not a piece becomes its UTF-8 bytes."""
        parts = list(word)
        while pairs := [
            (self._ids[left + right], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in self._ids
        ]:
            at = min(pairs)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        ids: list[int] = []
        for part in parts:
            known = self._ids.get(part)
            ids += [FIRST_BYTE + byte for byte in part.encode()] if known is None else [known]
        return ids


def learn_pieces(texts: Iterable[str], vocabulary: int) -> list[str]:
    """Return the pieces that fill a vocabulary: merges in the order learned, then characters.

    Raises ValueError if the texts have too few of them.
    """
    count = vocabulary - len(_SPECIAL)
    # a word's parts with spaces between them
    words = Counter(
        " ".join(word) for text in texts for word in _WORD.findall(SPACE + text.replace(" ", SPACE))
    )
    characters = sorted({part for word in words for part in word.split()})
    merges: dict[str, None] = {}
    while len(merges) + len(characters) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word.split()):
                pairs[pair] += times
        if not pairs:
            raise ValueError(f"the texts have only {len(merges) + len(characters)} pieces")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges["".join(best)] = None  # another pair may have made the same piece
        found = re.compile(rf"(?<!\S){re.escape(' '.join(best))}(?!\S)")
        merged: Counter[str] = Counter()
        for word, times in words.items():
            merged[found.sub("".join(best), word)] += times
        words = merged
    return [*merges, *characters]
