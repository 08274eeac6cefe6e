"""A grammar of little stories: one seed in, as many stories as you like out.

A story is a plot's sentences, each chosen among several, whose slots are filled on first use and
then kept. So a name, its pronoun, a colour, a place and a feeling must be remembered to the end.
"""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tools.demo_model.frame import CLOSINGS, DEPARTURES, INTRODUCTIONS, Plot
from tools.demo_model.lexicon import ANIMALS, NAMES, PLACES, TWINS, WORDS, Name
from tools.demo_model.settings import PLOTS_AT

T = TypeVar("T")

_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")

# What names each slot that is bound together with others.
_LEADERS: Final[dict[str, str]] = {
    **dict.fromkeys(("hero", "he", "him", "his"), "hero"),
    **dict.fromkeys(("place", "at_place"), "place"),
}


@dataclass(frozen=True)
class Story:
    """A finished story: its sentences, and what its random choices cost together, in nats."""

    sentences: tuple[str, ...]
    nats: float

    @property
    def text(self) -> str:
        """The story as one paragraph."""
        return " ".join(self.sentences)


class _Teller:
    """One story in the making."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bound: dict[str, str] = {}
        self.nats = 0.0

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options, all equally likely, and count what the choice costs."""
        self.nats += math.log(len(options))
        return self._rng.choice(options)

    def sentences(self, plot: Plot) -> list[str]:
        """Return one sentence of each step, those that are not empty."""
        told = [self._sentence(self.pick(step)) for step in plot]
        return [sentence for sentence in told if sentence]

    def word(self, slot: str) -> str:
        """Return what fills a slot, chosen now if it was not before."""
        if slot not in self._bound:
            self._bind(_LEADERS.get(slot, slot))
        return self._bound[slot]

    def _sentence(self, template: str) -> str:
        """Return the template with its slots filled and its articles put right."""
        return _ARTICLE.sub(r"\1n ", _SLOT.sub(self._fill, template))

    def _fill(self, match: re.Match[str]) -> str:
        slot = match.group(1)
        word = self.word(slot.lower())
        return word if slot.islower() else word[0].upper() + word[1:]

    def _bind(self, leader: str) -> None:
        if leader == "hero":
            self._bind_hero()
        elif leader == "place":
            place = self.pick(PLACES)
            self._bound |= {
                "place": place.noun,
                "at_place": f"{place.preposition} the {place.noun}",
            }
        elif leader == "friend":
            self._bound["friend"] = self.pick([n for n in NAMES if n != self._hero()]).name
        elif leader == "kind":
            self._bound["kind"] = self._hero_kind()
        elif leader == "friend_kind":
            self._bound["friend_kind"] = self._pick_unlike(ANIMALS, "kind")
        else:
            self._bind_word(leader)

    def _bind_hero(self) -> None:
        name = self.pick(NAMES)
        self._bound |= {"hero": name.name, "he": name.he, "him": name.him, "his": name.his}

    def _hero(self) -> Name:
        hero = self.word("hero")
        return next(name for name in NAMES if name.name == hero)

    def _hero_kind(self) -> str:
        # Half of the heroes are children, or one would hardly ever meet a boy among the animals.
        return self.pick(ANIMALS) if self.pick((True, False)) else self._hero().child

    def _bind_word(self, slot: str) -> None:
        base = TWINS.get(slot, slot)
        twin = next((other for other, of in TWINS.items() if of == slot), base)
        self._bound[slot] = self._pick_unlike(WORDS[base], twin)

    def _pick_unlike(self, options: Sequence[str], other: str) -> str:
        """Return an option that the other slot does not hold, if that slot is bound at all."""
        return self.pick([word for word in options if word != self._bound.get(other)])


def tell(rng: random.Random) -> Story:
    """Return the next story of this stream of random numbers."""
    teller = _Teller(rng)
    opening = teller.pick((INTRODUCTIONS, DEPARTURES))
    sentences = teller.sentences(opening)
    # Every opening names the place.
    sentences += teller.sentences(teller.pick(PLOTS_AT[teller.word("place")]))
    sentences += teller.sentences(CLOSINGS)
    return Story(tuple(sentences), teller.nats)


def stories(seed: int) -> Iterator[Story]:
    """Yield stories without end, always the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield tell(rng)
