"""Plots in which something goes wrong and a friend helps."""

from typing import Final

from tools.demo_model.frame import Plot

_MEETING = (
    "Just then, a {friend_trait} {friend_kind} named {friend} came by.",
    "Soon {he} met a {friend_trait} {friend_kind} named {friend}.",
    "A {friend_kind} named {friend} saw {him} and stopped.",
)

_THANKS = (
    '"Thank you, {friend}!" said {hero}.',
    '"You are so kind, {friend}," said {hero} with a smile.',
    "{hero} thanked the {friend_kind} and gave {friend} a hug.",
)

LOST: Final[Plot] = (
    (
        "{He} took {his} {colour} {toy} along.",
        "{He} had a {colour} {toy} with {him}.",
        "{He} wanted to play with {his} {colour} {toy}.",
    ),
    (
        "But soon the {toy} was gone.",
        "But then {he} could not see the {toy} anywhere.",
        "When {he} looked around, the {toy} was not there.",
    ),
    (
        "{hero} felt very {sad}.",
        "{hero} was so {sad} that {he} began to cry.",
        '"Oh no, where is my {toy}?" said {hero}, and {he} felt {sad}.',
    ),
    _MEETING,
    (
        '"Why are you so {sad}, {hero}?" asked {friend}.',
        '"What is wrong?" asked the {friend_kind}.',
        '"Can I help you?" asked {friend}.',
    ),
    (
        '"I lost my {colour} {toy}," said {hero}.',
        '"I cannot find my {toy}," said the {kind}.',
        '"My {colour} {toy} is gone," {he} said.',
    ),
    (
        '"I will help you look for it," said {friend}.',
        '"Do not worry, we can look together," said the {friend_kind}.',
        "",
    ),
    (
        "They looked {elsewhere}, but the {toy} was not there.",
        "First they looked {elsewhere}.",
        "They looked for the {toy} for a long time.",
    ),
    (
        "At last, {friend} found the {toy} {hiding}.",
        "In the end, the {colour} {toy} was {hiding}.",
        "Then {hero} saw {his} {toy} {hiding}.",
    ),
    (
        "{hero} was not {sad} any more.",
        "Now {hero} felt {happy}.",
        "{hero} was {happy} to have the {colour} {toy} back.",
    ),
    _THANKS,
    ("From that day on, {hero} took good care of {his} {toy}.", ""),
)

NOISE: Final[Plot] = (
    (
        "Suddenly, {he} heard a loud {noise}.",
        "Then there was a strange {noise} {hiding}.",
        "All at once, {hero} heard a {noise} {hiding}.",
    ),
    (
        "{hero} was very {scared}.",
        "{He} felt {scared} and began to shake.",
        "{hero} was so {scared} that {he} could not move.",
    ),
    (
        '"Who is there?" asked {hero}.',
        '"What was that {noise}?" {he} said in a small voice.',
        "{He} wanted to run home.",
    ),
    (
        "{His} friend {friend} the {friend_kind} heard the {noise} too.",
        "Then {his} friend {friend} the {friend_kind} came to {him}.",
    ),
    (
        '"Do not be {scared}," said {friend}.',
        '"We can look at it together," said the {friend_kind}.',
        '"Hold my hand, {hero}," said {friend}.',
    ),
    (
        "Step by step, they came closer.",
        "They walked slowly and looked {hiding}.",
        "{hero} took a deep breath and looked {hiding}.",
    ),
    (
        "It was only a little {critter}!",
        "There sat a tiny {critter}.",
        "They found a small {critter} that could not get home.",
    ),
    (
        '"It is just a {critter}," said {hero}, and {he} began to laugh.',
        '"Hello, little {critter}," said {hero}.',
        "The {critter} looked at {hero} and was {scared} too.",
    ),
    (
        "{hero} was not {scared} any more.",
        "Now {hero} felt {happy} and brave.",
        "{hero} and {friend} took the {critter} home.",
    ),
    ("After that day, no {noise} could make {him} {scared}.", ""),
)

STUCK: Final[Plot] = (
    (
        "{He} heard someone call for help.",
        '"Help, help!" someone called.',
        "There {he} heard a sad voice.",
    ),
    (
        "It was {friend}, a {friend_trait} {friend_kind}, who was stuck in a {trap}.",
        "A {friend_trait} {friend_kind} named {friend} was stuck in a {trap}.",
    ),
    (
        '"Please help me, I cannot get out," said {friend}.',
        "{friend} was very {scared}.",
        '"I am so {scared}," said the {friend_kind}.',
    ),
    (
        '"Do not be {scared}, I will help you," said {hero}.',
        '"Wait here, {friend}," said {hero}.',
        "{hero} wanted to help the {friend_kind}.",
    ),
    (
        "First {he} pulled with both hands, but it did not work.",
        "{He} pulled and pulled, but {friend} did not move.",
        "{He} thought for a long time.",
    ),
    (
        "Then {hero} had a good idea and got a {tool}.",
        "Then {hero} ran home and came back with a {tool}.",
        "At last {he} found a {tool} {hiding}.",
    ),
    (
        "{He} used the {tool} to pull {friend} out.",
        "With the {tool}, {he} got the {friend_kind} out of the {trap}.",
    ),
    (
        "{friend} was free and felt {happy}.",
        '"I am free!" said {friend}.',
        '"You saved me, {hero}!" said the {friend_kind}.',
    ),
    (
        "To say thank you, {friend} gave {him} a {flavour} {food}.",
        "The {friend_kind} shared a {food} with {him}.",
        "Then they both laughed.",
    ),
)

