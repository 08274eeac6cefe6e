"""What a careful reader would find wrong in a story, whoever wrote it: the grammar or the model."""

import re
from collections.abc import Iterator
from typing import Final

from tools.demo_model.lexicon import ANIMALS, NAMES, WORDS

_FORMS: Final = {name.name: {name.he, name.him, name.his} for name in NAMES}
_PRONOUNS: Final = set[str]().union(*_FORMS.values())
_COLOURED: Final = re.compile(rf"\b({'|'.join(WORDS['colour'])}) ({'|'.join(WORDS['toy'])})\b")
_TOY: Final = re.compile(rf"\b(?:his|her|the) ({'|'.join(WORDS['toy'])})\b")

_NAME: Final = f"({'|'.join(_FORMS)})"
_TWICE: Final = re.compile(rf"\b{_NAME} and \1\b")
_SELF_TALK: Final = re.compile(rf'"[^"]*\b{_NAME}\b[^"]*" (?:said|asked|called) \1\b')


def faults(text: str) -> list[str]:
    """Return what is wrong in a story, in words; nothing if all agrees."""
    return list(_faults(text))


def _faults(text: str) -> Iterator[str]:
    words = re.findall(r"\w+", text)
    names = [word for word in words if word in _FORMS]
    if not 1 <= len(set(names)) <= 2:
        yield f"{len(set(names))} names"
    if names and not {word.lower() for word in words} & _PRONOUNS <= _FORMS[names[0]]:
        yield f"a pronoun that is not {names[0]}'s"
    if _TWICE.search(text):
        yield "one name for two"
    if _SELF_TALK.search(text):
        yield "a speaker who speaks to the same name"
    animals = set(words) & set(ANIMALS)
    if len(animals) > 2:
        yield f"{len(animals)} animals"
    if len(set(words) & set(WORDS["sad"])) > 1:
        yield "another sad word"
    coloured = set(_COLOURED.findall(text))
    if len(coloured) > 1:
        yield f"{len(coloured)} coloured toys"
    if coloured and not set(_TOY.findall(text)) <= {toy for _, toy in coloured}:
        yield "another toy"
    if re.search(r"\b[Aa] [aeiouAEIOU]|\b[Aa]n [^aeiouAEIOU]", text):
        yield "a wrong article"
    if text.count('"') % 2:
        yield "an open quotation"
