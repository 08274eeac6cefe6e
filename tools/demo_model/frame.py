"""How every story begins and ends, whatever its plot.

A step is a tuple of sentences to choose from, the empty one standing for no sentence at all.
"""

from typing import Final

Step = tuple[str, ...]
Plot = tuple[Step, ...]

# The hero is introduced, then goes out.
INTRODUCTIONS: Final[Plot] = (
    (
        "Once upon a time, there was a {trait} {kind} named {hero}.",
        "Once upon a time, a {trait} {kind} named {hero} lived near the {place}.",
        "There once was a {trait} {kind} named {hero} who loved to {hobby}.",
        "{hero} was a {trait} {kind}.",
        "{hero} was a {trait} {kind} who loved to {hobby}.",
        "Long ago, there lived a {trait} {kind} named {hero}.",
    ),
    (
        "One {weather} {daytime}, {he} went to the {place}.",
        "One {daytime}, {hero} walked to the {place} all alone.",
        "One {daytime}, {he} took a walk to the {place}.",
        "One {weather} {daytime}, {hero} was {at_place}.",
    ),
)

# The hero is introduced on the way.
DEPARTURES: Final[Plot] = (
    (
        "One day, a {trait} {kind} named {hero} went to the {place}.",
        "One {weather} {daytime}, a {trait} {kind} named {hero} ran to the {place}.",
        "On a {weather} {daytime}, a {trait} {kind} named {hero} was {at_place}.",
        "{At_place}, there was a {trait} {kind} named {hero}.",
        "{hero} the {kind} went to the {place} one {weather} {daytime}.",
    ),
)

CLOSINGS: Final[Plot] = (
    (
        "It was a very good day.",
        "That night, {hero} slept well.",
        "{hero} could not stop smiling.",
        "{hero} and {friend} met again the next day.",
        "{hero} never forgot that {daytime} {at_place}.",
        "From then on, {hero} and {friend} were best friends.",
        "{hero} told {his} mother all about {friend}.",
    ),
)