RAIN: Final[Plot] = (
    (
        "{He} wanted to {hobby} there.",
        "{He} had a {colour} {toy} and wanted to play.",
        "{He} sat down {hiding} and sang a song.",
    ),
    (
        "But then dark clouds came and it began to rain.",
        "But soon the sky was dark and the rain fell.",
        "Suddenly, it began to rain.",
    ),
    (
        "Soon {hero} was cold and wet.",
        "{hero} was wet and felt {sad}.",
        '"Oh no, I am all wet!" said {hero}.',
    ),
    (
        "{His} friend {friend} the {friend_kind} called {his} name.",
        "Then a {friend_trait} {friend_kind} named {friend} called {him}.",
    ),
    (
        "{friend} was dry under {shelter}.",
        "The {friend_kind} stood under {shelter}.",
        "They ran as fast as they could to {shelter}.",
    ),
    (
        "They sat down and waited for the sun.",
        "{hero} and {friend} sat close to stay warm.",
        "There they told each other stories.",
    ),
    (
        "{friend} had a {flavour} {food}, and they shared it.",
        "They sang a song about {song}.",
        "The {friend_kind} told {him} a story about {song}.",
    ),
    (
        "After some time, the rain stopped.",
        "Then the sun came out again.",
        "Soon there was a rainbow in the sky.",
    ),
    (
        '"Rain can be fun with a friend," said {hero}.',
        "{hero} felt {happy} and dry.",
        "{hero} and {friend} jumped in the mud and laughed.",
    ),
)

QUARREL: Final[Plot] = (
    (
        "{He} played there with {his} friend {friend} the {friend_kind}.",
        "{His} friend {friend} the {friend_kind} was there too.",
    ),
    (
        "{hero} had a {colour} {toy}.",
        "{hero} showed {friend} {his} new {colour} {toy}.",
        "They found a {colour} {toy} {hiding}.",
    ),
    (
        '"I want the {toy}!" said {friend}.',
        "{friend} wanted to have the {toy} too.",
        "The {friend_kind} took the {toy} and ran away.",
    ),
    (
        '"No, it is mine!" said {hero}.',
        '"This is my {toy}, {friend}!" said {hero}.',
        "{hero} did not want to share.",
    ),
    (
        "{hero} was very {angry}.",
        "{He} was so {angry} that {he} went away.",
        "Now they were both {angry}.",
    ),
    (
        "After some time, {hero} felt {sad} without {friend}.",
        "But it was no fun to play alone.",
        "{hero} sat down {elsewhere} and thought about it.",
    ),
    (
        '"I am sorry that I was {angry}," said {hero}.',
        '"I am sorry, {friend}," {he} said.',
        '"You can have the {colour} {toy}," said {hero}.',
    ),
    (
        '"I am sorry too," said {friend}.',
        '"We can share it, {hero}," said the {friend_kind}.',
        "{friend} gave {him} a hug.",
    ),
    (
        "Then they played with the {toy} together.",
        "They took turns with the {colour} {toy}.",
        "Nobody was {angry} any more.",
    ),
)

BROKEN: Final[Plot] = (
    (
        "{He} wanted to build a {thing} out of {stuff}.",
        '"I will build a {thing}!" said {hero}.',
        "{He} looked for {stuff} to build a {thing}.",
    ),
    (
        "{He} worked all day long.",
        "{He} used {stuff} and a lot of time.",
        "Bit by bit, the {thing} grew.",
    ),
    (
        "But then a strong wind came and the {thing} fell down.",
        "But the {thing} was too weak, and it broke.",
        "But all at once, the {thing} fell apart.",
    ),
    (
        "{hero} was very {sad}.",
        "{hero} felt {sad} and wanted to go home.",
        '"My {thing} is broken," said {hero}, and {he} was {sad}.',
    ),
    _MEETING,
    (
        '"Do not be {sad}," said {friend}.',
        '"That was a nice {thing}," said the {friend_kind}.',
        '"You can try again, {hero}," said {friend}.',
    ),
    (
        '"We can build it together," said {friend}.',
        "{friend} had a {tool} and knew what to do.",
        "The {friend_kind} showed {him} a better way.",
    ),
    (
        "{hero} and {friend} built the {thing} again.",
        "So they began again, and this time they used more {stuff}.",
        "They worked until it was dark.",
    ),
    (
        "This time, the {thing} did not fall.",
        "Now the {thing} was big and strong.",
        "The new {thing} was even better.",
    ),
    (
        "{hero} was {happy} and not {sad}.",
        "{hero} was very {happy}.",
        "They both felt {happy}.",
    ),
    (*_THANKS, ""),
)
