"""Plots in which the hero gives, learns, grows or finds something."""

from typing import Final

from tools.demo_model.frame import Plot

SHARE: Final[Plot] = (
    (
        "{He} had a {flavour} {food} in {his} bag.",
        "{His} mother gave {him} a {flavour} {food}.",
        "{He} sat down to eat a {flavour} {food}.",
    ),
    (
        "The {food} smelled very good.",
        "{He} was hungry and wanted to eat it.",
        "",
    ),
    (
        "Then {he} saw a {friend_trait} {friend_kind} named {friend}.",
        "A {friend_trait} {friend_kind} named {friend} came and sat next to {him}.",
        "Next to {him} sat {friend}, a {friend_trait} {friend_kind}.",
    ),
    (
        "{friend} looked {sad} and hungry.",
        "The {friend_kind} had no food and was {sad}.",
        "{friend} looked at the {food} with big eyes.",
    ),
    (
        '"Are you hungry, {friend}?" asked {hero}.',
        '"Would you like some {food}, {friend}?" asked {hero}.',
        '"Do you want some of my {food}?" {he} asked.',
    ),
    (
        '"Yes, I am very hungry," said {friend}.',
        '"I did not eat all day," said the {friend_kind}.',
        '"Yes, please," said {friend}.',
    ),
    (
        "So {hero} gave half of the {food} to {friend}.",
        "{hero} broke the {food} in two and gave {friend} the big half.",
        '"Then we can share the {food}," said {hero}.',
    ),
    (
        "{friend} ate it and was {happy}.",
        '"This {food} is so {flavour}!" said {friend}.',
        '"Thank you, {hero}," said the {friend_kind}.',
    ),
    (
        "{hero} felt {happy} too.",
        "Now {friend} was not {sad} any more.",
        "The {food} tasted better with a friend.",
    ),
    ("{He} learned that it is good to share.", ""),
)

GIFT: Final[Plot] = (
    (
        "It was the birthday of {his} friend {friend} the {friend_kind}.",
        "{His} friend {friend} the {friend_kind} had a birthday.",
    ),
    (
        "{hero} wanted to give {friend} a {colour} {toy}.",
        "{hero} made a {colour} {toy} for {friend}.",
        "{hero} had a {colour} {toy} for the {friend_kind}.",
    ),
    (
        "{He} put the {toy} in a big {other_colour} box.",
        "{He} hid the {toy} {hiding}.",
        "{He} held the {toy} behind {his} back.",
    ),
    (
        '"Do you think {friend} will like it?" {he} asked {his} mother.',
        "{hero} was a little nervous.",
        "{hero} could not wait.",
    ),
    (
        "Then the {friend_kind} came.",
        "At last, {friend} came to the {place}.",
    ),
    (
        '"Happy birthday, {friend}!" said {hero}.',
        '"This is for you, {friend}," said {hero}.',
        "{hero} sang a birthday song for {friend}.",
    ),
    (
        "{friend} saw the {colour} {toy} and was {happy}.",
        '"A {colour} {toy}!" said {friend}.',
        "When {friend} saw the {toy}, the {friend_kind} jumped for joy.",
    ),
    (
        '"I always wanted a {toy}," said {friend}.',
        '"{Colour} is the colour I like best," said {friend}.',
        '"Thank you, {hero}," said the {friend_kind}.',
    ),
    (
        "Then they ate a {flavour} {food}.",
        "They played with the {toy} until it was dark.",
        "There was a {flavour} {food} for all {number} friends.",
    ),
    ("{hero} was {happy} that {friend} liked the {toy}.", "{hero} felt {happy}.", ""),
)

LEARN: Final[Plot] = (
    (
        "{He} wanted to learn to {skill}.",
        "There {he} saw {friend} the {friend_kind}, who could {skill}.",
        '"I wish I could {skill}," said {hero}.',
    ),
    (
        "{He} tried {number} times, but it did not work.",
        "But it is hard to {skill}.",
        "{He} tried to {skill}, but {he} could not.",
    ),
    (
        "{hero} was {sad}.",
        "{He} was {angry} and wanted to stop.",
        '"I will never learn it," said {hero}.',
    ),
    (
        "{friend} the {friend_kind} saw {him} and smiled.",
        "{His} friend {friend} the {friend_kind} sat down next to {him}.",
    ),
    (
        '"I can show you how to {skill}," said {friend}.',
        '"It was hard for me too, {hero}," said the {friend_kind}.',
        '"You must try again and again," said {friend}.',
    ),
    (
        "So {hero} tried again.",
        "{hero} looked at {friend} and did the same.",
        "They tried it together, very slowly.",
    ),
    (
        "After {number} days, {he} could do it.",
        "It went better and better.",
        "And then it worked!",
    ),
    (
        '"Look, {friend}, I can {skill}!" said {hero}.',
        "Now {hero} could {skill}.",
        "{hero} could {skill} even better than {friend}.",
    ),
    (
        '"Well done, {hero}!" said the {friend_kind}.',
        "{friend} was {happy} for {him}.",
        "{hero} was very {happy}.",
    ),
    ("{He} learned that it is good to try again.", ""),
)

