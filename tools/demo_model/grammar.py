"""The stories that the demo model learns: random texts of the grammar in stories.txt.

A story is an opening, a plot and a closing. Each of their steps gives one sentence, chosen among
several. A slot of a sentence is filled on its first use and keeps its word to the end of the story,
so a reader has to remember names, pronouns, colours, places and feelings.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")
Step = list[str]

_SLOT: Final = re.compile(r"\{(\w+)\}")
_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeiou])")

# slots that take their words from the list of another slot
_LIST_OF: Final = {"elsewhere": "hiding", "other_colour": "colour", "friend_kind": "animal"}
# slots that must differ from another slot
_UNLIKE: Final = {
    **{"elsewhere": "hiding", "hiding": "elsewhere", "friend_kind": "kind"},
    **{"other_colour": "colour", "colour": "other_colour"},
}


class Story(NamedTuple):
    """A text, and the entropy of the random choices that made it, in nats."""

    text: str
    nats: float


class Grammar(NamedTuple):
    """What stories.txt holds."""

    words: dict[str, list[str]]
    places: dict[str, list[str]]
    plots: dict[str, list[Step]]


def read_grammar() -> Grammar:
    """Return the grammar in stories.txt."""
    text = Path(__file__).with_name("stories.txt").read_text(encoding="utf-8")
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            sections[list(sections)[-1]].append(line)
    words, places = (
        {name: _options(rest) for name, _, rest in (line.partition(":") for line in lines)}
        for lines in (sections.pop("words"), sections.pop("places"))
    )
    plots: dict[str, list[Step]] = {}
    for name, lines in sections.items():
        steps = (plots[line[1:]] if line[0] == "@" else [_options(line)] for line in lines)
        plots[name] = list(itertools.chain.from_iterable(steps))
    return Grammar(words, places, plots)


def _options(line: str) -> list[str]:
    return [option.strip() for option in line.split("|")]


GRAMMAR: Final = read_grammar()
NAMES: Final = [
    {"hero": name, "he": he, "him": him, "his": his, "child": child}
    for child, he, him, his in (("boy", "he", "him", "his"), ("girl", "she", "her", "her"))
    for name in GRAMMAR.words[child]
]


class _Teller:
    """One story in the making."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bound: dict[str, str] = {}
        self.nats = 0.0

    def choose(self, options: Sequence[T]) -> T:
        """Return one of the options, all equally likely, and add the entropy of the choice."""
        self.nats += math.log(len(options))
        return self._rng.choice(options)

    def tell(self, plot: list[Step]) -> list[str]:
        """Return one sentence of each step, without the empty ones."""
        sentences = [_SLOT.sub(self._fill, self.choose(step)) for step in plot]
        return [_ARTICLE.sub(r"\1n ", sentence) for sentence in sentences if sentence]

    def word(self, slot: str) -> str:
        """Return the word of a slot, chosen now unless it was before."""
        if slot not in self._bound:
            self._bound |= self._bind(slot)
        return self._bound[slot]

    def _fill(self, match: re.Match[str]) -> str:
        slot = match[1]
        word = self.word(slot.lower())
        return word if slot.islower() else word[0].upper() + word[1:]

    def _bind(self, slot: str) -> dict[str, str]:
        """Return words for a slot and for those that depend on the same choice."""
        if slot in NAMES[0]:
            return self.choose(NAMES)
        if slot in ("place", "at_place"):
            place = self.choose(list(GRAMMAR.places))
            return {"place": place, "at_place": f"{GRAMMAR.places[place][0]} the {place}"}
        if slot == "friend":
            options = [name["hero"] for name in NAMES if name["hero"] != self.word("hero")]
        elif slot == "kind":
            if not self.choose((True, False)):  # half of the heroes are children
                return {slot: self.word("child")}
            options = GRAMMAR.words["animal"]
        else:
            other = self._bound.get(_UNLIKE.get(slot, ""))
            options = [word for word in GRAMMAR.words[_LIST_OF.get(slot, slot)] if word != other]
        return {slot: self.choose(options)}


def stories(seed: int) -> Iterator[Story]:
    """Yield stories without end, always the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        teller = _Teller(rng)
        sentences = teller.tell(GRAMMAR.plots[teller.choose(("introduction", "departure"))])
        # every opening names the place
        _, *plots = GRAMMAR.places[teller.word("place")]
        for name in (teller.choose(plots), "closing"):
            sentences += teller.tell(GRAMMAR.plots[name])
        yield Story(" ".join(sentences), teller.nats)
