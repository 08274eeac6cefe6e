"""The words that the story grammar may put into its slots."""

from typing import Final, NamedTuple


class Name(NamedTuple):
    """A first name with the pronouns that go with it."""

    name: str
    he: str
    him: str
    his: str
    child: str


class Place(NamedTuple):
    """A place with the preposition of being there: ``in`` the forest, ``by`` the river."""

    noun: str
    preposition: str


def _words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


_HE = _words("Tom Ben Sam Max Leo Finn Jack Hugo Theo Milo Pip Otto Felix Bruno")
_SHE = _words("Mia Lily Anna Rosie Ella Zoe Ruby Nora Clara Poppy Daisy Ivy Molly Luna")

NAMES: Final[tuple[Name, ...]] = (
    *(Name(name, "he", "him", "his", "boy") for name in _HE),
    *(Name(name, "she", "her", "her", "girl") for name in _SHE),
)

PLACES: Final[tuple[Place, ...]] = (
    *(Place(noun, "in") for noun in _words("forest park garden meadow orchard valley village")),
    *(Place(noun, "by") for noun in _words("river lake pond")),
    *(Place(noun, "on") for noun in _words("hill farm beach bridge")),
    *(Place(noun, "at") for noun in _words("market mill castle")),
)

ANIMALS: Final[tuple[str, ...]] = _words(
    "fox bear rabbit mouse cat dog duck owl frog hedgehog squirrel turtle pony lamb otter "
    "elephant goat pig"
)

# Each of these slots takes one word (or one phrase) whatever the other slots hold.
WORDS: Final[dict[str, tuple[str, ...]]] = {
    "trait": _words(
        "little small young tiny kind brave shy clever cheerful quiet curious gentle eager playful"
    ),
    "friend_trait": _words("old wise friendly big funny grey helpful polite"),
    "hobby": _words("sing dance run jump paint read climb draw explore hide"),
    "weather": _words("sunny windy cloudy warm cold foggy bright cool quiet"),
    "daytime": ("morning", "afternoon", "evening", "day"),
    "toy": _words(
        "ball kite drum doll boat train book hat scarf bucket whistle lantern umbrella puppet "
        "flute basket"
    ),
    "colour": _words("red blue green yellow orange purple white silver golden pink brown black"),
    "food": _words("apple cake pie cookie pear sandwich carrot bun plum waffle"),
    "flavour": _words("sweet warm fresh juicy tasty big nice"),
    "flower": _words("rose tulip daffodil sunflower bluebell violet"),
    "thing": _words("tower house castle bridge raft swing cart"),
    "stuff": _words("stones sticks sand mud wood leaves straw"),
    "treasure": _words("map key coin bell shell letter ring feather"),
    "box": _words("box bag bottle chest jar"),
    "skill": (
        "whistle",
        "dance",
        "juggle",
        "skip",
        "swim",
        "count to ten",
        "stand on one leg",
        "tie a knot",
        "spell a word",
        "play a song",
    ),
    "song": ("the moon", "the stars", "the sea", "the rain", "the wind", "the sun"),
    "hiding": (
        "under a bench",
        "behind a tree",
        "under a bush",
        "behind a rock",
        "in the tall grass",
        "under a log",
        "behind a fence",
        "in a deep hole",
        "under some leaves",
        "behind a wall",
        "near an old gate",
    ),
    "trap": ("deep hole", "muddy ditch", "old net", "thorn bush", "broken fence"),
    "tool": ("rope", "long stick", "ladder", "strong branch"),
    "opener": ("stick", "stone", "hammer", "spoon"),
    "glow": ("silver", "golden", "yellow", "white", "orange"),
    "noise": _words("knock growl squeak rustle howl thump"),
    "critter": _words("beetle snail bird lizard kitten butterfly"),
    "shelter": ("a big tree", "an old roof", "a wide leaf", "a stone arch", "a red tent"),
    "sad": ("sad", "upset", "unhappy", "gloomy"),
    "scared": ("scared", "afraid", "frightened", "nervous"),
    "angry": ("angry", "cross", "grumpy", "mad"),
    "happy": ("happy", "glad", "proud", "joyful", "delighted", "pleased"),
    "number": ("two", "three", "four", "five", "six", "seven"),
}

# The slot on the left shares the list of the slot on the right; the two never hold the same word.
TWINS: Final[dict[str, str]] = {"elsewhere": "hiding", "other_colour": "colour"}