SEED: Final[Plot] = (
    (
        "There {he} found a tiny seed {hiding}.",
        "{His} mother gave {him} a tiny seed.",
        "{He} had a tiny seed in {his} hand.",
    ),
    (
        "{hero} put the seed into the ground.",
        "{hero} made a hole and put the seed in it.",
    ),
    (
        "Every {daytime}, {he} gave it water.",
        "{He} gave it water for {number} days.",
        "{He} sang to it about {song}.",
    ),
    (
        "But the seed did not grow.",
        "For a long time, there was nothing to see.",
        "But {he} could see only mud.",
    ),
    (
        "{hero} felt {sad}.",
        '"Why does it not grow?" {he} asked.',
        '"My seed will never grow," said {hero}, and {he} was {sad}.',
    ),
    (
        "{His} friend {friend} the {friend_kind} came to see the seed.",
        "Then a {friend_trait} {friend_kind} named {friend} came by.",
    ),
    (
        '"You must wait, {hero}," said {friend}.',
        '"Good things take time," said the {friend_kind}.',
        "{friend} told {him} to wait for the sun.",
    ),
    (
        "So {hero} waited and waited.",
        "After {number} more days, the sun was warm.",
        "Then there was rain, and then there was sun.",
    ),
    (
        "At last, a {colour} {flower} grew out of the ground.",
        "One {daytime}, {he} saw a {colour} {flower}.",
        "And then there was a beautiful {colour} {flower}!",
    ),
    (
        '"Look, {friend}, my {flower} is here!" said {hero}.',
        "{hero} was {happy} to see the {flower}.",
        "{hero} danced around the {flower}.",
    ),
    (
        "{He} showed the {flower} to {friend}.",
        '"That is a beautiful {flower}," said {friend}.',
        "{He} gave the {colour} {flower} to {his} mother.",
    ),
)

NIGHT: Final[Plot] = (
    (
        "Soon it was night and the sky was dark.",
        "Then the sun went down.",
        "{He} stayed there until it was dark.",
    ),
    (
        "{hero} could not find the way home.",
        "{hero} did not know the way back.",
        '"Where is my home?" said {hero}.',
    ),
    (
        "{He} was {scared} of the dark.",
        "{He} felt {scared} and {sad}.",
        "{He} sat down {hiding} and was {scared}.",
    ),
    (
        "Then {he} saw a small {glow} light.",
        "Then there was a {glow} light {elsewhere}.",
    ),
    (
        "It was {friend}, a {friend_trait} {friend_kind} with a lantern.",
        "A {friend_trait} {friend_kind} named {friend} held a lantern.",
    ),
    (
        '"What do you do here in the dark, {hero}?" asked {friend}.',
        '"Are you lost?" asked the {friend_kind}.',
        '"Do not be {scared}," said {friend}.',
    ),
    (
        '"I cannot find the way home," said {hero}.',
        '"I am lost and {scared}," {he} said.',
        '"Please help me, {friend}," said {hero}.',
    ),
    (
        '"I know the way," said the {friend_kind}.',
        '"Come with me, I will take you home," said {friend}.',
    ),
    (
        "They walked home under the stars.",
        "They followed the {glow} light through the dark.",
        "{friend} held {his} hand all the way and sang about {song}.",
    ),
    (
        "Soon {hero} was home and was not {scared} any more.",
        "{hero} was {happy} to see {his} mother again.",
        "At the door, {hero} thanked {friend}.",
    ),
)

FIND: Final[Plot] = (
    (
        "There {he} found an old {box} {hiding}.",
        "{He} saw a {colour} {box} {hiding}.",
        "{He} fell over an old {box}.",
    ),
    (
        '"What is in this {box}?" said {hero}.',
        "{hero} could not open the {box}.",
        "The {box} was very heavy.",
    ),
    (
        "So {he} called {his} friend {friend}, a {friend_trait} {friend_kind}.",
        "So {he} took it to {friend}, a {friend_trait} {friend_kind}.",
    ),
    (
        '"I found a {box}," said {hero}.',
        '"Please help me to open it, {friend}," said {hero}.',
        '"Look at this {box}, {friend}!" said {hero}.',
    ),
    (
        "{friend} opened the {box} with a {opener}.",
        "They pulled and pulled until it opened.",
        "The {friend_kind} knew how to open it.",
    ),
    (
        "In the {box} there was a {treasure}.",
        "They looked into it and saw a {treasure}.",
        "Out of the {box} fell a {treasure}.",
    ),
    (
        '"Somebody must have lost it," said {friend}.',
        '"It is beautiful," said the {friend_kind}.',
        "{hero} had never seen a {treasure} like that.",
    ),
    (
        '"We must give it back," said {hero}.',
        '"You can keep it, {friend}," said {hero}.',
        '"It is for you and me," said {hero}.',
    ),
    (
        "{friend} was {happy} about that.",
        '"That is a good idea, {hero}," said {friend}.',
        "The {friend_kind} gave {him} a hug.",
    ),
    (
        "They put the {box} back {hiding}.",
        "{hero} felt {happy}, even without the {box}.",
        "",
    ),
)
